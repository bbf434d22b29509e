"""Stage 1: the target writes the training answers, and if wanted the prompts.

DSpark (section 4.1) keeps only the prompts of a data set and regenerates the answers with the target. Prompts can come
from the target as well: given the chat template up to an empty user turn it writes one.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from tqdm import tqdm

from outrider.storage.appending import appending

from .deadline import NEVER, Deadline
from .decode import decode
from .prompts import AnsweredPrompt, read_samples
from .target import TargetModel

PROMPT_TOKENS = 160
"""Most tokens of a prompt that the target writes."""
SYNCED_ANSWERS = 32
"""Answers that a power failure may lose; a killed run loses no written answer."""


WORD = re.compile("[Ġ▁]([a-z]{5,12})")
"""A word of the vocabulary, after either sign for a space."""


def drawn_openings(tokenizer: Any, count: int, seed: int) -> list[str]:
    """Return `count` openings, some "": phrases of openings.txt, with a random word for a final "…". Without openings a
    target asks about few things."""
    phrases = ["", *resources.files(__package__).joinpath("openings.txt").read_text("utf-8").splitlines()]
    words = sorted(match[1] for token in tokenizer.get_vocab() if (match := WORD.fullmatch(token)))
    draw = random.Random(seed)
    return [draw.choice(phrases).replace("…", draw.choice(words or [""])).strip() for _ in range(count)]


def write_prompts(
    target: TargetModel, openings: list[str], count: int, *, seed: int, rows: int = 64
) -> list[AnsweredPrompt]:
    """Return prompts by the target: its own user turns, each beginning with one of `openings` ("" for a free turn).
    Turns that do not end within `PROMPT_TOKENS` are dropped, so fewer than `count` may come back."""
    chosen = [openings[i % len(openings)] for i in range(count)]
    ids = [target.user_turn_ids(text) for text in chosen]
    written = decode(
        target, ids, [0.9] * count, max_new_tokens=PROMPT_TOKENS, stop_ids=target.stop_ids,
        seeds=seeds_of(range(count), seed), rows=rows,
    )  # fmt: skip
    texts = {}
    for text in tqdm(written, total=count, desc="prompts", unit="prompt"):
        turn = (chosen[text.number] + target.tokenizer.decode(text.ids, skip_special_tokens=True)).strip()
        if text.finish == "eos" and len(turn) > 12:
            texts[text.number] = turn
    return [AnsweredPrompt(turns=(texts[number],), source="self") for number in sorted(texts)]


def answer(
    target: TargetModel,
    samples: list[AnsweredPrompt],
    out: Path,
    *,
    temperatures: list[float],
    max_new_tokens: int,
    seed: int,
    rows: int = 64,
    max_prompt_tokens: int = 1024,
    deadline: Deadline = NEVER,
) -> Iterator[AnsweredPrompt]:
    """Yield the answers in `out` (JSONL), then the target's to every other sample, each appended to `out` before.

    Sample i is answered at `temperatures[i % len(temperatures)]`. Raises OutOfTime at the deadline; the
    texts under way are lost.
    """
    there = answers_so_far(out)
    yield from there
    kept = Counter((s.turns, s.temperature) for s in there)
    prompts, heat, numbers = [], [], []
    for i, sample in enumerate(samples):
        at = temperatures[i % len(temperatures)]
        ids = target.chat_ids(list(sample.turns))
        if kept[sample.turns, at]:
            kept[sample.turns, at] -= 1
        elif len(ids) <= max_prompt_tokens:
            prompts.append(ids)
            heat.append(at)
            numbers.append(i)
    written = decode(
        target, prompts, heat, max_new_tokens=max_new_tokens, stop_ids=target.stop_ids,
        seeds=seeds_of(numbers, seed + 1), rows=rows,
    )  # fmt: skip
    with appending(out, SYNCED_ANSWERS) as append:
        for text in tqdm(written, total=len(prompts), desc="answers", unit="answer"):
            sample = samples[numbers[text.number]]
            made = AnsweredPrompt(sample.turns, sample.source, heat[text.number], tuple(text.ids))
            append(made.to_json())
            deadline.check()
            yield made


def seeds_of(numbers: Iterable[int], seed: int) -> list[int]:
    """Return a seed for each numbered text; different values of `seed` share none."""
    return [(seed << 32) + number for number in numbers]


def answers_so_far(path: Path) -> list[AnsweredPrompt]:
    """Read the samples of a file that a killed run left; cut off an incomplete last line."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return list(read_samples(path))
