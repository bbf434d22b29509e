"""The stages of `outrider train dspark|dflash|dflash2|both|eagle3|specdiff|deer|dllm`.

Several runs, also of different kinds, may share OUT/answers.jsonl and OUT/features (or the folder of --data): each
reads the layers that it needs. OUT/checkpoint.pt and losses.csv belong to one run; OUT/drafter is the finished
checkpoint folder. With `both` these are in OUT/dspark and OUT/dflash. The same command resumes a run that was killed or
ran out of --minutes.

Diffusion drafters and `dllm` need no features: they read OUT/tokens, or OUT/features if only that exists. `specdiff`
trains stage I in OUT/stage-1, `deer` continues with stage II in OUT/stage-2. `dllm` writes OUT/delta.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.storage import replacing

from .. import networks, registry
from ..block import checkpoint
from ..block.config import BLOCK_KINDS
from ..block.model import BlockModel, TrainedModel
from ..config_file import check_layers
from ..conversion import delta
from ..conversion.layout import Layout
from ..conversion.model import convert, spare_token
from ..conversion.run import ConversionRun
from ..diffusion.denoise import Schedule, make_schedule
from ..diffusion.model import DiffusionModel
from ..eagle.config import EagleConfig
from ..eagle.model import EagleModel
from ..training.deadline import Deadline, OutOfTime
from ..training.diffusion import DiffusionRun
from ..training.features import build_store, sample_texts
from ..training.forward import frozen_part, load_drafter
from ..training.logs import LEAST_AGREEMENT, LogReader, agreement, held_out_prompts
from ..training.loop import AnswerSplit, DraftRun, ReaderRun, Recipe, TrainingRun
from ..training.prompts import AnsweredPrompt, read_samples
from ..training.start import start_markov
from ..training.store import FeatureStore
from ..training.synthesise import answer, drawn_openings, write_prompts
from ..training.target import TargetModel, keep_freed_memory
from .arguments import CONVERSION, DIFFUSION_STAGES
from .shapes import draft_vocabulary, drafter_config, fresh_drafter, make_config, target_layers

AUTHORS = {
    "dflash": {"alpha_ce": 1.0, "alpha_ce_start": 1.0, "alpha_tv": 0.0, "alpha_kl": 0.0},
    "eagle3": {
        "alpha_ce": 0.0, "alpha_tv": 0.0, "alpha_kl": 1.0, "alpha_ce_steps": 0, "kl_falloff": 0.0,
        "position_decay": -1 / math.log(0.8),
    },
}  # fmt: skip
"""`--loss authors`."""


def gather_samples(
    args: argparse.Namespace, target: TargetModel, data: Path, deadline: Deadline
) -> Iterator[AnsweredPrompt]:
    """Stage 1: yield answered samples from files, then the target's own as it writes them."""
    given = [s for path in args.prompts for s in read_samples(path)]
    yield from (s for s in given if s.response_ids)
    open_prompts = [s for s in given if not s.response_ids]
    self_prompts = data / "self-prompts.jsonl"
    if args.self_prompts and not self_prompts.exists():
        openings = args.openings or drawn_openings(target.tokenizer, args.self_prompts, args.seed)
        written = write_prompts(target, openings, args.self_prompts, seed=args.seed, rows=args.batch)
        replacing.replace({self_prompts: "".join(s.to_json() + "\n" for s in written)})
    if self_prompts.exists():
        open_prompts += read_samples(self_prompts)
    yield from answer(
        target, open_prompts, data / "answers.jsonl", temperatures=args.temperatures,
        max_new_tokens=args.answer_tokens, seed=args.seed, rows=args.batch, deadline=deadline,
    )  # fmt: skip


def former_drafter(args: argparse.Namespace, kind: str, target: TargetModel) -> TrainedModel | None:
    """Return the drafter to continue from, in float32, or None; raises ValueError for another kind or target."""
    if args.start in ("target", "fresh") or kind == CONVERSION:
        return None
    folder = Path(args.start) / kind if args.kind == "both" else Path(args.start)
    model = read_drafter(folder, kind, target)
    if isinstance(model, EagleModel):
        model.config = replace(model.config, gamma=args.gamma)
    return model


