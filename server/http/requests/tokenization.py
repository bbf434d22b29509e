"""Has SGLang's tokenizer manager tokenise all but short texts beside the event loop, and refuse texts of no token."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from .. import offload
from ..errors import NO_TOKEN

SHORT_CHARACTERS = 2048
"""A text up to this length is tokenised where it is: in less than a few milliseconds, whatever it says."""


def install(manager: Any) -> None:
    """manager: SGLang's, with a tokenizer that gives up the interpreter lock while it works."""
    tokenize = manager._tokenize_texts
    has_a_thread = getattr(manager, "async_dynamic_batch_tokenizer", None) is not None

    async def tokenize_beside_the_loop(texts: str | list[str], is_cross_encoder: bool = False) -> Any:
        characters = len(texts) if isinstance(texts, str) else sum(map(len, texts))
        if has_a_thread or characters <= SHORT_CHARACTERS:
            found = await tokenize(texts, is_cross_encoder)
        else:
            found = await offload.run(characters, _finish, tokenize(texts, is_cross_encoder))
        ids, _ = found
        if not ids or not all(ids if isinstance(texts, list) else [ids]):
            raise ValueError(NO_TOKEN)
        return found

    manager._tokenize_texts = tokenize_beside_the_loop


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("tokenising waits for something")
