"""tau of drafter folders on files of prompts, without a server (`outrider bench drafters`).

The target answers, and the drafter is then followed along those answers (see `validate`). A server at temperature 0
accepts the same tokens, up to ties that rounding decides; at higher temperatures its tau has the same distribution.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tqdm import tqdm

from ..acceptance import Acceptance
from ..block import check_target, load, target_identity
from .batches import BatchMaker
from .decode import decode
from .features import answer_chances, sequence_features
from .forward import Frozen
from .prompts import read_samples
from .store import Sequence
from .target import TargetModel
from .validate import Chances, sequence_acceptance

Answer = tuple[list[int], int]
"""(ids of a prompt and its answer, prompt length)"""


def target_answers(
    target: TargetModel, path: str | Path, *, count: int, new_tokens: int, temperature: float, kept: Path | None
) -> list[Answer]:
    """Answers to the first `count` prompts of a file; those at least two tokens long."""
    store = kept / f"{Path(path).stem}-{count}-{new_tokens}-T{temperature:g}.json" if kept else None
    if store and store.exists():
        return [(ids, prompt) for ids, prompt in json.loads(store.read_text())]
    samples = list(read_samples(path))[:count]
    prompts = [target.chat_ids(list(s.turns[:1])) for s in samples]
    written = decode(
        target, prompts, [temperature] * len(prompts), max_new_tokens=new_tokens, stop_ids=target.stop_ids,
        seeds=list(range(len(prompts))),
    )  # fmt: skip
    found = {}
    for text in tqdm(written, total=len(prompts), desc=f"{Path(path).stem}, T={temperature:g}", leave=False):
        found[text.number] = (prompts[text.number] + text.ids, len(prompts[text.number]))
    answers = [found[number] for number in sorted(found) if len(found[number][0]) >= found[number][1] + 2]
    if store:
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(answers))
    return answers


def measure(
    target: TargetModel, folders: list[Path], answers: list[Answer], *, temperature: float = 0.0, seed: int = 0
) -> list[Acceptance]:
    """Acceptance of each drafter along the same answers, which the target wrote at `temperature`."""
    models = [load(folder, dtype=target.embedding.dtype, device=target.device) for folder in folders]
    for model in models:
        check_target(model.config, target_identity(target.config, target.embedding))
    totals = [Acceptance.empty(model.config.gamma) for model in models]
    frozen = [Frozen(target.embedding, target.head[model.vocab].contiguous()) for model in models]
    makers = [BatchMaker(model.config, model.vocab, device=target.device) for model in models]
    generator = torch.Generator().manual_seed(seed)
    for ids, prompt in tqdm(answers, desc=f"T={temperature:g}", unit="answer", leave=False):
        chances = None
        if temperature > 0:
            chances = Chances(answer_chances(target, ids, prompt, temperature), prompt, temperature, generator)
        read: dict[tuple[int, ...], Sequence] = {}
        for i, model in enumerate(models):
            layers = model.config.target_layers
            if layers not in read:
                read[layers] = sequence_features(target, [(ids, prompt)], layers, 1)[0]
            totals[i] += sequence_acceptance(model, frozen[i], makers[i], read[layers], chances)
    return totals
