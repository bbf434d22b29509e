"""Features of answers on disk.

Features of kept answers are bounded: each segment is a feature store, and the oldest is deleted. General answers, which
a drafter should not forget, are the target's answers to the prompts of a file, written once.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..block import checkpoint
from ..training.decode import decode
from ..training.features import read_texts, sequence_features, usable
from ..training.logs import LEAST_AGREEMENT, agreement, held_out, under_rules
from ..training.prompts import read_samples
from ..training.store import FeatureStore, Sequence, StoredAnswer, StoreInUse, digest
from ..training.target import TargetModel
from .answers import Answer

SEGMENTS = 8
"""Number of segments; each holds this part of the bound."""
TOP = 32
"""Number of the target's likeliest tokens kept for each token of an answer."""
PROMPTS, MORE = 48, 144
"""Number of general prompts at first, and in the end: few answers are soon memorised. Each gate brings PROMPTS more."""
JUDGING, CHOOSING = 3, 6
"""One in JUDGING of the first prompts is for the gate. One in CHOOSING of all prompts chooses the candidate's share of
the first drafter. The rest is for training."""
ANSWER_TOKENS, LONGEST_PROMPT = 96, 1024


def store_layout(target: TargetModel, layers: tuple[int, ...]) -> tuple[int, dict[str, Any]]:
    """Return the columns of an answer's features, and the store's notes."""
    name = checkpoint.target_identity(target.config, target.embedding)["embedding"]
    return len(layers) * target.config.hidden_size, {"layers": list(layers), "target": name}


@dataclass(frozen=True, slots=True)
class Item:
    """One stored answer: its place, and the name of its prompt."""

    segment: int
    number: int
    entry: StoredAnswer

    @property
    def prompt(self) -> str:
        return self.entry.source

    @property
    def answer_tokens(self) -> int:
        return self.entry.length - self.entry.prompt


class Supply:
    """The stored answers of `folder`/00000001, …, at most `most_bytes` in all. No other process may write there.

    Answers that the target did not write are skipped and counted in `foreign`.
    """

    def __init__(self, folder: Path, target: TargetModel, layers: tuple[int, ...], most_bytes: int) -> None:
        self.folder, self.target, self.layers, self.most_bytes, self.foreign = folder, target, layers, most_bytes, 0
        self.width, self.meta = store_layout(target, layers)
        self.segments: dict[int, FeatureStore] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in sorted(path.name for path in folder.iterdir() if path.name.isdigit()):
            self._open(int(name))
        self.items: list[Item] = []
        for number, store in self.segments.items():
            self.items += [Item(number, i, entry) for i, entry in enumerate(store.entries)]

    @property
    def training(self) -> list[Item]:
        """Answers to train on, the oldest first."""
        return [item for item in self.items if not held_out(item.prompt)]

    @property
    def held_out(self) -> list[Item]:
        """Answers for the gate, the oldest first."""
        return [item for item in self.items if held_out(item.prompt)]

    def __getitem__(self, item: Item) -> Sequence:
        return self.segments[item.segment][item.number]

    def __contains__(self, item: Item) -> bool:
        return item.segment in self.segments

    def missing(self, answers: list[Answer]) -> list[Answer]:
        """Return the answers to read: the newest that fit together, without the stored ones."""
        room, wanted = self.most_bytes * (SEGMENTS - 1) // SEGMENTS, []
        for answer in reversed(answers):
            room -= self._bytes(len(answer.tokens), len(answer.response_ids))
            if room < 0:
                break
            name = digest(answer.tokens)
            if not any(name in store.digests for store in self.segments.values()):
                wanted.append(answer)
        return wanted[::-1]

    def read(self, answers: list[Answer]) -> Iterator[int]:
        """Let the target read the answers in batches; yields the number of answers on the disk after each batch."""
        texts = [(answer.tokens, len(answer.prompt_ids)) for answer in answers]
        for batch in read_texts(self.target, texts, self.layers, TOP):
            number = self._room_for(sum(self._bytes(len(s.tokens), len(s.tokens) - s.prompt) for s in batch.values()))
            store = self.segments[number]
            with store.writing():
                before = len(store)
                for place, sequence in batch.items():
                    answer = answers[place]
                    sequence = under_rules(sequence, answer.temperature) if answer.ruled else sequence
                    if agreement(sequence, answer.temperature) < LEAST_AGREEMENT:
                        self.foreign += 1
                    else:
                        store.append(sequence, temperature=answer.temperature, source=digest(answer.prompt_ids))
                self.items += [Item(number, i, store.entries[i]) for i in range(before, len(store))]
            yield len(batch)

    def _bytes(self, tokens: int, answer_tokens: int) -> int:
        return tokens * (4 + 2 * self.width) + answer_tokens * 6 * TOP

    def _room_for(self, coming: int) -> int:
        """Return the segment for `coming` more bytes. Deletes the oldest segment if all together would be too large."""
        sizes = {number: self._bytes(*store.rows) for number, store in self.segments.items()}
        last = max(sizes, default=1)
        if sizes.get(last) and sizes[last] + coming > self.most_bytes // SEGMENTS:
            last += 1
        if last not in sizes:
            self._open(last)
        while sum(sizes.values()) + coming > self.most_bytes and (oldest := min(sizes, default=last)) != last:
            del sizes[oldest], self.segments[oldest]
            self.items = [item for item in self.items if item.segment != oldest]
            gone = self.folder / f"{oldest:08}"
            (gone / "index.jsonl").unlink(missing_ok=True)  # first: a kill leaves an empty segment
            shutil.rmtree(gone)
        return last

    def _open(self, number: int) -> None:
        self.segments[number] = open_store(self.folder / f"{number:08}", self.width, self.meta)