def read_drafter(folder: Path, kind: str, target: TargetModel) -> TrainedModel:
    """Read a folder's drafter for training, in float32; raises ValueError for another kind or target."""
    config = networks.read_config(folder)
    if config.kind != (registry.find(kind).kind or kind):
        raise ValueError(f"--start {folder} is a drafter of kind {config.kind}, not {kind}")
    if what := networks.not_trained(config):
        raise ValueError(f"--start {folder} has {what}: Outrider serves them and cannot train them")
    return load_drafter(folder, target, torch.float32).requires_grad_(True).train()


def held_out_numbers(store: FeatureStore, args: argparse.Namespace) -> list[int]:
    """Return numbers of the answers that training leaves out: of the first greedy ones every fourth; of logs, all to
    some prompts. Adding answers removes none, and adds none that was there."""
    if args.from_log:
        return held_out_prompts(store, args.validation)
    greedy = [i for i, e in enumerate(store.entries) if e.temperature == 0]
    return greedy[3::4][: args.validation]


def run(args: argparse.Namespace) -> int:
    """Run every stage of `outrider train`; return the exit status."""
    if args.decay_minutes and not args.minutes:
        raise ValueError("--decay-minutes are the last of --minutes, which are not given")
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    deadline = Deadline(args.minutes)
    target = TargetModel.load(args.target, device=args.device, dtype=getattr(torch, args.dtype))
    kinds = list(BLOCK_KINDS) if args.kind == "both" else [args.kind]
    if args.kind == EagleConfig.kind and args.draft_layers not in (None, 1):
        raise ValueError(f"an EAGLE-3 head has one layer, not --draft-layers {args.draft_layers}")
    formers = [former_drafter(args, kind, target) for kind in kinds]
    layers = target_layers(kinds[0], target, args.target_layers)
    read = {former.config.target_layers for former in formers if former} or {layers}
    if len(read) > 1:
        raise ValueError(f"the drafters in --start {args.start} read different layers of the target")
    layers = read.pop()
    if layers:
        check_layers(layers, target.config.num_hidden_layers)  # before hours of work
    try:
        store = gather_features(args, target, layers, deadline)
    except OutOfTime:
        print("the minutes are over before all answers were there; the same command goes on")
        return 0
    for i, (kind, former) in enumerate(zip(kinds, formers, strict=True)):
        folder = args.out / kind if args.kind == "both" else args.out
        train(args, kind, folder, target, store, former, layers, deadline.share(len(kinds) - i))
    return 0


def gather_features(
    args: argparse.Namespace, target: TargetModel, layers: tuple[int, ...], deadline: Deadline
) -> FeatureStore:
    """Gather all answers, and their features if `layers` are given; raises OutOfTime."""
    data = args.data or args.out
    data.mkdir(parents=True, exist_ok=True)
    folder, stored = store_of(data, layers)
    meta: dict[str, Any] = {
        "layers": list(stored),
        "target": checkpoint.target_identity(target.config, target.embedding)["embedding"],
    }
    if args.from_log:
        if args.prompts or args.self_prompts:
            raise ValueError("--from-log goes without --prompts and --self-prompts; train on prompts later, by --start")
        meta["logs"] = True
    store = FeatureStore(folder, width=len(stored) * target.config.hidden_size, top=args.top, meta=meta)
    store.select(layers, stored)
    if args.follow:
        if not len(store):
            raise ValueError(f"--follow: {data} has no answers yet; give the --data of a run that writes some")
        return store
    with store.writing():
        if args.from_log:
            read_log(args, target, stored, store, deadline)
            return store
        samples = gather_samples(args, target, data, deadline)
        build_store(
            target, sample_texts(target, samples), store, layers=stored, top=args.top, max_tokens=args.max_tokens,
            deadline=deadline,
        )  # fmt: skip
    if not len(store):
        raise ValueError(
            f"no training answers of at most --max-tokens {args.max_tokens} with their prompts: give --from-log FILE…, "
            "--prompts FILE… or --self-prompts N"
        )
    return store


