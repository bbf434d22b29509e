"""Measure this machine's step times and calibrate the drafter's confidences; planning uses both from then on.

For a block-diffusion model it measures round times, and makes the draft graph of its most frequent states.
Starts an engine as `outrider serve` would, or measures one that is running (--server, which must be idle). The profile
goes to the cache folder, where `outrider serve` with the same model, drafter and machine finds it by itself.
Interrupted, the same command goes on with the step times that are missing. It prints the profile as a table, times in
milliseconds, and its folder.

examples:
  outrider tune                                 the embedded model, about eight minutes on two cores
  outrider tune --model ./Qwen3-4B --name fast  under a name, for `outrider serve --profile fast`
  outrider tune --server http://127.0.0.1:30000 a running server, which goes on with the new profile at once
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..errors import UserError
from ..processes import session
from ..prompt_files import read_mixed_questions
from ..settings.flags import MOVED as FLAGS_MOVED
from ..settings.flags import add_engine_flags, add_unmasking_flags, settings_of
from ..settings.resolve import Resolved, resolve_to_measure
from .effort import THOROUGH, Effort
from .grid import Progress
from .request import BadOption, TuneRequest

if TYPE_CHECKING:
    from ..processes.engine import Engine

MOVED = {**FLAGS_MOVED, "--pictures": "`python tests/measure/profile_picture.py` in a checkout"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    add_unmasking_flags(parser.add_argument_group("block-diffusion models"))
    add = parser.add_argument
    add("--server", metavar="URL", help="measure a server that is running instead of starting an engine")
    add("--api-key", default=os.environ.get("OUTRIDER_API_KEY"), metavar="KEY", help="key (default: OUTRIDER_API_KEY)")
    add("--name", metavar="NAME", help="name of the profile (default: made from model, drafter and machine)")
    add("--quick", action="store_true", help="as a server without a profile measures at its start: under a minute")
    most, rounds = THOROUGH.requests[-1], THOROUGH.rounds
    add("--max-requests", type=int, metavar="N", help=f"largest number of requests at a time (default: {most})")
    add("--rounds", type=int, metavar="N", help=f"repetitions of each step shape (default: {rounds})")
    add(
        "--prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="prompts for the calibration (default: code, math and chat)",
    )


def run(args: argparse.Namespace) -> int:
    request = _request(args)
    if args.server:
        return _run_there(args, request)
    resolved = resolve_to_measure(settings_of(args), request.name)
    # Each once: the calibration must not be judged by questions that it is fitted to.
    questions = list(dict.fromkeys(read_mixed_questions(args.prompts))) if args.prompts else None

    async def measurement(engine: Engine) -> None:
        await _measure(engine, resolved, request.effort, questions)

    session.run(resolved, measurement)
    return 0


async def _measure(engine: Engine, resolved: Resolved, effort: Effort, questions: list[str] | None) -> None:
    from . import measure

    how = shlex.join(["outrider", *sys.argv[1:]])
    with progress_bars() as show:
        tuned = await measure.tune(engine, resolved, effort, questions=questions, how=how, progress=show)
    print(tuned.table())
    print(f"saved to {tuned.profile.folder}")


def _request(args: argparse.Namespace) -> TuneRequest:
    try:
        return TuneRequest(**{field.name: getattr(args, field.name) for field in fields(TuneRequest)})
    except BadOption as bad:
        raise UserError(f"--{bad.option.replace('_', '-')} {bad.problem}") from None


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show progress by a bar per task."""
    bars: dict[str, tqdm[Any]] = {}
    with ExitStack() as stack:

        def show(what: str, done: int, total: int) -> None:
            bar = bars.get(what)
            if bar is None or done < bar.n:  # the same task again, for another part
                bar = bars[what] = stack.enter_context(tqdm(total=total, desc=what))
            bar.update(done - bar.n)

        yield show


def _run_there(args: argparse.Namespace, request: TuneRequest) -> int:
    """Let a running server measure itself, and show the result."""
    import httpx

    if args.prompts:
        raise UserError("--prompts goes without --server: the server measures with its own prompts")
    if not args.server.startswith(("http://", "https://")):
        raise UserError(f"--server is an address like http://127.0.0.1:30000, not {args.server!r}")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    print("measuring; the server's log shows the progress", flush=True)
    try:
        url = args.server.rstrip("/") + "/outrider/tune"
        answer = httpx.post(url, json=asdict(request), headers=headers, timeout=None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"no server answers there: {error}") from None
    if not answer.is_success:
        text = answer.text
        with suppress(ValueError, KeyError, TypeError):
            text = answer.json()["error"]["message"]
        raise UserError(f"the server was not measured: {text[:500]}")
    tuned = answer.json()
    print(tuned["table"])
    print(f"saved to {tuned['folder']} on the server's machine, and in use there")
    return 0