def open_store(folder: Path, width: int, meta: dict[str, Any]) -> FeatureStore:
    """Open a folder's store; empty it if it is damaged or of another target or other layers. Raises StoreInUse if
    another process writes to it."""
    try:
        store = FeatureStore(folder, width=width, top=TOP, meta=meta)
        with store.writing():  # cuts off a killed process's rest
            return store
    except StoreInUse:
        raise
    except (ValueError, TypeError):
        shutil.rmtree(folder)
    return FeatureStore(folder, width=width, top=TOP, meta=meta)


@dataclass(frozen=True, slots=True)
class General:
    """The general answers: numbers in the store of the answers for training, for choosing a candidate's share of the
    first drafter, and for the gate."""

    store: FeatureStore
    training: list[int]
    choosing: list[int]
    judging: list[int]

    def sequences(self, numbers: list[int]) -> list[Sequence]:
        """Read these answers from the disk."""
        return [self.store[number] for number in numbers]


def general_answers(
    folder: Path, target: TargetModel, layers: tuple[int, ...], prompts: Path, count: int = PROMPTS
) -> General:
    """Return the target's greedy answers to `count` prompts of a JSONL file, the first `PROMPTS` spread over it. Keeps
    the answers that `folder` already has.

    Raises OSError and BadLine for a file that cannot be used.
    """
    width, meta = store_layout(target, layers)
    store = open_store(folder, width, {**meta, "prompts": str(prompts), "size": prompts.stat().st_size})
    samples = list(read_samples(prompts))
    first = [i * len(samples) // PROMPTS for i in range(PROMPTS)] if len(samples) > PROMPTS else range(len(samples))
    chosen = [*first, *(i for i in range(len(samples)) if i not in first)][:count]
    there = {entry.source for entry in store.entries}
    ids = {str(n): prompt_ids(target, list(samples[i].turns)) for n, i in enumerate(chosen) if str(n) not in there}
    ids = {name: tokens for name, tokens in ids.items() if len(tokens) <= LONGEST_PROMPT}
    names = list(ids)
    with store.writing():
        for text in decode(
            target, list(ids.values()), [0.0] * len(ids), max_new_tokens=ANSWER_TOKENS, stop_ids=target.stop_ids,
            seeds=[0] * len(ids), rows=16,
        ):  # fmt: skip
            name, prompt = names[text.number], len(ids[names[text.number]])
            if usable(prompt + len(text.ids), prompt):
                [sequence] = sequence_features(target, [(ids[name] + text.ids, prompt)], layers, TOP)
                store.append(sequence, temperature=0.0, source=name)
    numbers = {i: int(entry.source) for i, entry in enumerate(store.entries)}
    judging = [i for i, n in numbers.items() if n < PROMPTS and n % JUDGING == 0]
    choosing = [i for i, n in numbers.items() if n % CHOOSING == 1]
    return General(store, [i for i in numbers if i not in {*judging, *choosing}], choosing, judging)


def prompt_ids(target: TargetModel, turns: list[str]) -> list[int]:
    """Return the token ids of a prompt, as a chat where the target has a template."""
    if target.tokenizer.chat_template:
        return target.chat_ids(turns)
    return list(target.tokenizer("\n".join(turns))["input_ids"])
