"""Training sequences on disk: tokens, target features and the target's likeliest tokens.

Flat binary files, one for each column, grow together; without features there is no file of them. `index.jsonl` has one
line per finished sequence, written when the columns are on disk. So a kill or a power failure leaves at most bytes that
the next run cuts off, and other processes may read while one writes. Reading touches only the sequences of a step.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.storage.replacing import replace, sync

FLUSH_TOKENS = 4096
"""Tokens of appended sequences after which they are flushed: a batch of the feature pass, a few seconds of work."""


class StoreInUse(ValueError):
    """Another process is writing to a store."""


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """Place of one sequence: token rows start..start+length, answer rows top..top+(length - prompt).

    digest: of its tokens; no two sequences of a store are equal.
    """

    start: int
    length: int
    prompt: int
    top: int
    temperature: float
    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of S tokens, of which the first `prompt` are the prompt.

    tokens: [S] int64. features: [S, m*d] bfloat16; m*d is 0 where none are kept. No block ever reads the last token's.
    top_ids, top_probs: [S - prompt, K]; row i is the target's distribution of token prompt + i given all tokens before.
    """

    tokens: torch.Tensor
    prompt: int
    features: torch.Tensor
    top_ids: torch.Tensor
    top_probs: torch.Tensor

    def first(self, tokens: int) -> Sequence:
        """Return the sequence cut to its first `tokens` tokens."""
        answer = max(0, tokens - self.prompt)
        return Sequence(
            self.tokens[:tokens], self.prompt, self.features[:tokens], self.top_ids[:answer], self.top_probs[:answer]
        )


def digest(tokens: Iterable[int]) -> str:
    """Return a short name of these tokens."""
    return hashlib.sha256(np.array(list(tokens), np.int32).tobytes()).hexdigest()[:16]


