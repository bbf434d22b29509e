"""The learner's process: it trains one drafter, or several owners' drafters in turn, while its server is idle.

    python -m outrider.drafters.learning.process --folder F --target PATH --kind dspark --start FOLDER \
        --general prompts.jsonl --threads 1
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from ..training.target import TargetModel, keep_freed_memory
from .answers import clear
from .learner import Forgotten, Learner
from .progress import LearnerProgress
from .start import settings
from .turns import Turns


def step_aside() -> None:
    """Run at the lowest priority, and end with the parent, even if stopped."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as SIGTERM: at once, like a kill
    os.umask(0o077)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="learner", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, type=Path, help="the learner's folder, where answers/ is written to")
    parser.add_argument("--target", required=True, help="Hugging Face folder of the target")
    parser.add_argument("--kind", required=True, help="name of the drafter")
    parser.add_argument("--start", required=True, help="the drafter that the server starts with, or target for none")
    parser.add_argument("--general", required=True, type=Path, help="JSONL file of general prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--denoising-steps", type=int, default=0, help="0: the drafter's own number")
    parser.add_argument("--lookup-gamma", type=int, default=0, help="the server's tokens of prompt lookup, 0: none")
    parser.add_argument("--most-feature-bytes", type=int, default=2 << 30, help="disk for features to train on")
    parser.add_argument("--per", choices=["server", "key", "adapter"], default="server", help="owners of drafters")
    parser.add_argument("--keys", type=int, default=8, help="keys or adapters that have features at a time")
    return parser


def main(given: list[str] | None = None) -> int:
    """Learn until ended. If that fails, returns 1, with one line of error in learner.json and on stderr."""
    args = arguments().parse_args(given)
    step_aside()
    args.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(args.folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # another learner may be ending
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    logging.disable_progress_bar()  # a bar would cut lines of the server's log
    try:
        target = TargetModel.load(args.target, device=args.device, dtype=getattr(torch, args.dtype))
        settings(args.kind, target, args.start)
        if args.per != "server":
            Turns(args, target).run()
        while True:
            try:
                Learner(args, target).run()
            except Forgotten:
                clear(args.folder)
    except Exception as error:
        progress = LearnerProgress(args.folder)
        progress.numbers.error = " ".join(str(error).split()) or type(error).__name__
        progress.phase("failed")
        print(f"learner: {progress.numbers.error}", file=sys.stderr)
        if not isinstance(error, (ValueError, OSError)):
            raise  # our own fault: keep the traceback
        return 1
    finally:
        os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
