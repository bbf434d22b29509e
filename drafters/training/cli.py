"""`outrider train dspark|dflash|both` and `outrider export`: arguments and the stages behind them.

OUT/answers.jsonl and OUT/features (or those of --data) can be shared by several runs; OUT/checkpoint.pt and losses.csv
belong to one; OUT/drafter is the finished checkpoint folder. With `both` these are in OUT/dspark and OUT/dflash. The
same command resumes a run that was killed or whose --minutes are over.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from ..block import checkpoint
from ..block.config import ARCHITECTURES, BlockConfig
from ..block.model import BlockModel
from ..networks import load_any
from .deadline import Deadline, OutOfTime
from .decode import Wanted
from .features import build_store
from .forward import Frozen
from .loop import Recipe, Run, checkpoint_model
from .prompts import Sample, read_samples
from .start import start_from_target, start_markov
from .store import FeatureStore
from .synthesise import Keep, answer, write_prompts
from .target import TargetModel, keep_freed_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `outrider train`."""
    add = parser.add_argument
    add(
        "kind",
        choices=[*ARCHITECTURES, "both"],
        help="drafter to train; both: one after the other, on the same answers",
    )
    add("--target", required=True, help="Hugging Face folder or name of the target model")
    add("--prompts", nargs="*", default=[], metavar="FILE", help="JSONL files of prompts, or of answered prompts")
    add("--out", required=True, type=Path, help="folder of this run; an interrupted run in it is resumed")
    add("--data", type=Path, help="folder of answers and features to share between runs (default: OUT)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, help="stop after so many, with everything on disk; the same command goes on")
    data = parser.add_argument_group("answers and features")
    data.add_argument(
        "--pair-answers",
        nargs="*",
        default=[],
        metavar="FILE",
        help="answered prompts that only tell the sequential head which token follows which; needs no features",
    )
    data.add_argument("--self-prompts", type=int, default=0, help="prompts the target writes itself")
    data.add_argument("--openings", nargs="*", default=[""], help="how those begin; '' leaves them free")
    data.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 0.0, 0.7, 1.0], help="of the answers")
    data.add_argument("--answer-tokens", type=int, default=256)
    data.add_argument("--batch", type=int, default=64, help="answers written at a time")
    data.add_argument("--max-tokens", type=int, default=1024, help="longest training sequence")
    data.add_argument("--top", type=int, default=32, help="likeliest target tokens kept per position")
    data.add_argument("--validation", type=int, default=24, help="greedy answers held out to measure tau")
    shape = parser.add_argument_group("drafter")
    shape.add_argument("--gamma", type=int, default=7)
    shape.add_argument("--draft-layers", type=int, default=2)
    shape.add_argument("--target-layers", nargs="*", type=int, help="layers read (default: five, evenly spread)")
    shape.add_argument("--draft-vocab", type=int, default=8192, help="tokens it can propose; 0 for all")
    shape.add_argument("--rank", type=int, default=64, help="rank of the sequential head (dspark)")
    shape.add_argument("--markov-head", choices=["vanilla", "gated", "rnn"], default="vanilla")
    shape.add_argument("--mask-token", type=int, help="token id of the mask (default: unknown, else padding)")
    shape.add_argument(
        "--start",
        default="target",
        metavar="target|fresh|FOLDER",
        help="first weights: the target's last layers, random ones, or those of a drafter, whose shape is then taken; "
        "for both, drafters FOLDER/dspark and FOLDER/dflash (default: %(default)s)",
    )
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--steps", type=int, default=20000)
    recipe.add_argument("--sequences", type=int, default=4, help="sequences per step")
    recipe.add_argument("--anchors", type=int, default=64, help="most anchors per sequence and step")
    recipe.add_argument("--lr", type=float, default=1.0e-3)
    recipe.add_argument("--warmup", type=int, default=100)
    recipe.add_argument("--decay-steps", type=int, default=6000, help="last steps, over which the rate falls to 0")
    recipe.add_argument("--short-block", type=int, default=3, help="block length of the first --short-steps steps")
    recipe.add_argument("--short-steps", type=int, default=10000)
    recipe.add_argument("--validate-every", type=int, default=500)
    recipe.add_argument("--save-seconds", type=float, default=120.0)
    recipe.add_argument(
        "--ema",
        type=float,
        default=0.0,
        metavar="F",
        help="save running means of the weights, F of them kept each step",
    )
    loss = parser.add_argument_group("loss")
    loss.add_argument(
        "--loss",
        choices=["dspark", "authors"],
        default="dspark",
        help="dspark: the weights below for either drafter; authors: DFlash by cross entropy alone, as its authors do",
    )
    loss.add_argument("--alpha-ce", type=float, default=0.1, help="of the true token's cross entropy, after the start")
    loss.add_argument("--alpha-ce-start", type=float, default=1.0, help="and before the first step")
    loss.add_argument("--alpha-ce-steps", type=int, default=500, help="steps from one to the other")
    loss.add_argument("--alpha-tv", type=float, default=0.9, help="of the total variation")
    loss.add_argument(
        "--alpha-kl", type=float, default=0.0, help="of the divergence from the target's stored tokens, from 0 at first"
    )
    loss.add_argument(
        "--kl-falloff", type=float, default=0.0, metavar="ETA", help="times exp(-ETA x the position's acceptance)"
    )
    loss.add_argument("--alpha-conf", type=float, default=1.0, help="of the confidence head")
    loss.add_argument(
        "--position-decay", type=float, metavar="D", help="position k weighs exp(-(k - 1) / D) (default: gamma)"
    )
    loss.add_argument(
        "--survival-weights",
        action="store_true",
        help="times the chance that verification gets there: the product of the acceptances before it",
    )


