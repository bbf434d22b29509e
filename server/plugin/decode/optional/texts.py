"""The engine's part in lookups across requests: it adds prompts and finished answers to their owner's corpus."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

from outrider.drafters import corpora_file
from outrider.drafters.corpora import NO_CORPUS, Corpora, Name
from outrider.kernels.cpu import native

from ...config import PluginConfig
from ...options import RequestOptions
from ..boundary import Boundary
from .part import OptionalPart

logger = logging.getLogger(__name__)

JOINED = 32
"""Last tokens of a prompt that are added with its answer, so that a match can span both: the longest match."""
KEPT_TOKENS = 1 << 18
"""Tokens of other requests kept for each key, 20 bytes each, and as many again under `cache_salt`s."""
ADDED = "outrider_text_added"
"""Attribute of SGLang's requests with added prompts."""
SAVE_SECONDS = 5.0
"""Least time between two writes of the file; it is written only if texts changed."""


class TextKeeper(OptionalPart):
    """Adds prompts when they are read and answers when they are finished, without image tokens.

    vocab_size: every token from there on is part of an image. file: keeps the texts; None: memory alone does.
    """

    part, column = "lookups", "corpora"

    def __init__(self, corpora: Corpora, vocab_size: int, file: Path | None = None, tokenizer: str = ""):
        self.corpora, self.vocab_size, self.file, self.tokenizer = corpora, vocab_size, file, tokenizer
        self._written = corpora.changes
        self._writing = threading.Lock()
        self._failed = False

    @classmethod
    def of(cls, config: PluginConfig, runner: Any, optional: Boundary) -> TextKeeper | None:
        """Return the keeper of a server with lookups across requests; None on any other, or without compiled kernels.

        All engines begin with the texts in the file, the first one writes it. Raises ValueError where it does not fit.
        optional: calls the writing, which may fail.
        """
        if not config.lookup_across or not native.available():
            return None
        corpora, file = Corpora(KEPT_TOKENS), Path(config.lookup_store)
        vocab_size = runner.model_config.hf_text_config.vocab_size
        if not config.lookup_store:
            return cls(corpora, vocab_size)
        for name, contents in corpora_file.read(file, config.lookup_tokenizer, vocab_size):
            corpora.fill(name, contents)
        if (get_parallel().dp_rank or 0) > 0:
            return cls(corpora, vocab_size)
        keeper = cls(corpora, vocab_size, file, config.lookup_tokenizer)
        threading.Thread(target=keeper._save_again, args=[optional], name="lookup-store", daemon=True).start()
        return keeper

    def admitted(self, req: Any) -> int:
        """Add a request's prompt, with the first chunk; return the number of its corpus."""
        name, stored = _place_of(req)
        if name is None:
            return NO_CORPUS
        if not hasattr(req, ADDED):
            setattr(req, ADDED, True)
            self._insert(name, req, req.origin_input_ids, stored)
        return self.corpora.number(name)

    def finished(self, req: Any) -> None:
        name, stored = _place_of(req)
        if name is not None and not isinstance(req.finished_reason, FINISH_ABORT):
            self._insert(name, req, [*req.origin_input_ids[-JOINED:], *req.output_ids_through_stop], stored)

    def _insert(self, name: Name, req: Any, tokens: Sequence[int], stored: bool) -> None:
        """Add tokens of a request; with images, each text before, between and after them."""
        texts = [tokens]
        if req.multimodal_inputs is not None:
            runs = itertools.groupby(tokens, lambda token: token < self.vocab_size)
            texts = [list(run) for is_text, run in runs if is_text]
        for text in texts:
            self.corpora.insert(name, text, secret=not stored)

    def save(self) -> None:
        """Write the changes. A file that cannot be written is an error in the log, once."""
        if self.file is None:
            return
        with self._writing:
            changes = self.corpora.changes
            if changes == self._written:
                return
            try:
                corpora_file.write(self.file, self.corpora.contents(), self.tokenizer)
            except OSError as error:
                if not self._failed:
                    logger.error("cannot write %s: %s; a restart would forget its texts", self.file, error)
                self._failed = True
            else:
                self._written, self._failed = changes, False

    def _save_again(self, optional: Boundary) -> None:
        while True:
            time.sleep(SAVE_SECONDS)
            optional.run("lookups", None, self.save)


def _place_of(req: Any) -> tuple[Name | None, bool]:
    """Return the corpus of a request's texts (None: none), and whether the file may keep them.

    A key has a separate corpus for each adapter, because adapters give different answers.
    """
    options = RequestOptions.from_custom_params(req.sampling_params.custom_params)
    if options.corpus is None:
        return None, options.stored
    return Name.of(options.corpus, req.cache_salt or "", req.lora_id or ""), options.stored
