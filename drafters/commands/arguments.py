"""Arguments of `outrider train` and `outrider export`."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ..block.config import MARKOV_HEADS, READING_KINDS
from ..conversion.layout import LAYOUTS
from ..eagle.config import EagleConfig

DIFFUSION_STAGES = {"specdiff": ("stage-1",), "deer": ("stage-1", "stage-2")}
"""Training stages of each diffusion drafter."""
CONVERSION = "dllm"
"""The conversion: the target itself becomes a block-diffusion model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `outrider train`."""
    add = parser.add_argument
    add(
        "kind",
        choices=[*READING_KINDS, "both", EagleConfig.kind, *DIFFUSION_STAGES, CONVERSION],
        help="drafter to train; both: dspark and dflash, one after the other, on the same answers; dllm: no drafter, "
        "the target is made into a block-diffusion model",
    )
    add("--target", required=True, metavar="PATH_OR_HUB_NAME", help="the model to train for, or its GGUF file")
    add("--prompts", nargs="*", default=[], metavar="FILE", help="JSONL files of prompts, or of answered prompts")
    add(
        "--from-log",
        nargs="+",
        default=[],
        metavar="FILE",
        help="JSONL files of answers that the target has given already and now only reads: chats in OpenAI's format "
        "(`messages`), `request` and `response`, `prompt` and `completion`, or lines of `outrider serve --learn`",
    )
    add("--out", required=True, type=Path, metavar="FOLDER", help="folder of this run; an interrupted run goes on")
    add("--data", type=Path, metavar="FOLDER", help="answers and features to share between runs (default: OUT)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    _choice(
        parser,
        "--dtype",
        ("auto", "bfloat16", "float32"),
        "type of the target and of the products; trained weights are float32 anyway. auto: bfloat16, but float32 on a "
        "processor without bfloat16 products",
    )
    add("--threads", type=int, default=0, metavar="N", help="CPU threads (default: torch's)")
    _number(parser, "--seed", 0, "seed of all random choices")
    add("--minutes", type=float, metavar="M", help="stop after M minutes, with everything on disk (default: never)")
    add(
        "--follow",
        action="store_true",
        help="train on the answers that another run is writing to --data meanwhile, and write none",
    )
    data = parser.add_argument_group("answers and features")
    data.add_argument(
        "--pair-answers",
        nargs="*",
        default=[],
        metavar="FILE",
        help="answered prompts that only teach the sequential head which token follows which; they need no features",
    )
    _number(data, "--self-prompts", 0, "prompts that the target writes itself")
    data.add_argument(
        "--openings",
        nargs="+",
        metavar="TEXT",
        help="first words of --self-prompts; '': any (default: one of 130 phrases, half of them with a random word)",
    )
    data.add_argument(
        "--temperatures",
        nargs="*",
        type=float,
        default=[0.0, 0.0, 0.7, 1.0],
        metavar="T",
        help="temperatures at which answers are written, in turn (default: 0 0 0.7 1)",
    )
    _number(data, "--answer-tokens", 256, "tokens of an answer, at most")
    _number(data, "--batch", 64, "answers written at a time")
    _number(data, "--max-tokens", 1024, "tokens of a training sequence, at most")
    _number(data, "--top", 32, "likeliest target tokens kept per position")
    _number(data, "--validation", 24, "greedy answers held out to measure tau; give a resumed run the same number")
    shape = parser.add_argument_group("drafter")
    _number(shape, "--gamma", 7, "draft tokens of a block; for eagle3 steps of training-time test")
    layers = partial(shape.add_argument, type=int, metavar="N")
    layers("--draft-layers", help="layers (default: 2; 3 for deer, specdiff; 1 for eagle3)")
    layers("--target-layers", nargs="*", help="target layers read (default: five, evenly spread; for eagle3 three)")
    starts = "target layers that the layers of deer and specdiff begin as (default: the first ones, and the last)"
    layers("--start-layers", nargs="*", help=starts)
    _number(shape, "--draft-vocab", 8192, "tokens that can be proposed; 0: all (dflash2 proposes all)")
    _number(shape, "--rank", 64, "rank of the sequential head (dspark) or the selector (dflash2)")
    _number(shape, "--candidates", 16, "tokens of each position that the selector chooses from (dflash2)")
    _choice(shape, "--markov-head", MARKOV_HEADS, "kind of the sequential head")
    shape.add_argument(
        "--mask-token",
        type=int,
        metavar="ID",
        help="token id of the mask (default: unknown, else padding; for dllm an unused special token)",
    )
    shape.add_argument(
        "--start",
        default="target",
        metavar="target|fresh|FOLDER",
        help="first weights: the target's layers, random ones, or a drafter's, with its shape; "
        "for both, drafters FOLDER/dspark and FOLDER/dflash (default: %(default)s)",
    )
    conversion = parser.add_argument_group("conversion (dllm)")
    _number(conversion, "--block-size", 4, "tokens of a block")
    _choice(
        conversion,
        "--layout",
        LAYOUTS,
        "shift: each row predicts the next token, finished rows are causal, as in the target; sdar: each row predicts "
        "its own token, finished rows see their whole block",
    )
    _number(conversion, "--delta-rank", 20, "rank of every projection's delta")
    _number(conversion, "--streams", 2, "times a block is masked anew each time it is read")
    recipe = parser.add_argument_group("recipe")
    _number(recipe, "--steps", 20000, "training steps")
    _number(recipe, "--refine-steps", 5000, "steps of stage II, after --steps of stage I (deer)")
    _number(recipe, "--refine-alpha", 1.15, "in stage II the i-th of R masked tokens weighs X ** (R - i)")
    _number(recipe, "--sequences", 4, "sequences per step")
    _number(recipe, "--anchors", 64, "anchors per sequence and step, at most")
    _number(recipe, "--lr", 1.0e-3, "largest learning rate")
    _number(recipe, "--warmup", 100, "first steps, over which the rate rises to --lr")
    _number(recipe, "--decay-steps", 6000, "last steps, over which the rate falls to 0")
    _number(recipe, "--decay-minutes", 0.0, "the same by the clock: the last of --minutes")
    _number(recipe, "--short-block", 3, "block length of the first --short-steps steps")
    _number(recipe, "--short-steps", 10000, "steps with --short-block")
    _number(recipe, "--validate-every", 500, "steps from one measurement of tau to the next")
    _number(recipe, "--save-seconds", 120.0, "seconds from one checkpoint to the next")
    _number(recipe, "--ema", 0.0, "save running means of the weights, X of them kept each step")
    loss = parser.add_argument_group("loss")
    _choice(
        loss,
        "--loss",
        ("dspark", "authors"),
        "dspark: the weights below for every drafter; authors: as its authors do, DFlash by cross entropy alone, "
        "eagle3 by the divergence alone, each position weighing 0.8 of the one before",
    )
    _number(loss, "--alpha-ce", 0.1, "weight of the true token's cross entropy, after the start")
    _number(loss, "--alpha-ce-start", 1.0, "the same at the first step")
    loss.add_argument(
        "--alpha-ce-steps",
        type=int,
        metavar="N",
        help="steps from one to the other (default: 500; 0 where --start is a drafter)",
    )
    _number(loss, "--alpha-tv", 0.9, "weight of the total variation")
    _number(loss, "--alpha-kl", 0.0, "weight of the divergence from the target's stored tokens, from 0 at first")
    _number(loss, "--kl-falloff", 0.0, "it is times exp(-X x the position's acceptance)")
    _number(loss, "--alpha-conf", 1.0, "weight of the confidence head's loss")
    loss.add_argument(
        "--position-decay", type=float, metavar="X", help="position k weighs exp(-(k - 1) / X) (default: gamma)"
    )
    loss.add_argument(
        "--survival-weights",
        dest="survival",
        action="store_true",
        help="weigh a position by the chance that verification gets there: the product of the acceptances before it",
    )


def _number(group: argparse._ActionsContainer, name: str, default: float, help: str) -> None:
    """Add a flag with a number of the default's type."""
    metavar = "N" if isinstance(default, int) else "X"
    help += " (default: %(default)s)"
    group.add_argument(name, type=type(default), default=default, metavar=metavar, help=help)


def _choice(group: argparse._ActionsContainer, name: str, choices: Sequence[str], help: str) -> None:
    """Add a flag with one of these values; the first is the default."""
    group.add_argument(name, choices=choices, default=choices[0], help=f"{help} (default: %(default)s)")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `outrider export`."""
    parser.add_argument(
        "drafter",
        nargs="+",
        type=Path,
        metavar="DRAFTER",
        help="drafter folder, in any storage, a run's checkpoint.pt, or a dllm run's delta; of several runs from the"
        " same weights, their mean",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="folder to write")
    _choice(
        parser,
        "--storage",
        ("bf16", "int8", "speculators"),
        "bf16: the folder that stock SGLang loads; int8: the compact storage of shipped drafters; speculators: vLLM's "
        "format, of an EAGLE-3 head",
    )
    parser.add_argument(
        "--target", type=Path, metavar="FOLDER", help="the model of a dllm run's delta, or of an EAGLE-3 head"
    )
