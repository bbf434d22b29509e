"""Refusals in one line."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from outrider.server.errors import UserError


def refuses(reason: str, call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The one line of the UserError that the call raises. reason: a regular expression of a part of it."""
    with pytest.raises(UserError) as refused:
        call(*args, **kwargs)
    said = str(refused.value)
    assert re.search(reason, said), said
    assert "\n" not in said
    return said
