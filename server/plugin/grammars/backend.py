"""SGLang's xgrammar backend in the scheduler, bounded in memory, compilation and time to follow a grammar."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    GrammarStats,
    InvalidGrammarObject,
)
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

from .budget import GrammarBudget
from .folder import CompileOptions, GrammarFolder, name_of
from .forced import ForcedText
from .json_style import JsonStyle
from .rewrite import rewritten
from .spelling import Spelling

CACHE_BYTES = 64 * 1024 * 1024
"""Bytes of compiled grammars that the scheduler keeps."""
ENTRY_BYTES = 64 * 1024
"""Bytes of each grammar in addition to xgrammar's count: its matcher and objects."""
NICE = 5
"""Niceness of the compiling thread."""
TOO_SLOW = "the request's grammar takes too long to follow; simplify its repetitions and alternatives"


class GrammarCache:
    """Replaces SGLang's dictionary of grammars: keeps the latest used, up to a number of bytes. registry: a process can
    register a metric only once in it; tests pass their own."""

    def __init__(self, limit: int = CACHE_BYTES, registry: CollectorRegistry = REGISTRY) -> None:
        self._limit = limit
        self._kept: OrderedDict[tuple[str, str], tuple[BaseGrammarObject, int]] = OrderedDict()
        self.bytes = 0
        self._gauge = Gauge(
            "outrider_grammar_cache_bytes",
            "Compiled grammars that the scheduler keeps.",
            multiprocess_mode="livesum",
            registry=registry,
        )

    def get(self, key: tuple[str, str]) -> BaseGrammarObject | None:
        if (kept := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        refused = getattr(followed(kept[0]), "refused", None)
        return InvalidGrammarObject(TOO_SLOW) if refused is not None and refused.is_set() else kept[0]

    def __setitem__(self, key: tuple[str, str], grammar: BaseGrammarObject) -> None:
        self._drop(key)
        size = ENTRY_BYTES + 2 * len(key[1]) + compiled_bytes(grammar)
        self._kept[key] = grammar, size
        self.bytes += size
        while self.bytes > self._limit:
            self._drop(next(iter(self._kept)))
        self._gauge.set(self.bytes)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0
        self._gauge.set(0)

    def _drop(self, key: tuple[str, str]) -> None:
        self.bytes -= self._kept.pop(key, (None, 0))[1]


def compiled_bytes(grammar: Any) -> int:
    """Return the bytes of an SGLang object's compiled grammar, as xgrammar counts them; 0 without one."""
    compiled = getattr(followed(grammar), "ctx", None)
    return 0 if compiled is None else int(compiled.memory_size_bytes)


def followed(grammar: Any) -> Any:
    """Return the grammar itself, without SGLang's wrapper that lets a model think first."""
    return getattr(grammar, "grammar", grammar)


class BoundedGrammar(XGrammarGrammar):
    """A grammar that is no longer followed after it exceeds its time limit; its requests then end with an error.

    Masks are made in the middle of a verification, so it must not raise: until its requests end it allows all tokens.
    grammar: SGLang's at its beginning, which it replaces. unlimited: without time limit.
    """

    def __init__(self, grammar: XGrammarGrammar, forced: ForcedText, *, unlimited: bool = False) -> None:
        self.__dict__.update(vars(grammar))
        self.budget, self.forced = GrammarBudget(unlimited=unlimited), forced
        self.refused = threading.Event()  # shared by all copies: following one of them took too long
        self._not_accepted = 0  # tokens since it is no longer followed

    def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
        if not self.budget.exceeded:
            with self.budget:
                super().fill_vocab_mask(vocab_mask, idx)

    def accept_token(self, token: int) -> None:
        if self.budget.exceeded:
            self._not_accepted += 1
            return
        with self.budget:
            super().accept_token(token)

    @property
    def drafts(self) -> bool:
        """True while it may be followed for drafts."""
        return not (self.budget.exceeded or self.forced.budget.exceeded or self.is_terminated())

    def rollback(self, k: int) -> None:
        skipped = min(k, self._not_accepted)
        self._not_accepted -= skipped
        if k > skipped:
            super().rollback(k - skipped)

    def copy(self) -> BoundedGrammar:
        copied = BoundedGrammar(super().copy(), self.forced.anew(), unlimited=self.budget.unlimited)
        copied.refused = self.refused
        return copied


class BoundedBackend(XGrammarGrammarBackend):
    """Takes compiled grammars from the folder; it compiles missing ones in one thread of low priority. The HTTP process
    has examined every grammar that arrives here, and its folder has all that take long to compile."""

    grammar_compiler: GrammarCompiler

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        from sglang.srt.runtime_context import get_parallel

        info: TokenizerInfo = self.grammar_compiler.compile_regex("a").tokenizer_info
        # xgrammar's own cache, without a bound, would keep grammars that `GrammarCache` drops.
        self.grammar_compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._tokenizer, self._folder = info, GrammarFolder.from_env()
        self._spelling = Spelling.of(tokenizer, info)
        # Ranks follow the same tokens; with a clock, each would end a request at another token.
        self._unlimited = get_parallel().tp_size > 1
        if self._folder is not None:
            options = CompileOptions(
                info.serialize_json(), self.any_whitespace, self.max_whitespace_cnt, self.override_stop_tokens
            )
            self._folder.write_options(options)

    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> BaseGrammarObject:
        kind, text = key
        carried = self._folder and self._folder.read(name_of(kind, text))
        if not carried:
            try:
                text = rewritten(kind, text, self.max_whitespace_cnt)
            except ValueError as error:
                return InvalidGrammarObject(str(error))
            return super()._init_value_dispatch((kind, text), require_reasoning)
        compiled = CompiledGrammar.deserialize_json(carried, self._tokenizer)
        return self._from_context(compiled, text, GrammarStats(dispatch_type=kind))

    def _from_context(self, ctx: CompiledGrammar, key_string: str, grammar_stats: GrammarStats) -> BoundedGrammar:
        styles = {"json": JsonStyle(), "structural_tag": JsonStyle(tagged=True)}
        forced = ForcedText(self._spelling, styles.get(str(grammar_stats.dispatch_type)))
        return BoundedGrammar(super()._from_context(ctx, key_string, grammar_stats), forced, unlimited=self._unlimited)


def bound(backend: BaseGrammarBackend) -> None:
    """Bound the memory of an SGLang backend, and how many grammars it compiles at the same time."""
    backend.executor.shutdown(wait=False)
    backend.executor = ThreadPoolExecutor(1, "grammars", initializer=_give_way)
    backend.cache = GrammarCache()


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def end_if_too_slow(req: Any) -> bool:
    """End the request with an error if its grammar is no longer followed; return whether it did."""
    grammar = followed(req.grammar)
    if not isinstance(grammar, BoundedGrammar) or not grammar.budget.exceeded:
        return False
    grammar.refused.set()
    req.to_finish = FINISH_ABORT(TOO_SLOW, 400, "BadRequestError")
    return True
