"""Compile a grammar and try it out, in a process that may be killed."""

import json
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

import xgrammar
from jsonschema import Draft202012Validator, SchemaError

from .folder import CompileOptions, GrammarFolder
from .rewrite import rewritten
from .walk import Walker

CARRY_SECONDS = 0.1
"""A grammar that took longer to compile is passed to the scheduler compiled; faster ones compile as fast as they
load."""
MAX_CARRIED_BYTES = 24 * 1024 * 1024
"""Largest compiled grammar that is passed on; it is read at 35 MB/s."""
MAX_REASON = 300
"""Characters of a reason; some quote a whole schema."""


class GrammarOutcome(StrEnum):
    """accepted: the scheduler may follow it. invalid: it is no grammar. costly: it takes too much time or memory.
    busy: too many grammars are being compiled."""

    ACCEPTED = "accepted"
    INVALID = "invalid"
    COSTLY = "costly"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class GrammarVerdict:
    """reason: why it was not accepted. seconds: processor time.
    carried: bytes of the compiled grammar's file; 0: no file."""

    outcome: GrammarOutcome
    reason: str = ""
    seconds: float = 0.0
    carried: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {"outcome": GrammarOutcome(fields["outcome"])})


@dataclass(frozen=True, slots=True)
class Examiner:
    """Compiles and tries out grammars for one tokenizer. threads: of a compilation."""

    folder: GrammarFolder
    options: CompileOptions
    tokenizer: xgrammar.TokenizerInfo
    walker: Walker
    threads: int

    @classmethod
    def of(cls, folder: GrammarFolder, options: CompileOptions, threads: int) -> Self:
        tokenizer = xgrammar.TokenizerInfo.deserialize_json(options.tokenizer)
        return cls(folder, options, tokenizer, Walker.of(tokenizer), threads)

    def examine(self, kind: str, text: str, name: str) -> GrammarVerdict:
        """Compile the grammar and walk through it, without a limit of time or memory. kind: json, regex, ebnf or
        structural_tag. name: file name if the grammar is passed on."""
        begun = time.process_time()
        try:
            compiled = self._compile(kind, text)
        except SchemaError as error:
            place = "/".join(str(part) for part in error.absolute_path)
            where = f" (at {place[:MAX_REASON]})" if place else ""
            return GrammarVerdict(GrammarOutcome.INVALID, f"{error.message[:MAX_REASON]}{where}")
        except RecursionError:
            return GrammarVerdict(GrammarOutcome.INVALID, "nested too deeply")
        except (RuntimeError, ValueError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from None
            return GrammarVerdict(GrammarOutcome.INVALID, _reason(error))
        seconds = time.process_time() - begun
        if self.walker.too_slow(compiled, self.options.override_stop_tokens):
            return GrammarVerdict(
                GrammarOutcome.COSTLY, "takes too long to follow; simplify its repetitions and alternatives"
            )
        if not self.walker.begins(compiled, self.options.override_stop_tokens):
            return GrammarVerdict(GrammarOutcome.INVALID, "this model's vocabulary has no token to begin it with")
        carried = 0
        if seconds > CARRY_SECONDS:
            written = compiled.serialize_json()
            if len(written) > MAX_CARRIED_BYTES:
                return GrammarVerdict(GrammarOutcome.COSTLY, "is too large when compiled; simplify it")
            try:
                self.folder.write(name, written)
            except OSError:  # the disk is full: no fault of the grammar
                return GrammarVerdict(GrammarOutcome.BUSY, "the compiled grammar cannot be kept; try again")
            carried = len(written)
        return GrammarVerdict(GrammarOutcome.ACCEPTED, seconds=time.process_time() - begun, carried=carried)

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        compiler = xgrammar.GrammarCompiler(self.tokenizer, max_threads=self.threads, cache_enabled=False)
        text = rewritten(kind, text, self.options.max_whitespace_cnt)
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(text)
        Draft202012Validator.check_schema(json.loads(text))
        return compiler.compile_json_schema(
            text, any_whitespace=self.options.any_whitespace, max_whitespace_cnt=self.options.max_whitespace_cnt
        )


def _reason(error: Exception) -> str:
    """Return the reason in one of xgrammar's messages, which begin with its source file and time."""
    text = " ".join(str(error).split())
    return (text.rpartition(": ")[2] if text.startswith("[") else text)[:MAX_REASON]
