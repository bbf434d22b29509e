"""Names of hosts, as requests and flags write them."""

import ipaddress
import re

HOST = r"\[[0-9a-f:.]+\]|[a-z0-9_.-]+"
"""A name or an address, as written in a URL."""
AUTHORITY = re.compile(rf"({HOST})(?::\d*)?", re.ASCII | re.IGNORECASE)


def is_host(text: str) -> bool:
    """Tell whether a text is a host name or an address, without a port."""
    return address_of(text) is not None or re.fullmatch(HOST, text, re.ASCII | re.IGNORECASE) is not None


def host_of(authority: str) -> str | None:
    """Return the host of HOST, HOST:PORT or [IPv6]:PORT, in the form that is compared; None for any other name."""
    matched = AUTHORITY.fullmatch(authority)
    return canonical(matched[1]) if matched else None


def canonical(host: str) -> str:
    """Return a name in lower case and without the root's dot, or an address as Python writes it."""
    host = host.strip("[]").lower()
    address = address_of(host)
    return host.removesuffix(".") if address is None else str(address)


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address, or None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
