"""The moment from which a request counts: its last byte is there.

Before that it costs the server a connection, and it may never come whole.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Message, Receive


def once_whole(receive: Receive, begin: Callable[[], object]) -> Receive:
    """`receive` of an ASGI app, which calls `begin` once, as it hands on the request's last byte."""
    begun = False

    async def receiving() -> Message:
        nonlocal begun
        message = await receive()
        if not begun and message["type"] == "http.request" and not message.get("more_body"):
            begun = True
            begin()
        return message

    return receiving