class FeatureStore:
    """Append-only store of sequences; `width` = m*d feature columns, 0 for none, `top` = K likeliest tokens kept.

    It has the sequences that were there when it was opened; `grow` looks for more, `writing` appends. Appended
    sequences can be read here at once, by other processes and later runs after the next `flush`.
    """

    def __init__(self, folder: str | Path, *, width: int, top: int, meta: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.columns: dict[str, tuple[np.dtype[Any], int]] = {
            "tokens": (np.dtype(np.int32), 1),
            **({"features": (np.dtype(np.int16), width)} if width else {}),
            "top_ids": (np.dtype(np.int32), top),
            "top_probs": (np.dtype(np.float16), top),
        }
        wanted = {"width": width, "top": top, **meta}
        path = self.folder / "meta.json"
        if path.exists():
            stored = json.loads(path.read_text())
            differ = [k for k in wanted if stored.get(k) != wanted[k]]
            if differ:
                what = ", ".join(f"{k} {stored.get(k)} instead of {wanted[k]}" for k in differ)
                raise ValueError(f"{folder} holds features made with {what}; use another --out or delete it")
        else:
            replace({path: json.dumps(wanted)})
        self.parts: list[slice] | None = None  # slices of the feature columns that are read; None: all
        self.index = self.folder / "index.jsonl"
        self.entries: list[StoredAnswer] = []
        self.digests: set[str] = set()
        self._pending: list[StoredAnswer] = []
        self.grow()

    def grow(self) -> bool:
        """Read sequences appended since, also by other processes; return whether there were any."""
        lines = self._whole_lines().splitlines()[len(self.entries) - len(self._pending) :]
        new = [StoredAnswer(**json.loads(line)) for line in lines]
        if new:
            self.entries += new
            self.digests |= {entry.digest for entry in new}
        return bool(new)

    def _whole_lines(self) -> bytes:
        text = self.index.read_bytes() if self.index.exists() else b""
        return text[: text.rfind(b"\n") + 1]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, `append` may be called, and no other process may write; remains of a killed run are cut off first.

        Appended sequences are flushed at the end, even after an error. Raises StoreInUse where another process writes.
        """
        with (self.folder / "meta.json").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreInUse(
                    f"another run is writing to {self.folder}; --follow trains on what is there so far"
                ) from None
            self.grow()
            self._cut()
            try:
                yield
            finally:
                self.flush()

    def __contains__(self, tokens: Iterable[int]) -> bool:
        return digest(tokens) in self.digests

    @property
    def rows(self) -> tuple[int, int]:
        """Token rows and answer rows stored."""
        if not self.entries:
            return 0, 0
        last = self.entries[-1]
        return last.start + last.length, last.top + last.length - last.prompt

    def length_of(self, name: str) -> int:
        """Return the number of stored rows of a column."""
        tokens, answers = self.rows
        return answers if name.startswith("top") else tokens

    def select(self, layers: tuple[int, ...], stored: tuple[int, ...]) -> None:
        """Read the features of these `layers` alone from now on, out of the `stored` ones."""
        if layers == stored:
            return
        places = {layer: place for place, layer in enumerate(stored)}
        size = self.columns["features"][1] // len(stored)
        self.parts = [slice(places[layer] * size, (places[layer] + 1) * size) for layer in layers]

    @property
    def widths(self) -> dict[str, int]:
        """Numbers in a row of every column that is read."""
        widths = {name: width for name, (_, width) in self.columns.items()}
        if self.parts is not None and "features" in widths:
            widths["features"] = sum(part.stop - part.start for part in self.parts)
        return {name: width for name, width in widths.items() if width}

    @property
    def bytes(self) -> int:
        """Size of all columns that are read."""
        return sum(self.length_of(name) * width * self.columns[name][0].itemsize for name, width in self.widths.items())

    def _cut(self) -> None:
        if self.index.exists():
            os.truncate(self.index, len(self._whole_lines()))
        for name, (dtype, width) in self.columns.items():
            path = self.folder / f"{name}.bin"
            path.touch()
            size = self.length_of(name) * width * dtype.itemsize
            if path.stat().st_size < size:
                raise ValueError(f"{path} is shorter than its index says; delete {self.folder} and start again")
            with path.open("r+b") as file:
                file.truncate(size)
        self.index.touch()
        sync(self.folder)

    def append(self, sequence: Sequence, *, temperature: float, source: str) -> None:
        """Add one sequence, if it is not there yet; see `writing`."""
        rows, top = self.rows
        name = digest(sequence.tokens.tolist())
        if name in self.digests:
            return
        arrays = {
            "tokens": sequence.tokens.to(torch.int32).cpu().numpy(),
            "features": sequence.features.to(torch.bfloat16).view(torch.int16).cpu().numpy(),
            "top_ids": sequence.top_ids.to(torch.int32).cpu().numpy(),
            "top_probs": sequence.top_probs.to(torch.float16).cpu().numpy(),
        }
        for column in self.columns:
            with (self.folder / f"{column}.bin").open("ab") as file:
                file.write(np.ascontiguousarray(arrays[column]).tobytes())
        entry = StoredAnswer(rows, len(sequence.tokens), sequence.prompt, top, temperature, source, name)
        for entries in (self.entries, self._pending):
            entries.append(entry)
        self.digests.add(entry.digest)
        if sum(pending.length for pending in self._pending) >= FLUSH_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Put appended sequences on disk: first the columns, then the lines that name their rows."""
        if not self._pending:
            return
        for column in self.columns:
            sync(self.folder / f"{column}.bin")
        with self.index.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(entry)) + "\n" for entry in self._pending)
            file.flush()
            os.fsync(file.fileno())
        self._pending.clear()

    def __len__(self) -> int:
        return len(self.entries)

    def rows_of(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows start..stop of a column, as they are stored."""
        dtype, width = self.columns[name]
        path, offset = self.folder / f"{name}.bin", start * width * dtype.itemsize
        numbers = np.fromfile(path, dtype, (stop - start) * width, offset=offset)  # a map's pages would stay in memory
        return torch.from_numpy(numbers.reshape(-1, width))

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return `rows_of`, cut to the selected features."""
        rows = self.rows_of(name, start, stop)
        if name != "features" or self.parts is None:
            return rows
        return torch.cat([rows[:, part] for part in self.parts], 1)

    def __getitem__(self, number: int) -> Sequence:
        e = self.entries[number]
        stop, top_stop = e.start + e.length, e.top + e.length - e.prompt
        features = torch.empty(e.length, 0, dtype=torch.bfloat16)
        if "features" in self.widths:
            features = self.read("features", e.start, stop).view(torch.bfloat16)
        return Sequence(
            tokens=self.rows_of("tokens", e.start, stop)[:, 0].long(),
            prompt=e.prompt,
            features=features,
            top_ids=self.rows_of("top_ids", e.top, top_stop).long(),
            top_probs=self.rows_of("top_probs", e.top, top_stop).float(),
        )

    def token_counts(self, vocab_size: int, numbers: Iterable[int] | None = None) -> torch.Tensor:
        """Return [V] float64, how often each token occurs in these answers, plus its summed target probability.

        Both matter for the draft vocabulary: the tokens drawn, and further tokens that the target thought likely.
        numbers: of the answers; None: all.
        """
        counts = np.zeros(vocab_size)
        for e in self.entries if numbers is None else [self.entries[number] for number in numbers]:
            top_stop = e.top + e.length - e.prompt
            tokens = self.rows_of("tokens", e.start + e.prompt, e.start + e.length).flatten()
            ids, probs = (self.rows_of(name, e.top, top_stop).flatten() for name in ("top_ids", "top_probs"))
            counts += np.bincount(tokens.numpy(), minlength=vocab_size)
            counts += np.bincount(ids.numpy(), weights=probs.numpy(), minlength=vocab_size)
        return torch.from_numpy(counts)
