"""Texts of other requests for prompt lookup: a corpus for each owner (an API key with an adapter) and salt, strictly
apart.

The contents of a corpus, its evictions and its matches depend on its owner's texts alone, so neither drafts nor times
reveal another owner's texts. Owners share only the limit `OWNERS`: beyond it, the key with most owners loses the least
recently used of them, so a key's adapters displace each other.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import NamedTuple, Self

import torch

OWNERS = 16
"""Owners with texts kept; each has the same limit of tokens."""
SALTED_SHARE = 8
"""A salted corpus holds at most 1 / SALTED_SHARE of the tokens of one without a salt."""
NO_CORPUS = 0
"""Number for requests without lookup in other texts."""


class Name(NamedTuple):
    """Hashes that identify a corpus; the plain names are not kept. owner: hashes of the key, and of the adapter if
    there is one. salted: hash of owner and salt; "" without a salt."""

    owner: str
    salted: str

    @classmethod
    def of(cls, key: str, salt: str, adapter: str = "") -> Self:
        owner = f"{_digest(key)}.{_digest(adapter)}" if adapter else _digest(key)
        return cls(owner, _digest(f"{owner} {salt}") if salt else "")

    @property
    def key(self) -> str:
        return self.owner.partition(".")[0]


class Corpora:
    """Corpora in memory, by name; needs the compiled kernels.

    tokens: limit of each owner's texts without a salt, rounded down to a power of two; texts with a salt have the same
        limit again. A token takes 20 bytes including its index. A full corpus drops its oldest text; an owner over the
        limit of salted texts loses the least recently used salted corpus.

    One thread inserts and looks up; another may read `contents` meanwhile.
    """

    def __init__(self, tokens: int):
        self.capacity = 1 << (tokens.bit_length() - 1)
        self.native = torch.classes.outrider.Corpora()
        self.changes = 0
        self._numbers: dict[Name, int] = {}  # the least recently used first
        self._lock = RLock()

    def number(self, name: Name) -> int:
        """Return the number of a corpus, which is created if missing. Numbers of dropped corpora are never reused."""
        with self._lock:
            number = self._numbers.pop(name, None)
            if number is None:
                self._make_room(name)
                number = self.native.add(self.capacity // SALTED_SHARE if name.salted else self.capacity)
            self._numbers[name] = number
            return number

    def insert(self, name: Name, text: Sequence[int], *, secret: bool = False) -> None:
        """Add a text, except the part that the corpus already has. secret: leave it out of `contents`."""
        number, tokens = self.number(name), torch.tensor(text, dtype=torch.int64)
        with self._lock:
            self.native.insert(number, tokens, secret)
        self._bound(name)

    def fill(self, name: Name, contents: torch.Tensor) -> None:
        """Add the texts that `contents` returned for a corpus."""
        number = self.number(name)
        with self._lock:
            self.native.fill(number, contents)
        self._bound(name)

    def contents(self) -> Iterator[tuple[Name, torch.Tensor]]:
        """Yield each corpus's texts [N] int32, oldest first, each after a -1; the least recently used corpus first."""
        with self._lock:
            contents = [(name, self.native.contents(number)) for name, number in self._numbers.items()]
        yield from contents

    @property
    def bytes(self) -> int:
        return sum(self.native.bytes(number) for number in self._numbers.values())

    def _bound(self, name: Name) -> None:
        """Drop the owner's least recently used salted corpora until the rest fit."""
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
        """Drop one owner's texts if a new owner would exceed the limit."""
        keys = {each.owner: each.key for each in reversed(self._numbers)}  # the most recently used first
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
