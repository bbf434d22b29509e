"""The engine's part in lookups across requests: it adds prompts and finished answers to their owner's corpus."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

from outrider.drafters import corpora_file
from outrider.drafters.corpora import NO_CORPUS, Corpora, Name
from outrider.kernels.cpu import native

from ..config import PluginConfig
from ..options import RequestOptions

logger = logging.getLogger(__name__)

JOINED = 32
"""Tokens of a prompt that are added with the answer, so that the prompt's end is found before it: as many as a match
has at most."""
SAVE_SECONDS = 5.0
"""Time between two writes of the file, where anything has changed."""


class TextKeeper:
    """Adds prompts when they are read, answers when they are finished. file: keeps them; None: memory alone does."""

    def __init__(self, corpora: Corpora, file: Path | None = None, tokenizer: str = ""):
        self.corpora, self.file, self.tokenizer = corpora, file, tokenizer
        self._running: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._written = corpora.changes
        self._writing = threading.Lock()
        self._failed = False

    @classmethod
    def of(cls, config: PluginConfig, runner: Any) -> TextKeeper | None:
        """The keeper of a server that looks texts up across requests; None on any other, and without compiled kernels.

        All engines begin with the texts in the file, the first one writes it. Raises ValueError where it does not fit.
        """
        if not config.lookup_tokens or not native.available():
            return None
        corpora, file = Corpora(config.lookup_tokens), Path(config.lookup_store)
        if not config.lookup_store:
            return cls(corpora)
        vocab_size = runner.model_config.hf_text_config.vocab_size
        for name, contents in corpora_file.read(file, config.lookup_tokenizer, vocab_size):
            corpora.fill(name, contents)
        if (get_parallel().dp_rank or 0) > 0:
            return cls(corpora)
        keeper = cls(corpora, file, config.lookup_tokenizer)
        threading.Thread(target=keeper._save_again, name="lookup-store", daemon=True).start()
        return keeper

    def admit(self, reqs: Sequence[Any]) -> np.ndarray:
        """[R] numbers of corpora for SGLang's requests that are prefilled. A prompt is added with its first chunk."""
        numbers = np.full(len(reqs), NO_CORPUS, dtype=np.int64)
        for place, req in enumerate(reqs):
            name, stored = _place_of(req)
            if name is None:
                continue
            if req.rid not in self._running:
                self._running[req.rid] = req
                self.corpora.insert(name, req.origin_input_ids, secret=not stored)
            numbers[place] = self.corpora.number(name)
        return numbers

    def finished(self, rid: str) -> None:
        """A request has ended by itself or at its limit."""
        req = self._running.pop(rid, None)
        if req is None or isinstance(req.finished_reason, FINISH_ABORT):
            return
        name, stored = _place_of(req)
        if name is not None:
            text = [*req.origin_input_ids[-JOINED:], *req.output_ids_through_stop]
            self.corpora.insert(name, text, secret=not stored)

    def save(self) -> None:
        """Write what has changed. A file that cannot be written is an error in the log, once."""
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

    def _save_again(self) -> None:
        while True:
            time.sleep(SAVE_SECONDS)
            self.save()


def _place_of(req: Any) -> tuple[Name | None, bool]:
    """The corpus of a request's texts, None for none, and whether the file may keep them.

    A key's texts under an adapter have one of their own: another adapter says something else.
    """
    options = RequestOptions.from_custom_params(req.sampling_params.custom_params)
    if options.corpus is None:
        return None, options.stored
    return Name.of(options.corpus, req.cache_salt or "", req.lora_id or ""), options.stored
