"""tau of drafter folders on files of prompts, without a server (`outrider bench drafters`).

The target answers, and the drafter is then followed along these answers (see `validate`). A server at temperature 0
accepts the same tokens, up to ties that rounding decides; at higher temperatures its tau has the same distribution.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from outrider.storage.replacing import replace

from ..acceptance import Acceptance
from ..block.config import READING_KINDS
from ..config_file import CheckpointError
from ..diffusion.denoise import make_schedule
from ..eagle.config import EagleConfig
from ..networks import not_trained, read_config
from .batches import BatchMaker
from .decode import decode
from .features import answer_chances, sequence_features
from .forward import frozen_part, load_drafter
from .prompts import read_samples
from .store import Sequence
from .target import TargetModel
from .validate import Chances, Steps, acceptance, hits_of, walk

Answer = tuple[list[int], int]
"""(ids of a prompt and its answer, prompt length)"""


def target_answers(
    target: TargetModel, path: str | Path, *, count: int, new_tokens: int, temperature: float, kept: Path | None
) -> list[Answer]:
    """Return answers, at least two tokens long, to the first `count` prompts of a file."""
    store = kept / f"{Path(path).stem}-{count}-{new_tokens}-T{temperature:g}.json" if kept else None
    if store and store.exists():
        return [(ids, prompt) for ids, prompt in json.loads(store.read_text())]
    prompts = [target.chat_ids(list(s.turns[:1])) for s in list(read_samples(path))[:count]]
    written = decode(
        target, prompts, [temperature] * len(prompts), max_new_tokens=new_tokens, stop_ids=target.stop_ids,
        seeds=list(range(len(prompts))),
    )  # fmt: skip
    texts = {}
    for text in tqdm(written, total=len(prompts), desc=f"{Path(path).stem}, T={temperature:g}", leave=False):
        texts[text.number] = (prompts[text.number] + text.ids, len(prompts[text.number]))
    answers = [texts[number] for number in sorted(texts) if len(texts[number][0]) >= texts[number][1] + 2]
    if store:
        store.parent.mkdir(parents=True, exist_ok=True)
        replace({store: json.dumps(answers)})
    return answers


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter folder, and how it drafts; steps: of denoising, for a diffusion drafter; else 0."""

    name: str
    folder: Path
    steps: int = 0


def arms_of(folders: list[Path], steps: list[int]) -> list[Arm]:
    """Return an arm per folder, for diffusion drafters one per number of denoising steps; raises CheckpointError."""
    short = len({folder.name for folder in folders}) == len(folders)
    arms = []
    for folder in folders:
        name = folder.name if short else str(folder)
        config = read_config(folder)
        if what := not_trained(config):
            raise CheckpointError(f"{folder} has {what}; measure it in a server: outrider bench load")
        if config.kind in (*READING_KINDS, EagleConfig.kind):
            arms.append(Arm(name, folder))
        else:
            arms += [Arm(f"{name}, {n} step{'s' * (n > 1)}", folder, n) for n in steps]
    return arms


def measure(
    target: TargetModel, arms: list[Arm], answers: list[Answer], *, temperature: float = 0.0, steps: Steps = walk
) -> list[Acceptance]:
    """Return the acceptance of each arm along the same answers, which the target wrote at `temperature`."""
    followed = []
    for arm in arms:
        model = load_drafter(arm.folder, target, target.embedding.dtype).to(target.device)
        frozen = frozen_part(model, target)
        maker = BatchMaker(model.config, model.vocab, device=target.device)
        schedule = make_schedule(model.config.gamma, arm.steps) if arm.steps else None
        followed.append((hits_of(model, frozen, maker.columns, schedule), maker, model.config.target_layers))
    totals = [Acceptance.empty(maker.config.gamma) for _, maker, _ in followed]
    generator = torch.Generator().manual_seed(0)
    for ids, prompt in tqdm(answers, desc=f"T={temperature:g}", unit="answer", leave=False):
        chances = None
        if temperature > 0:
            chances = Chances(answer_chances(target, ids, prompt, temperature), prompt, temperature, generator)
        read: dict[tuple[int, ...], Sequence] = {}
        for i, (hits, maker, layers) in enumerate(followed):
            if layers not in read:
                read[layers] = sequence_features(target, [(ids, prompt)], layers, 1)[0]
            totals[i] += acceptance(hits, maker, [read[layers]], chances, steps=steps)
    return totals
