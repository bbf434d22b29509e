"""Check on a GPU what tests without one cannot show: kernels, attention backends, the server, its speed.

Parts take at most seven minutes each. The numbers of a step are written to OUT/PART.json as soon as it is done, and
--resume goes on behind the last one. Steps that are named alone are done again, beside those that OUT has. Every number
that has to be something is judged. Exit code 1: something failed or is not good. 2: the time was up before the end.

parts, and what they need beside torch and Triton:
{parts}

examples:
  outrider gpu-check A                      every kernel beside its reference, graphs, waits, bandwidth
  outrider gpu-check A:graphs A:waits       two steps of it
  outrider gpu-check A B C --minutes 7 --resume
  outrider gpu-check A --device cpu         try the checks without a GPU, at sizes that mean nothing
"""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

from outrider.server.errors import UserError
from outrider.server.gpu_check import device as devices
from outrider.server.gpu_check import parts
from outrider.server.gpu_check.report import Measured, Report

__doc__ = __doc__.format(
    parts="\n".join(f"  {letter}  {part.title} ({part.needs})" for letter, part in parts.PARTS.items())
)
MINUTES = 7.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="+", metavar="PART", help="a part, or a step of one as in A:graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the checks, tiny ones")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the checks on a GPU")
    parser.add_argument(
        "--out", type=Path, default=Path("profiles/gpu"), metavar="FOLDER", help="(default: %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="leave out steps that OUT has already")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="of each part: no step begins later (default: %(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the parts; 1 where something is not good, 2 where the time was up."""
    chosen = parts.chosen(args.parts)
    if args.minutes <= 0:
        raise UserError(f"--minutes is more than 0, not {args.minutes:g}")
    device = devices.make(args.device, tiny=args.tiny)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: {error.strerror}") from None
    codes = [run_part(part, steps, device, args) for part, steps in chosen]
    return 1 if 1 in codes else max(codes)


def run_part(letter: str, steps: list[str], device: devices.Device, args: argparse.Namespace) -> int:
    """One part; its table is printed at the end."""
    report = Report(args.out / f"{letter}.json", {"part": letter, **device.about()})
    if args.resume or len(steps) < len(parts.PARTS[letter].steps):
        report.resume()
    left = [step for step in steps if not args.resume or step not in report.steps]
    print(f"Part {letter}: {parts.PARTS[letter].title}, on {report.about['device']}", flush=True)
    end, done = time.monotonic() + 60 * args.minutes, 0
    for done, step in enumerate(left):
        if time.monotonic() > end:
            break
        print(f"[{done + 1}/{len(left)}] {step}", flush=True)
        if not run_step(letter, step, device, report):
            print(f"The device is lost. --resume goes on behind {letter}:{step}", flush=True)
            break
    else:
        done = len(left)
    print(f"\n{report.table()}\n")
    for fault in report.faults:
        print(f"NOT GOOD: {fault}")
    if left[done:]:
        print(f"Left of part {letter}, for --resume: {', '.join(left[done:])}")
    print(f"Part {letter}: {report.path}", flush=True)
    return 1 if report.faults else 2 if left[done:] else 0


def run_step(letter: str, step: str, device: devices.Device, report: Report) -> bool:
    """Run a step and write it down, whatever comes of it; False where the device does not answer any more."""
    start, measured, error, lost = time.monotonic(), list[Measured](), "", False
    try:
        for one in parts.check(letter, step)(device):
            measured.append(one)
            print(f"  {one.what}: {one.value:.4g} {one.unit} {one.verdict}", flush=True)
    except UserError as found:
        error = str(found)
    except Exception as found:
        error = f"{type(found).__name__}: {str(found).strip().splitlines()[0] if str(found).strip() else ''}"
        traceback.print_exc()
    try:
        device.synchronise()
    except RuntimeError as found:
        error, lost = error or f"{type(found).__name__}: {str(found).splitlines()[0]}", True
    report.add(step, time.monotonic() - start, measured, error)
    if error:
        print(f"  FAILED: {error}", flush=True)
    return not lost