def spread_layers(count: int, wanted: int = 5) -> tuple[int, ...]:
    """`wanted` layer ids spread evenly from the second to the second last (fewer on shallow targets)."""
    wanted = min(wanted, max(1, count - 1))
    first, last = min(1, count - 1), max(0, count - 2)
    return tuple(dict.fromkeys(round(first + (last - first) * i / max(1, wanted - 1)) for i in range(wanted)))


def gather_samples(
    args: argparse.Namespace, target: TargetModel, data: Path, keep: Keep, deadline: Deadline
) -> list[Sample]:
    """Stage 1: answered samples, from files and written by the target, whose features are kept on the way."""
    given = [s for path in args.prompts for s in read_samples(path)]
    answered = [s for s in given if s.response_ids]
    open_prompts = [s for s in given if not s.response_ids]
    own = data / "self-prompts.jsonl"
    if args.self_prompts and not own.exists():
        written = write_prompts(target, args.openings, args.self_prompts, seed=args.seed, rows=args.batch)
        own.write_text("".join(s.to_json() + "\n" for s in written), encoding="utf-8")
    if own.exists():
        open_prompts += read_samples(own)
    answers = data / "answers.jsonl"
    if open_prompts:
        answer(
            target, open_prompts, answers, temperatures=args.temperatures, max_new_tokens=args.answer_tokens,
            seed=args.seed, rows=args.batch, keep=keep, deadline=deadline,
        )  # fmt: skip
    samples = answered + (list(read_samples(answers)) if answers.exists() else [])
    if not samples:
        raise ValueError("nothing to train on: give --prompts FILE… or --self-prompts N")
    return samples


def start(
    args: argparse.Namespace, model: BlockModel, target: TargetModel, store: FeatureStore, held_out: list[int]
) -> None:
    """Weights before the first step; held-out answers teach the sequential head nothing either."""
    if args.start == "target":
        start_from_target(model, target, store[0].tokens)
    hidden = {tuple(s.tokens[s.prompt :].tolist()) for s in (store[i] for i in held_out)}
    more = [s.response_ids for path in args.pair_answers for s in read_samples(path)]
    numbers = [i for i in range(len(store)) if i not in set(held_out)]
    start_markov(model, store, numbers, [ids for ids in more if ids not in hidden])


def former_drafter(args: argparse.Namespace, kind: str, target: TargetModel) -> BlockModel | None:
    """The drafter to go on with, in float32, or None; raises ValueError where it is of another kind or target."""
    if args.start in ("target", "fresh"):
        return None
    folder = Path(args.start) / kind if args.kind == "both" else Path(args.start)
    model = checkpoint.load(folder, dtype=torch.float32).requires_grad_(True).train()
    if model.config.kind != kind:
        raise ValueError(f"--start {folder} is a {model.config.kind} drafter, not {kind}")
    checkpoint.check_target(model.config, checkpoint.target_identity(target.config, target.embedding))
    return model


