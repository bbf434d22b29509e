"""Arguments of `outrider train` and `outrider export`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..block.config import BLOCK_KINDS
from ..conversion.layout import LAYOUTS

DIFFUSION_STAGES = {"specdiff": ("stage-1",), "deer": ("stage-1", "stage-2")}
"""Training stages of each diffusion drafter."""
CONVERSION = "dllm"
"""The conversion: the target itself becomes a block-diffusion model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `outrider train`."""
    add = parser.add_argument
    add(
        "kind",
        choices=[*BLOCK_KINDS, "both", *DIFFUSION_STAGES, CONVERSION],
        help="drafter to train; both: dspark and dflash, one after the other, on the same answers; dllm: no drafter, "
        "the target is made into a block-diffusion model",
    )
    add("--target", required=True, help="Hugging Face folder or name of the target model")
    add("--prompts", nargs="*", default=[], metavar="FILE", help="JSONL files of prompts, or of answered prompts")
    add("--out", required=True, type=Path, help="folder of this run; an interrupted run in it is resumed")
    add("--data", type=Path, help="folder of answers and features to share between runs (default: OUT)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="of the target and of the products, the weights that are trained are float32 anyway; auto: bfloat16, but "
        "float32 on a processor without bfloat16 products",
    )
    add("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, help="stop after so many, with everything on disk; the same command goes on")
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
        help="answered prompts that only tell the sequential head which token follows which; needs no features",
    )
    data.add_argument("--self-prompts", type=int, default=0, help="prompts the target writes itself")
    data.add_argument("--openings", nargs="*", default=[""], help="how those begin; '' leaves them free")
    data.add_argument("--temperatures", nargs="*", type=float, default=[0.0, 0.0, 0.7, 1.0], help="of the answers")
    data.add_argument("--answer-tokens", type=int, default=256)
    data.add_argument("--batch", type=int, default=64, help="answers written at a time")
    data.add_argument("--max-tokens", type=int, default=1024, help="longest training sequence")
    data.add_argument("--top", type=int, default=32, help="likeliest target tokens kept per position")
    data.add_argument(
        "--validation",
        type=int,
        default=24,
        help="greedy answers held out to measure tau, beside as many that are trained on",
    )
    shape = parser.add_argument_group("drafter")
    shape.add_argument("--gamma", type=int, default=7)
    shape.add_argument("--draft-layers", type=int, help="(default: 2, of deer and specdiff 3)")
    shape.add_argument("--target-layers", nargs="*", type=int, help="layers read (default: five, evenly spread)")
    shape.add_argument(
        "--start-layers",
        nargs="*",
        type=int,
        help="target layers that the layers of deer and specdiff begin as (default: the first ones, and the last)",
    )
    shape.add_argument("--draft-vocab", type=int, default=8192, help="tokens it can propose; 0 for all")
    shape.add_argument("--rank", type=int, default=64, help="rank of the sequential head (dspark)")
    shape.add_argument("--markov-head", choices=["vanilla", "gated", "rnn"], default="vanilla")
    shape.add_argument(
        "--mask-token",
        type=int,
        help="token id of the mask (default: unknown, else padding; for dllm a special token that nothing uses)",
    )
    shape.add_argument(
        "--start",
        default="target",
        metavar="target|fresh|FOLDER",
        help="first weights: the target's layers, random ones, or those of a drafter, whose shape is then taken; "
        "for both, drafters FOLDER/dspark and FOLDER/dflash (default: %(default)s)",
    )
    conversion = parser.add_argument_group("conversion (dllm)")
    conversion.add_argument("--block-size", type=int, default=4, help="tokens of a block (default: %(default)s)")
    conversion.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="shift",
        help="shift: each row predicts the next token, finished rows are causal, as in the target; sdar: each row "
        "predicts its own token, finished rows see their whole block (default: %(default)s)",
    )
    conversion.add_argument(
        "--delta-rank", type=int, default=20, metavar="R", help="of every projection's delta (default: %(default)s)"
    )
    conversion.add_argument(
        "--streams",
        type=int,
        default=2,
        help="times a block is masked anew each time it is read (default: %(default)s)",
    )
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--steps", type=int, default=20000)
    recipe.add_argument("--refine-steps", type=int, default=5000, help="of stage II, after --steps of stage I (deer)")
    recipe.add_argument(
        "--refine-alpha",
        type=float,
        default=1.15,
        metavar="A",
        help="in stage II the i-th of R masked tokens weighs A ** (R - i) (default: %(default)s)",
    )
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
    loss.add_argument(
        "--alpha-ce-steps", type=int, help="steps from one to the other (default: 500; 0 where --start is a drafter)"
    )
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


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `outrider export`."""
    parser.add_argument(
        "drafter",
        nargs="+",
        type=Path,
        help="drafter folder, in any storage, a run's checkpoint.pt, or a dllm run's delta; of several runs from the"
        " same weights, their mean",
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--storage",
        choices=["bf16", "int8"],
        default="bf16",
        help="bf16: the folder that stock SGLang loads; int8: the compact storage of shipped drafters",
    )
    parser.add_argument("--target", type=Path, help="folder of the model that a dllm run's delta is of")