def store_of(data: Path, layers: tuple[int, ...]) -> tuple[Path, tuple[int, ...]]:
    """Return the folder of features in `data`, and the layers that it stores. A folder that stores more than these
    `layers` serves too. Without layers, a folder without features comes first."""
    for name in ("features",) if layers else ("tokens", "features"):
        meta = data / name / "meta.json"
        if meta.exists() and set(layers) <= set(stored := json.loads(meta.read_text()).get("layers", ())):
            return meta.parent, tuple(stored)
    return data / ("features" if layers else "tokens"), layers


def read_log(
    args: argparse.Namespace, target: TargetModel, layers: tuple[int, ...], store: FeatureStore, deadline: Deadline
) -> None:
    """Let the target read logged answers into the store; print the answers left out. Raises ValueError if all were."""
    reader = LogReader(target)
    foreign = build_store(
        target, reader.read(args.from_log), store, layers=layers, top=args.top, max_tokens=args.max_tokens,
        deadline=deadline, keep=lambda text, read: agreement(read, text.temperature) >= LEAST_AGREEMENT,
    )  # fmt: skip
    for reason, count in (reader.skipped + Counter({"not this model's answers": foreign})).items():
        print(f"left out of the log: {count} x {reason}")
    if not len(store):
        what = "no answer" if not foreign else "no answer that this model may have written: answer its --prompts anew"
        raise ValueError(f"{', '.join(args.from_log)}: {what}")


def make_recipe(args: argparse.Namespace, kind: str) -> Recipe:
    given = {field.name: getattr(args, field.name) for field in fields(Recipe) if field.name in args}
    if args.alpha_ce_steps is None:  # a finished drafter is past the start, which would undo some of it
        given["alpha_ce_steps"] = 500 if args.start in ("target", "fresh") else 0
    if args.loss == "authors" and kind in AUTHORS:
        given |= AUTHORS[kind]
    return Recipe(**given)


def train(
    args: argparse.Namespace, kind: str, folder: Path, target: TargetModel, store: FeatureStore,
    former: TrainedModel | None, layers: tuple[int, ...], deadline: Deadline,
) -> None:  # fmt: skip
    """Stage 3 for one drafter: train until the deadline and write the result to `folder`/drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == CONVERSION:
        runs: Iterable[TrainingRun[Any]] = [conversion_run(args, folder, target)]
    else:
        model = former or first_drafter(args, kind, folder, target, store, layers)
        runs = drafter_runs(args, kind, folder, target, model.to(device=args.device, dtype=target.embedding.dtype))
    for training in runs:
        if not train_in_time(training, store, args, deadline):
            break
        training.optimiser.adopt_means()  # a next stage continues from the validated weights
    made = folder / ("delta" if kind == CONVERSION else "drafter")
    with training.optimiser.averaged():
        if kind == CONVERSION:
            delta.save(training.model, made)
        else:
            networks.save(training.model, training.frozen.head, made)
    write_facts(made, len(store) - len(held_out_numbers(store, args)), store.rows[1], training)


def first_drafter(
    args: argparse.Namespace, kind: str, folder: Path, target: TargetModel, store: FeatureStore, layers: tuple[int, ...]
) -> TrainedModel:  # fmt: skip
    """Return the drafter before its first step, in float32; its heads see no held-out answer."""
    config = drafter_config(args, kind, target, layers)
    model = fresh_drafter(args, config, target, draft_vocabulary(store, config, folder / "vocab.json"), store[0].tokens)
    if isinstance(model, BlockModel) and not (folder / "checkpoint.pt").exists():
        held_out = set(held_out_numbers(store, args))
        hidden = {tuple(s.tokens[s.prompt :].tolist()) for s in (store[i] for i in held_out)}
        more = [s.response_ids for path in args.pair_answers for s in read_samples(path)]
        numbers = [i for i in range(len(store)) if i not in held_out]
        start_markov(model, store, numbers, [ids for ids in more if ids not in hidden], device=target.device)
    return model


def drafter_runs(
    args: argparse.Namespace, kind: str, folder: Path, target: TargetModel, model: TrainedModel
) -> Iterator[TrainingRun[Any]]:
    """Yield the runs of a drafter's stages; train each before taking the next."""
    schedule = schedule_of(kind, model.config.gamma)
    for stage in DIFFUSION_STAGES.get(kind, ("",)):
        recipe, alpha = make_recipe(args, kind), None
        if stage == "stage-2":
            recipe = replace(recipe, steps=args.refine_steps, short_steps=0, alpha_ce_start=args.alpha_ce)
            alpha = args.refine_alpha
        yield make_run(folder / stage, model, target, recipe, schedule, alpha)