def held_out_numbers(store: FeatureStore, count: int) -> list[int]:
    """The first `count` greedy answers, which training leaves alone; adding answers does not change them."""
    greedy = [i for i, e in enumerate(store.entries) if e.temperature == 0]
    return greedy[: min(count, len(greedy) // 4)]


def make_config(args: argparse.Namespace, kind: str, target: TargetModel, layers: tuple[int, ...]) -> BlockConfig:
    """Shape of the drafter: the target's layer shape, our depth, vocabulary and heads."""
    theirs, tokenizer = target.config, target.tokenizer
    mask = args.mask_token
    if mask is None:
        mask = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.pad_token_id
    heads, dspark = theirs.num_attention_heads, kind == "dspark"
    rope = getattr(theirs, "rope_parameters", None) or {}
    vocab = args.draft_vocab if 0 < args.draft_vocab < theirs.vocab_size else None
    return BlockConfig(
        kind=kind,
        gamma=args.gamma,
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_layers=args.draft_layers,
        num_heads=heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        num_target_layers=theirs.num_hidden_layers,
        target_layers=layers,
        mask_token_id=int(mask or 0),
        rms_norm_eps=theirs.rms_norm_eps,
        rope_theta=float(rope.get("rope_theta", getattr(theirs, "rope_theta", 1e4))),
        max_positions=theirs.max_position_embeddings,
        markov_rank=args.rank if dspark else 0,
        markov_head=args.markov_head,
        confidence_head=dspark,
        draft_vocab_size=vocab,
        target=checkpoint.target_identity(theirs, target.embedding),
    )


def run(args: argparse.Namespace) -> int:
    """Run every stage of `outrider train`; returns the exit status."""
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    deadline = Deadline(args.minutes)
    target = TargetModel.load(args.target, device=args.device, dtype=getattr(torch, args.dtype))
    kinds = list(ARCHITECTURES) if args.kind == "both" else [args.kind]
    formers = [former_drafter(args, kind, target) for kind in kinds]
    layers = tuple(args.target_layers or spread_layers(target.config.num_hidden_layers))
    read = {former.config.target_layers for former in formers if former} or {layers}
    if len(read) > 1:
        raise ValueError(f"the drafters in --start {args.start} read different layers of the target")
    layers = read.pop()
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
    """Stages 1 and 2: all answers and their features; raises OutOfTime."""
    data = args.data or args.out
    data.mkdir(parents=True, exist_ok=True)
    meta = {"layers": list(layers), "target": checkpoint.target_identity(target.config, target.embedding)["embedding"]}
    store = FeatureStore(data / "features", width=len(layers) * target.config.hidden_size, top=args.top, meta=meta)
    keep = Keep(store, Wanted(layers, args.top), args.max_tokens)
    samples = gather_samples(args, target, data, keep, deadline)
    build_store(
        target, samples, store, layers=layers, top=args.top, max_tokens=args.max_tokens, deadline=deadline
    )  # fmt: skip
    return store


def make_recipe(args: argparse.Namespace, kind: str) -> Recipe:
    """What the flags say, for this drafter."""
    given = {
        name: getattr(args, name)
        for name in (
            "steps", "sequences", "anchors", "lr", "warmup", "decay_steps", "short_block", "short_steps", "seed",
            "validate_every", "save_seconds", "ema", "alpha_ce", "alpha_ce_start", "alpha_ce_steps", "alpha_tv",
            "alpha_kl", "kl_falloff", "alpha_conf", "position_decay",
        )
    }  # fmt: skip
    if kind == "dflash" and args.loss == "authors":
        given |= {"alpha_ce": 1.0, "alpha_ce_start": 1.0, "alpha_tv": 0.0, "alpha_kl": 0.0}
    return Recipe(**given, survival=args.survival_weights)


def train(
    args: argparse.Namespace, kind: str, folder: Path, target: TargetModel, store: FeatureStore,
    former: BlockModel | None, layers: tuple[int, ...], deadline: Deadline,
) -> None:  # fmt: skip
    """Stage 3 for one drafter, as far as the deadline lets it; what there is becomes `folder`/drafter."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = held_out_numbers(store, args.validation)
    if former:
        model = former
    else:
        config = make_config(args, kind, target, layers)
        vocab = draft_vocabulary(store, config, folder / "vocab.json")
        torch.manual_seed(args.seed)
        model = BlockModel(config, vocab)
        if not (folder / "checkpoint.pt").exists():
            start(args, model, target, store, held_out)
    model = model.to(device=args.device, dtype=target.embedding.dtype)
    training = Run(
        folder, model, Frozen(target.embedding, target.head[model.vocab].contiguous()), make_recipe(args, kind)
    )
    if training.resume():
        print(f"resuming {folder} at step {training.step}")
    try:
        training.train(store, held_out, deadline=deadline)
    except OutOfTime:
        print(f"the minutes are over at step {training.step} of {args.steps}; the same command goes on")
    with training.optimiser.averaged():
        checkpoint.save_compact(model, folder / "drafter")
    facts = {
        "sequences": len(store) - len(held_out), "answer_tokens": store.rows[1], "steps": training.step,
        "anchors": training.anchors, "seconds": round(training.seconds),
    }  # fmt: skip
    (folder / "drafter" / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"drafter written to {folder / 'drafter'}")


def draft_vocabulary(store: FeatureStore, config: BlockConfig, path: Path) -> torch.Tensor | None:
    """The most frequent tokens of the answers, ascending; None for the whole vocabulary.

    Kept in `path`, since a run that is resumed with more answers must go on with the tokens it began with.
    """
    if not config.draft_vocab_size:
        return None
    if not path.exists():
        counts = torch.from_numpy(store.token_counts(config.vocab_size))
        path.write_text(json.dumps(counts.topk(config.draft_vocab_size).indices.sort().values.tolist()))
    return torch.tensor(json.loads(path.read_text()))


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `outrider export`."""
    parser.add_argument("drafter", type=Path, help="drafter folder, in any storage, or a run's checkpoint.pt")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--storage",
        choices=["bf16", "int8"],
        default="bf16",
        help="bf16: the folder that stock SGLang loads; int8: the compact storage of shipped drafters",
    )


def export(args: argparse.Namespace) -> int:
    """Write a drafter in another storage; returns the exit status."""
    model = checkpoint_model(args.drafter) if args.drafter.is_file() else load_any(args.drafter, dtype=torch.float32)
    if args.storage == "int8":
        checkpoint.save_compact(model, args.out)
    else:
        checkpoint.save_plain(model, args.out)
    print(f"wrote {args.out} ({checkpoint.stored_bytes(args.out) / 1e6:.1f} MB)")
    return 0
