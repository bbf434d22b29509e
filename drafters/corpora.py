"""Texts of other requests for prompt lookup: a corpus for each owner (an API key with an adapter) and salt, strictly
apart.

What one corpus holds, drops or finds depends on its owner's texts alone, so that neither drafts nor times tell an owner
of another's. Only how many owners there are and which asked last is shared: beyond `OWNERS` of them the texts of one
are dropped, of the key with most owners the one that has been silent longest. So a key's adapters displace each other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import NamedTuple

import torch

OWNERS = 16
"""Owners whose texts are kept; each may have as many tokens as any other."""
SALTED_SHARE = 8
"""A salted corpus has at most this part of what one without a salt has."""
NO_CORPUS = 0
"""Number of a request that looks nothing up in other texts."""


class Name(NamedTuple):
    """Hashes of a corpus's owner (of the key, and of the adapter if there is one), and of owner and salt, "" without
    one: nothing is kept as it came."""

    owner: str
    salted: str

    @classmethod
    def of(cls, key: str, salt: str, adapter: str = "") -> Name:
        owner = f"{_digest(key)}.{_digest(adapter)}" if adapter else _digest(key)
        return cls(owner, _digest(f"{owner} {salt}") if salt else "")

    @property
    def key(self) -> str:
        return self.owner.partition(".")[0]


class Corpora:
    """Corpora in memory, by name; needs the compiled kernels.

    tokens: of each owner's texts without a salt at most, rounded down to a power of two; as many again of those with
    one. A token takes 20 bytes with the index. The oldest text of a corpus goes first, and of an owner's salted corpora
    the one that was used longest ago.

    One thread inserts and looks up; another may read `contents` meanwhile.
    """

    def __init__(self, tokens: int):
        self.capacity = 1 << (tokens.bit_length() - 1)
        self.native = torch.classes.outrider.Corpora()
        self.changes = 0
        self._numbers: dict[Name, int] = {}  # the least recently used first
        self._lock = RLock()

    def number(self, name: Name) -> int:
        """Number of a corpus, made if there is none; of one that was dropped it is never used again."""
        with self._lock:
            found = self._numbers.pop(name, None)
            if found is None:
                self._make_room(name)
                found = self.native.add(self.capacity // SALTED_SHARE if name.salted else self.capacity)
            self._numbers[name] = found
            return found

    def insert(self, name: Name, text: Sequence[int], *, secret: bool = False) -> None:
        """Add a text, less what is in the corpus already. secret: `contents` leaves it out."""
        number, tokens = self.number(name), torch.tensor(text, dtype=torch.int64)
        with self._lock:
            self.native.insert(number, tokens, secret)
        self._bound(name)

    def fill(self, name: Name, contents: torch.Tensor) -> None:
        """Add what `contents` gave of a corpus."""
        number = self.number(name)
        with self._lock:
            self.native.fill(number, contents)
        self._bound(name)

    def contents(self) -> Iterator[tuple[Name, torch.Tensor]]:
        """Each corpus's texts [N] int32, oldest first, every one behind a -1; the least recently used corpus first."""
        with self._lock:
            found = [(name, self.native.contents(number)) for name, number in self._numbers.items()]
        yield from found

    @property
    def bytes(self) -> int:
        """Memory that all corpora take."""
        return sum(self.native.bytes(number) for number in self._numbers.values())

    def _bound(self, name: Name) -> None:
        """Drop the owner's salted corpora that were used longest ago until the others fit."""
        self.changes += 1
        if not name.salted:
            return
        salted = [each for each in self._numbers if each.owner == name.owner and each.salted]
        sizes = [self.native.bytes(self._numbers[each]) for each in salted]
        excess = sum(sizes) - self.native.bytes_of(self.capacity)
        for each, size in zip(salted, sizes, strict=True):
            if excess <= 0:
                break
            excess -= size
            self._drop(each)

    def _make_room(self, coming: Name) -> None:
        """Drop one owner's texts where a new owner would be one too many."""
        keys = {each.owner: each.key for each in reversed(self._numbers)}  # the one that asked last comes first
        if coming.owner not in keys and len(keys) >= OWNERS:
            held = Counter([*keys.values(), coming.key])
            gone = max(reversed(keys), key=lambda owner: held[keys[owner]])
            self._drop(*(each for each in self._numbers if each.owner == gone))

    def _drop(self, *names: Name) -> None:
        with self._lock:
            for name in names:
                self.native.remove(self._numbers.pop(name))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
