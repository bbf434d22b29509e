"""Accepted length of drafter folders on files of prompts, without a server.

The target answers once; every drafter then drafts along the same answers. At temperature 0 a server accepts the same
tokens, up to ties that rounding decides; at higher temperatures its accepted length has the same distribution.
--answers keeps the target's answers for the next measurement. A step begins where the last one ended, so drafters
begin their steps at different tokens. --anchors all begins a step at every token instead; tau is then the mean over all
tokens, and larger for answers with long easy parts.

examples:
  outrider bench drafters runs/dspark/drafter --target ./Qwen3-4B --prompts humaneval.jsonl --temperatures 0
  outrider bench drafters dspark dflash --target ./Qwen3-4B --prompts humaneval.jsonl gsm8k.jsonl \\
      --answers answers --json drafters.json
"""

import argparse
import json
from pathlib import Path

import torch

from outrider.drafters.acceptance import Acceptance, acceptance_table
from outrider.drafters.training.measure import arms_of, measure, target_answers
from outrider.drafters.training.target import TargetModel, keep_freed_memory
from outrider.drafters.training.validate import everywhere, walk

from ..errors import UserError
from ..machine import hardware
from ..model.target import plain_folder
from ..prompt_files import read_questions
from . import harness, record

STEPS = {"walked": walk, "all": everywhere}


MOVED = {"--plot": "--json", "--denoising-order": "--denoising-steps; tokens are revealed from left to right"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("drafters", nargs="+", type=Path, metavar="FOLDER", help="drafter folders")
    add("--target", required=True, metavar="PATH_OR_HUB_NAME", help="the model that they draft for")
    add("--prompts", nargs="+", type=Path, required=True, metavar="FILE", help=harness.PROMPTS_HELP)
    add("--count", type=int, default=64, metavar="N", help="prompts of each file (default: %(default)s)")
    add("--new-tokens", type=int, default=256, metavar="N", help="tokens of an answer, at most (default: %(default)s)")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="temperatures (default: 0 1)")
    steps = "of diffusion drafters (default: 1 2)"
    add("--denoising-steps", nargs="+", type=int, default=[1, 2], metavar="N", help=steps)
    add(
        "--anchors",
        choices=STEPS,
        default="walked",
        help="where steps begin: walked: where the one before ended, as on a server; all: at every token of an answer "
        "(default: walked)",
    )
    add("--answers", type=Path, metavar="FOLDER", help="keeps the target's answers for the next measurement")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads (default: torch's)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (default: %(default)s)")
    add(
        "--dtype",
        choices=["auto", "bfloat16", "float32"],
        default="auto",
        help="auto: bfloat16, but float32 on a processor without bfloat16 products (default: auto)",
    )
    harness.add_output_flags(parser, json="the counts")


def run(args: argparse.Namespace) -> int:
    if min(args.temperatures) < 0:
        raise UserError(f"--temperatures are at least 0, not {min(args.temperatures):g}")
    harness.check_positive(args, "count", "new_tokens")
    harness.check_outputs(args)
    for path in args.prompts:
        read_questions(path)  # refuse an unreadable file before measuring the first
    try:
        by_file = _measure(args)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    print(acceptance_table(by_file))
    counts = {name: acceptance.counts() for name, acceptance in by_file.items()}
    folders = {folder.name: folder for folder in args.drafters}
    files = {name: folder / "training.json" for name, folder in folders.items()}
    trained = {name: json.loads(file.read_text()) if file.is_file() else {} for name, file in files.items()}
    record.write(args.json, "drafters", counts, weights=folders, trained=trained)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Acceptance]:
    """Acceptance by drafter, file of prompts and temperature."""
    keep_freed_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    wanted = plain_folder(args.target) if Path(args.target).is_file() else args.target
    dtype = hardware.faster_dtype(args.device) if args.dtype == "auto" else args.dtype
    target = TargetModel.load(wanted, device=args.device, dtype=getattr(torch, dtype))
    arms = arms_of(args.drafters, args.denoising_steps)
    by_file: dict[str, Acceptance] = {}
    for temperature in args.temperatures:
        for path in args.prompts:
            answers = target_answers(
                target, path, count=args.count, new_tokens=args.new_tokens, temperature=temperature, kept=args.answers
            )
            measured = measure(target, arms, answers, temperature=temperature, steps=STEPS[args.anchors])
            for arm, found in zip(arms, measured, strict=True):
                by_file[f"{arm.name}, {path.stem}, T={temperature:g}"] = found
                print(f"{arm.name}, T={temperature:g}, {path.stem}: tau {found.accepted_length:.3f}", flush=True)
    return by_file
