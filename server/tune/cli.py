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
import json
import os
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .. import pictures
from ..errors import UserError
from ..processes import session
from ..prompt_files import read_mixed_questions
from ..settings.flags import MOVED as MOVED
from ..settings.flags import add_engine_flags, add_unmasking_flags, settings_of
from ..settings.resolve import Resolved, resolve_to_measure
from .effort import THOROUGH, Effort
from .events import Event, Failed, Finished, Progress, from_line
from .request import BadOption, TuneRequest

if TYPE_CHECKING:
    from ..processes.engine import Engine


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
    add("--pictures", type=Path, metavar="FOLDER", help="save pictures of steps and calibration there")


def run(args: argparse.Namespace) -> int:
    request = _request(args)
    if args.server:
        return _run_there(args, request)
    if args.pictures:
        pictures.require("--pictures")
    resolved = resolve_to_measure(settings_of(args), request.name)
    # Each once: questions that judge the calibration must not be among the ones it is fitted to.
    questions = list(dict.fromkeys(read_mixed_questions(args.prompts))) if args.prompts else None

    async def measurement(engine: Engine) -> None:
        await _measure(engine, resolved, request.effort, questions, args.pictures)

    session.run(resolved, measurement)
    return 0


async def _measure(
    engine: Engine, resolved: Resolved, effort: Effort, questions: list[str] | None, folder: Path | None
) -> None:
    from . import measure

    how = shlex.join(["outrider", *sys.argv[1:]])
    with progress_bars() as show:
        tuned = await measure.tune(engine, resolved, effort, questions=questions, how=how, progress=show)
    print(tuned.table())
    print(f"saved to {tuned.profile.folder}")
    if folder:
        tuned.draw(folder)


def _request(args: argparse.Namespace) -> TuneRequest:
    try:
        return TuneRequest(**{field.name: getattr(args, field.name) for field in fields(TuneRequest)})
    except BadOption as bad:
        raise UserError(f"--{bad.option.replace('_', '-')} {bad.problem}") from None


@contextmanager
def progress_bars() -> Iterator[Callable[[Progress], None]]:
    """Show progress by a bar per task."""
    bars: dict[str, tqdm[Any]] = {}
    with ExitStack() as stack:

        def show(progress: Progress) -> None:
            bar = bars.get(progress.what)
            if bar is None or progress.done < bar.n:  # the same task again, for another part
                bar = bars[progress.what] = stack.enter_context(tqdm(total=progress.total, desc=progress.what))
            bar.update(progress.done - bar.n)

        yield show


def _run_there(args: argparse.Namespace, request: TuneRequest) -> int:
    """Let a running server measure itself, and show its events."""
    if args.prompts or args.pictures:
        raise UserError("--prompts and --pictures go without --server: the server measures with its own prompts")
    if not args.server.startswith(("http://", "https://")):
        raise UserError(f"--server is an address like http://127.0.0.1:30000, not {args.server!r}")
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    url = args.server.rstrip("/") + "/outrider/tune"
    body = json.dumps(asdict(request)).encode()
    with progress_bars() as show:
        for event in _events(urllib.request.Request(url, body, headers, method="POST")):
            match event:
                case Progress():
                    show(event)
                case Failed(error):
                    raise UserError(f"the server could not be measured: {error}")
                case Finished(table, folder):
                    print(table)
                    print(f"saved to {folder} on the server's machine, and in use there")
                    return 0
    raise UserError("the server stopped measuring without a result; its log says more")


def _events(request: urllib.request.Request) -> Iterator[Event]:
    try:
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                yield from_line(line)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:200]
        raise UserError(f"the server refused: {text}") from None
    except OSError as error:
        raise UserError(f"no server answers there: {error}") from None
