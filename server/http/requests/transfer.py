"""Fields that a router adds to a request if prefill and decode are separate servers."""

from typing import Any

from ..errors import ApiError, invalid_value, unsupported
from .protocol import ChatRequest, TextRequest

ROUTER_FIELDS = {"bootstrap_port": 65535, "bootstrap_room": 2**63 - 1}
"""Numbers, with their largest values: the prefill server's port for transfers, and the request's room there."""
HOST = "bootstrap_host"
LONGEST_HOST = 253
NOWHERE = "2.2.2.2"
"""SGLang's address of a prefill server that sends no data: the prompt would be read from other requests' leftovers."""


def take(body: dict[str, Any], role: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the router's fields off the body. Raises ApiError if they are missing or wrong.

    role: `PluginConfig.role`; with "" the body stays as it is.
    """
    if not role:
        return body, {}
    fields = {name: body.get(name) for name in (HOST, *ROUTER_FIELDS)}
    if None in fields.values():
        raise ApiError(
            f"this is the {role} server of two; send requests to the router in front of both",
            param=next(name for name, value in fields.items() if value is None),
            code="missing_required_parameter",
        )
    host = fields[HOST]
    if not isinstance(host, str) or not 0 < len(host) <= LONGEST_HOST or host == NOWHERE:
        raise invalid_value(HOST, f"{HOST!r} has to be the name or address of one prefill server")
    for name, most in ROUTER_FIELDS.items():
        value = fields[name]
        if type(value) is not int or not 1 <= value <= most:
            raise invalid_value(name, f"{name!r} has to be one integer from 1 to {most}")
    return {name: value for name, value in body.items() if name not in fields}, fields


def check(request: ChatRequest | TextRequest) -> None:
    """Raise ApiError for a request that two servers cannot answer together."""
    if request.n != 1:
        raise unsupported("n", "prefill and decode are apart here, for one choice; send the request n times")
    if isinstance(request, TextRequest) and request.echo and request.logprobs is not None:
        raise unsupported("echo", "the prompt's logprobs stay on the prefill server; leave 'echo' or 'logprobs' out")
