"""Stage 1: the target writes the training answers, and prompts too when asked.

DSpark (section 4.1) keeps only the prompts of a data set and regenerates the answers with the target. Prompts can
come from the target as well: given the chat template up to an empty user turn it writes one.
"""

from __future__ import annotations

import random
from pathlib import Path

from tqdm import tqdm

from .prompts import Sample, read_samples
from .target import Target, decode


def write_prompts(
    target: Target,
    openings: list[str],
    count: int,
    *,
    seed: int,
    batch_size: int = 64,
    temperature: float = 1.0,
    max_tokens: int = 160,
    limit: int | None = None,
) -> list[Sample]:
    """Prompts by the target: its own user turns, each beginning with one of `openings` ("" for a free turn).

    Turns that do not end within `max_tokens` are dropped, so fewer than `count` may come back.
    """
    stop = target.stop_ids
    samples = []
    for start in tqdm(range(0, count, batch_size), desc="prompts", unit="batch"):
        chosen = [openings[(start + i) % len(openings)] for i in range(min(batch_size, count - start))]
        ids = [target.user_turn_ids(text) for text in chosen]
        for row, new, finish in decode(
            target, ids, [temperature] * len(ids), max_new_tokens=max_tokens, stop_ids=stop, seed=seed + start
        ):
            text = (chosen[row] + target.tokenizer.decode(new, skip_special_tokens=True)).strip()
            if finish == "eos" and len(text) > 12:
                samples.append(Sample(turns=(text,), source="self"))
    return samples


def answer(
    target: Target,
    samples: list[Sample],
    out: Path,
    *,
    temperatures: list[float],
    max_new_tokens: int,
    seed: int,
    batch_size: int = 64,
    max_prompt_tokens: int = 1024,
) -> None:
    """Append an answer of the target for every sample to `out` (JSONL), resuming where a killed run stopped.

    Batches hold prompts of like length; sample i is answered at `temperatures[i % len(temperatures)]`.
    A batch is written once it is complete, so the lines of `out` tell which batches are done.
    """
    prompts = [target.chat_ids(list(s.turns)) for s in samples]
    usable = [i for i in range(len(samples)) if len(prompts[i]) <= max_prompt_tokens]
    order = sorted(usable, key=lambda i: len(prompts[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    random.Random(seed).shuffle(batches)
    lines = sum(1 for _ in read_samples(out)) if out.exists() else 0
    progress = tqdm(total=len(order), desc="answers", unit="answer")
    for number, batch in enumerate(batches):
        progress.update(len(batch))
        if lines >= len(batch):
            lines -= len(batch)
            continue
        heat = [temperatures[i % len(temperatures)] for i in batch]
        text = ""
        for row, new, finish in decode(
            target,
            [prompts[i] for i in batch],
            heat,
            max_new_tokens=max_new_tokens,
            stop_ids=target.stop_ids,
            seed=seed * 100003 + number,
        ):
            sample = samples[batch[row]]
            text += Sample(sample.turns, sample.source, heat[row], tuple(new), finish).to_json() + "\n"
        with out.open("a", encoding="utf-8") as file:
            file.write(text)
    progress.close()
