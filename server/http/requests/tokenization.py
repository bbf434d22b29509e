"""Tokenize prompts: long ones in a thread, and refuse early if they cannot fit the context."""

from collections.abc import Coroutine, Iterable
from typing import Any

from .. import offload
from ..errors import NO_TOKEN
from . import bounds

SURELY_FAST_BYTES = 200_000
"""A prompt up to this size is tokenised fast, and so not checked before."""
SLICE_CHARACTERS = 8192
CUT_TOKENS = 32
"""Most tokens that a cut adds, in the pieces of a word on both sides."""
SHORT_CHARACTERS = 2048
"""A text up to this length is tokenised on the event loop: it takes less than a few milliseconds."""


class PromptLength:
    """Refuses prompts beyond the context early. context_length: tokens of prompt and answer."""

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        self.context_length = context_length
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
        # In characters of the vocabulary's encoding, which has one for each byte.
        self._longest = max(map(len, vocabulary), default=0)

    def check(self, texts: Iterable[str], param: str) -> None:
        """Raise ApiError if the texts of one prompt are surely longer than the context. May take long; for a thread.

        Reads texts in slices until the context is full, so that a longer prompt takes no more time than one that fits.
        """
        texts = list(texts)
        characters = sum(map(len, texts))
        # A normalizer may make one character of several.
        if self._longest and characters > 4 * self.context_length * self._longest:
            raise bounds.too_long(param, self.context_length)
        if self._backend is None:
            return
        if characters <= SURELY_FAST_BYTES and sum(len(text.encode()) for text in texts) <= SURELY_FAST_BYTES:
            return
        tokens = 0
        for text in texts:
            for start in range(0, len(text), SLICE_CHARACTERS):
                piece = text[start : start + SLICE_CHARACTERS]
                tokens += len(self._backend.encode(piece, add_special_tokens=False)) - CUT_TOKENS
                if tokens > self.context_length:
                    raise bounds.too_long(param, self.context_length)


def install(manager: Any) -> None:
    """Make SGLang's tokenizer manager tokenize all but short texts in a thread, and refuse texts without tokens.

    Its tokenizer has to release the interpreter lock meanwhile.
    """
    tokenize = manager._tokenize_texts
    has_a_thread = getattr(manager, "async_dynamic_batch_tokenizer", None) is not None

    async def tokenize_beside_the_loop(texts: str | list[str], is_cross_encoder: bool = False) -> Any:
        characters = len(texts) if isinstance(texts, str) else sum(map(len, texts))
        if has_a_thread or characters <= SHORT_CHARACTERS:
            result = await tokenize(texts, is_cross_encoder)
        else:
            result = await offload.run(characters, _finish, tokenize(texts, is_cross_encoder))
        ids, _ = result
        if not ids or not all(ids if isinstance(texts, list) else [ids]):
            raise ValueError(NO_TOKEN)
        return result

    manager._tokenize_texts = tokenize_beside_the_loop


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("tokenising waits for something")
