"""tau of a drafter folder on files of prompts, without a server.

The target answers, and the drafter is then followed along those answers (see `validate`). A server at temperature 0
accepts the same tokens, up to ties that rounding decides; at higher temperatures its tau has the same distribution.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tqdm import tqdm

from ..acceptance import Acceptance, acceptance_table, plot_acceptance
from ..block import check_target, load, target_identity
from .batches import BatchMaker
from .decode import decode
from .features import answer_chances, sequence_features
from .forward import Frozen
from .prompts import read_samples
from .store import Sequence
from .target import TargetModel, keep_freed_memory
from .validate import Chances, sequence_acceptance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `measure`."""
    add = parser.add_argument
    add("drafters", nargs="+", type=Path, help="drafter folders")
    add("--target", required=True, help="Hugging Face folder or name of the target model")
    add("--prompts", nargs="+", required=True, metavar="FILE", help="JSONL files; the first user turn is answered")
    add("--count", type=int, default=64, help="prompts of each file")
    add("--new-tokens", type=int, default=256)
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="(default: 0 1)")
    add("--answers", type=Path, help="folder that keeps the target's answers for the next measurement")
    add("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--plot", type=Path, help="PNG of acceptance by position, all files together")


Answer = tuple[list[int], int]
"""(ids of a prompt and its answer, prompt length)"""


def target_answers(
    target: TargetModel, path: str, *, count: int, new_tokens: int, temperature: float, kept: Path | None
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
    for number, new, _ in tqdm(written, total=len(prompts), desc=f"{Path(path).stem}, T={temperature:g}", leave=False):
        found[number] = (prompts[number] + new, len(prompts[number]))
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


def run(args: argparse.Namespace) -> int:
    """Print one table of all drafters on all files; returns the exit status."""
    if min(args.temperatures) < 0:
        raise ValueError(f"--temperatures are at least 0, got {min(args.temperatures):g}")
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    target = TargetModel.load(args.target, device=args.device, dtype=getattr(torch, args.dtype))
    short = len({folder.name for folder in args.drafters}) == len(args.drafters)
    names = [folder.name if short else str(folder) for folder in args.drafters]
    rows: dict[str, Acceptance] = {}
    pooled: dict[str, Acceptance] = {}
    for temperature in args.temperatures:
        for path in args.prompts:
            answers = target_answers(
                target, path, count=args.count, new_tokens=args.new_tokens, temperature=temperature, kept=args.answers
            )
            measured = measure(target, args.drafters, answers, temperature=temperature)
            for name, found in zip(names, measured, strict=True):
                rows[f"{name}, {Path(path).stem}, T={temperature:g}"] = found
                both = f"{name}, T={temperature:g}"
                pooled[both] = pooled.get(both, Acceptance.empty(len(found.tried))) + found
                print(f"{both}, {Path(path).stem}: tau {found.accepted_length:.3f}", flush=True)
    print(acceptance_table(rows))
    if args.plot and not plot_acceptance(pooled, args.plot):
        print("matplotlib is not installed: no plot")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args()))
