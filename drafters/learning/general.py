"""General answers: what a drafter is not to forget. The target's own, to prompts of a file, written once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..training.decode import decode
from ..training.features import usable
from ..training.prompts import read_samples
from ..training.store import FeatureStore, Sequence
from ..training.target import TargetModel
from .supply import open_store, read_layers

PROMPTS, MORE = 48, 144
"""General prompts at first, and of a drafter that forgets: few answers are soon known by heart."""
HELD_OUT = 3
"""One of the first prompts in so many is for the gate, the others are trained on."""
ANSWER_TOKENS, LONGEST_PROMPT = 96, 1024


@dataclass(frozen=True, slots=True)
class General:
    """The general answers: numbers in the store of those trained on, and of those for the gate."""

    store: FeatureStore
    training: list[int]
    held_out: list[int]

    def sequences(self, numbers: list[int]) -> list[Sequence]:
        """Those answers, read from the disk."""
        return [self.store[number] for number in numbers]


def general_answers(
    folder: Path, target: TargetModel, layers: tuple[int, ...], prompts: Path, count: int = PROMPTS
) -> General:
    """The target's greedy answers to `count` prompts of a JSONL file, the first `PROMPTS` of them spread over it; those
    in `folder` are not written again.

    Raises OSError and BadLine for a file that cannot be used.
    """
    spec, width, meta = read_layers(target, layers)
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
            seeds=[0] * len(ids), rows=16, wanted=spec,
        ):  # fmt: skip
            if text.sequence and usable(len(text.sequence.tokens), text.sequence.prompt):
                store.append(text.sequence, temperature=0.0, source=names[text.number])
    for_gate = [
        i for i, entry in enumerate(store.entries) if int(entry.source) < PROMPTS and int(entry.source) % HELD_OUT == 0
    ]
    return General(store, [i for i in range(len(store)) if i not in for_gate], for_gate)


def prompt_ids(target: TargetModel, turns: list[str]) -> list[int]:
    """Token ids of a prompt, as a chat where the target has a template."""
    if target.tokenizer.chat_template:
        return target.chat_ids(turns)
    return list(target.tokenizer("\n".join(turns))["input_ids"])
