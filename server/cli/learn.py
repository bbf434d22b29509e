"""Show, delete or export the drafters that a server with `--learn` has learned.

  outrider learn status                        answers kept, drafters tried, the one in use
  outrider learn forget                        delete answers and learned drafters; a running server goes back at once
  outrider learn export --out runs/learned     the drafter in use, for --drafter-path or `outrider export`
  outrider learn status --key team-a           the same of one key, of a server with --learn-per key
  outrider learn status --adapter sql          of one adapter, of a server with --learn-per adapter

Without --learn-folder it takes the only learner's folder in the cache, as `outrider serve --learn` makes it.
"""

import argparse
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..settings.learning import DRAFTERS, root

ACTIONS = ("status", "forget", "export")
SHOWN = 8
"""Promotions and rollbacks that `status` lists."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=ACTIONS)
    parser.add_argument("--learn-folder", type=Path, metavar="FOLDER", help="as given to `outrider serve`")
    parser.add_argument("--key", metavar="NAME", help="of this key alone, where each has a drafter of its own")
    parser.add_argument(
        "--adapter", metavar="NAME", help="of this adapter alone; NAME@DIGEST where several had the name"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="export: folder to write, which is not there yet")
    parser.add_argument("--json", action="store_true", help="status: as JSON")


def run(args: argparse.Namespace) -> int:
    from outrider.drafters.learning.answers import ServerState, forget

    folder = whole = _folder(args.learn_folder)
    one = args.key is not None or args.adapter is not None
    if one:
        folder = _learner(whole, args.key, args.adapter)
    if (args.out is not None) != (args.what == "export"):
        raise UserError("--out FOLDER goes with export, and export needs it")
    if args.what == "forget":
        try:
            forget(folder)
        except ValueError as error:
            raise UserError(str(error)) from None
        print(f"Deleted: answers and learned drafters in {folder}")
        return 0
    state = ServerState.read(folder)
    if args.what == "status":
        status = _status(folder, state.in_use, state.refused)
        status |= {} if one else {f"{kind}s": _owners(folder, kind) for kind in ("key", "adapter")}
        print(json.dumps(status, indent=2) if args.json else _shown(status))
        return 0
    if state.in_use is None:
        raise UserError(f"{folder} has no drafter better than the one of the start, so there is none to export")
    if args.out.exists():
        raise UserError(f"{args.out} is there already; name a folder that is not")
    shutil.copytree(folder / DRAFTERS / state.in_use, args.out, ignore=shutil.ignore_patterns("held-out.npz"))
    print(f"Drafter {state.in_use} is in {args.out}; serve it with --drafter-path {args.out}")
    return 0


def _folder(given: Path | None) -> Path:
    if given is not None:
        if not given.expanduser().is_dir():
            raise UserError(f"{given} is no folder")
        return given.expanduser()
    folders = sorted(path for path in root().glob("*") if path.is_dir())
    if not folders:
        raise UserError(f"no server has learned: {root()} is empty; start a server with --learn")
    if len(folders) > 1:
        raise UserError(f"several models have learned; choose with --learn-folder: {', '.join(map(str, folders))}")
    return folders[0]


def _status(folder: Path, in_use: str | None, refused: tuple[str, ...]) -> dict[str, Any]:
    numbers, events = folder / "learner.json", folder / "events.jsonl"
    known = json.loads(numbers.read_text()) if numbers.is_file() else {}
    lines = events.read_text().splitlines() if events.is_file() else []
    exchanges = [event for line in lines if (event := _parsed(line)).get("event") in ("promotion", "rollback")]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "folder": str(folder), "in_use": in_use, "refused": list(refused), **known, "bytes": size,
        "exchanges": exchanges[-SHOWN:],
    }  # fmt: skip


def _learner(whole: Path, key: str | None, adapter: str | None) -> Path:
    """Return the learner's folder of a key or an adapter. Raises UserError if there is none, or more than one."""
    from outrider.drafters.learning.answers import ADAPTERS, KEYS
    from outrider.drafters.learning.owners import Owner, learners, owner_of

    if key is not None and adapter is not None:
        raise UserError("--key and --adapter are of different servers; leave one out")
    if key is not None and (whole / Owner(key).learner).is_dir():
        return whole / Owner(key).learner
    kind, what, wanted = (KEYS, "a key", key) if key is not None else (ADAPTERS, "an adapter", adapter)
    known = [owner for path in learners(whole, kind) if (owner := owner_of(path))]
    matching = [owner for owner in known if wanted in (owner.name, owner.label)]
    if not matching:
        labels = ", ".join(owner.label for owner in known) or "none"
        raise UserError(f"{whole} has no answers of {what} {wanted}; of {kind} it has {labels}")
    if len(matching) > 1:
        raise UserError(f"several were called {wanted}; choose of {', '.join(owner.label for owner in matching)}")
    return whole / matching[0].learner


def _owners(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the name, drafter in use and answers of each key or adapter that has its own drafter."""
    from outrider.drafters.learning.answers import ServerState
    from outrider.drafters.learning.owners import learners, owner_of

    owners = []
    for learner in learners(folder, f"{kind}s"):
        numbers = learner / "learner.json"
        known = json.loads(numbers.read_text()) if numbers.is_file() else {}
        answers = known.get("answers", 0) + known.get("held_out", 0)
        label = owner.label if (owner := owner_of(learner)) else ""
        owners.append({kind: label, "in_use": ServerState.read(learner).in_use, "answers": answers})
    return owners


def _parsed(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:  # half a line, from a killed writer
        return {}
    return event if isinstance(event, dict) else {}


def _shown(status: dict[str, Any]) -> str:
    lines = [f"{status['folder']}: {status['bytes'] / 1e6:.1f} MB"]
    lines.append(f"drafter in use: {status['in_use'] or 'the one of the start'}")
    if "phase" in status:
        error = f" ({status['error']})" if status.get("error") else ""
        lines.append(f"learner: {status['phase']}{error}, {_when(status['at'])}")
        lines.append(
            f"answers: {status['answers']} to train on, {status['held_out']} held out, {status['tokens']} tokens in all"
        )
        lines.append(
            f"trained: {status['anchors']} drafts in {status['seconds']:.0f} s; {status['gates']} comparisons, "
            f"{status['candidates']} passed"
        )
        if status.get("candidate_tau"):
            in_use = status.get("in_use_tau") or 1.0
            lines.append(f"tokens a step, held out: in use {in_use:.2f}, in training {status['candidate_tau']:.2f}")
    for kind in ("key", "adapter"):
        for each in status.get(f"{kind}s", ()):
            lines.append(
                f"  {kind} {each[kind]}: {each['answers']} answers, drafter {each['in_use'] or 'of the start'}"
            )
    for event in status["exchanges"]:
        what = f"drafter {event['drafter']} " + ("put to use" if event["event"] == "promotion" else "taken back")
        taus = f": {event['tau_before'] or 1.0:.2f} -> {event['tau']:.2f}" if "tau" in event else ""
        lines.append(f"  {_when(event['at'])}  {what}{taus}")
    return "\n".join(lines)


def _when(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
