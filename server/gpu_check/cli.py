"""Check on a GPU what tests without one cannot show: kernels, attention backends, the server, its speed.

Parts take at most seven minutes each. The numbers of a step are written to OUT/PART.json as soon as it is done, and
--resume goes on behind the last one. Steps that are named alone are done again, beside those that OUT has. Every number
that has to be something is judged. Exit code 1: something failed or is not good. 2: the time was up before the end.
Steps of C and later run commands, which end with the part's time, go on where they can with --resume, and leave logs
and answers in the cache folder (OUTRIDER_CACHE), under gpu-check/PART.

parts, and what they need beside torch and Triton:
{parts}

examples:
  outrider gpu-check A                      every kernel beside its reference, graphs, waits, bandwidth
  outrider gpu-check A:graphs A:waits       two steps of it
  outrider gpu-check A B C --minutes 7 --resume
  outrider gpu-check T --minutes 20         train drafters for the embedded model; their weights go to OUT
  outrider gpu-check A --device cpu         try the checks without a GPU, at sizes that mean nothing
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from pathlib import Path

from outrider.kernels.cache import cache_root

from ..errors import UserError
from . import device as devices
from . import parts
from .commands import Commands, NotReached
from .report import Measured, Report

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
    ending = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its commands
    try:
        codes = [run_part(part, steps, device, args) for part, steps in chosen]
    finally:
        signal.signal(signal.SIGTERM, ending)
    return 1 if 1 in codes else max(codes)


def run_part(letter: str, steps: list[str], device: devices.Device, args: argparse.Namespace) -> int:
    """One part; its table is printed at the end."""
    report = Report(args.out / f"{letter}.json", {"part": letter, **device.about()})
    part, end = parts.PARTS[letter], time.monotonic() + 60 * args.minutes
    if args.resume or len(steps) < len(part.steps):
        report.resume()
    left = [step for step in steps if not args.resume or step not in report.steps]
    print(f"Part {letter}: {part.title}, on {report.about['device']}", flush=True)
    given = Commands(device, cache_root() / "gpu-check" / letter, args.out, end) if part.commands else device
    for number, step in enumerate(left, 1):
        if time.monotonic() > end:
            report.not_reached(left[number - 1 :])
            break
        print(f"[{number}/{len(left)}] {step}", flush=True)
        if not run_step(parts.check(letter, step), step, device, given, report):
            print(f"The device is lost. --resume goes on behind {letter}:{step}", flush=True)
            report.not_reached(left[number:])
            break
    print(f"\n{report.table()}\n")
    for fault in report.faults:
        print(f"NOT GOOD: {fault}")
    if missing := [step for step in left if step not in report.steps]:
        print(f"Left of part {letter}, for --resume: {', '.join(missing)}")
    print(f"Part {letter}: {report.path}", flush=True)
    return 1 if report.faults else 2 if missing else 0


def run_step(
    check: parts.Check, step: str, device: devices.Device, given: devices.Device | Commands, report: Report
) -> bool:
    """Run a step and write it down, whatever comes of it; False where the device does not answer any more."""
    start, measured, error, lost = time.monotonic(), list[Measured](), "", False
    try:
        for one in check(given):
            measured.append(one)
            print(f"  {one.what}: {one.value:.4g} {one.unit} {one.verdict}", flush=True)
    except NotReached:
        report.not_reached([step], measured)
        print("  not reached", flush=True)
        return True
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