def make_run(
    folder: Path, model: TrainedModel, target: TargetModel, recipe: Recipe, schedule: Schedule | None,
    alpha: float | None,
) -> DraftRun[Any]:  # fmt: skip
    """Return the training run of a drafter; schedule, alpha: as in `DiffusionRun`, for one that denoises."""
    frozen = frozen_part(model, target)
    if isinstance(model, DiffusionModel):
        assert schedule is not None
        return DiffusionRun(folder, model, frozen, recipe, schedule=schedule, alpha=alpha)
    assert isinstance(model, BlockModel | EagleModel)
    return ReaderRun(folder, model, frozen, recipe)


def schedule_of(kind: str, gamma: int, steps: int = 0) -> Schedule | None:
    """Return the denoising steps of a drafter that denoises; steps: 0 for its own number."""
    wanted = steps or registry.find(kind).denoising_steps
    return make_schedule(gamma, min(wanted, gamma)) if wanted else None


def train_in_time(
    training: TrainingRun[Any], store: FeatureStore, args: argparse.Namespace, deadline: Deadline
) -> bool:
    """Resume and train a run; return False, with a message, if the deadline came first."""
    if training.resume():
        print(f"resuming {training.folder} at step {training.step}")
    try:
        split = AnswerSplit(store, partial(held_out_numbers, args=args))
        training.train(split, follow=args.follow, deadline=deadline)
    except OutOfTime:
        where = f"step {training.step} of {training.recipe.steps} in {training.folder}"
        print(f"the minutes are over at {where}; the same command goes on")
        return False
    return True


def write_facts(folder: Path, sequences: int, tokens: int, training: TrainingRun[Any]) -> None:
    """Save a description next to the finished weights. sequences: trained on. tokens: of all answers."""
    work = {"steps": training.step, "anchors": training.anchors, "seconds": round(training.seconds)}
    facts = {"sequences": sequences, "answer_tokens": tokens} | work
    replacing.replace({folder / "training.json": json.dumps(facts, indent=2) + "\n"})
    print(f"{folder.name} written to {folder}")


def conversion_run(args: argparse.Namespace, folder: Path, target: TargetModel) -> ConversionRun:
    """Return the run of `outrider train dllm`."""
    mask = spare_token(target) if args.mask_token is None else args.mask_token
    layout = Layout(args.block_size, mask, args.layout == "shift")
    config = replace(
        make_config(args, "diffusion", target, ()), gamma=args.block_size, mask_token_id=mask,
        num_layers=target.config.num_hidden_layers, confidence_head=False, draft_vocab_size=None,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    model = convert(target, config, layout, args.delta_rank).to(device=args.device, dtype=target.embedding.dtype)
    recipe = replace(make_recipe(args, args.kind), short_steps=0)
    frozen = frozen_part(model, target)
    return ConversionRun(folder, model, frozen, recipe, streams=args.streams, stops=target.stop_ids)
