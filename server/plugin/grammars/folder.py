"""The folder through which the scheduler and the compiling process exchange grammars.

The scheduler writes the tokenizer and options to compile for; the compiling process writes grammars that took long, so
that the scheduler need not compile them again. It lies in the server's run folder.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

ENV = "OUTRIDER_GRAMMARS"
"""Environment variable: the folder. Without it the scheduler compiles everything itself."""


def name_of(kind: str, text: str) -> str:
    """Return a name for the grammar of an SGLang grammar key."""
    return hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The tokenizer and options that a grammar is compiled for.

    tokenizer: xgrammar's TokenizerInfo as JSON. any_whitespace, max_whitespace_cnt: of JSON schemas.
    override_stop_tokens: of matchers; None: the tokenizer's.
    """

    tokenizer: str
    any_whitespace: bool = True
    max_whitespace_cnt: int | None = None
    override_stop_tokens: list[int] | None = None


@dataclass(frozen=True, slots=True)
class GrammarFolder:
    """Files are written whole or not at all; a reader may find any of them gone."""

    path: Path

    @classmethod
    def from_env(cls) -> Self | None:
        """Return the folder of this server, or None."""
        path = os.environ.get(ENV)
        return cls(Path(path)) if path else None

    def write_options(self, options: CompileOptions) -> None:
        self._write(self._options, json.dumps(asdict(options)))

    def read_options(self) -> CompileOptions | None:
        """Return the options that the scheduler has written; None where its grammar backend is not xgrammar."""
        try:
            return CompileOptions(**json.loads(self._options.read_text()))
        except FileNotFoundError:
            return None

    @property
    def ready(self) -> bool:
        """True if grammars can be compiled here: a scheduler has written its options."""
        return self._options.exists()

    def write(self, name: str, compiled: str) -> None:
        """Keep a compiled grammar. compiled: xgrammar's JSON."""
        self._write(self.file(name), compiled)

    def read(self, name: str) -> str | None:
        """Return a kept compiled grammar; None if there is none (any more)."""
        try:
            return self.file(name).read_text()
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        self.file(name).unlink(missing_ok=True)

    def file(self, name: str) -> Path:
        """Return the path of the compiled grammar of this name."""
        return self.path / f"{name}.json"

    @property
    def _options(self) -> Path:
        return self.path / "options.json"

    def _write(self, path: Path, text: str) -> None:
        handle, name = tempfile.mkstemp(dir=self.path)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
