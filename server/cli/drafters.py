"""List a model's drafters: in its folder, next to it, in the hub's cache, and public ones that are not here yet.

A drafter fits if its kind is served and it was trained for a model of this hidden size, vocabulary and number of
layers. `outrider serve --model MODEL` takes the first drafter on this machine that fits. --drafter-path serves another,
and fetches a public one by its name. Draft times come from the profile of a server that has used the drafter
(`outrider tune`).

examples:
  outrider drafters ./Qwen3-8B
  outrider drafters Qwen/Qwen3-8B
  outrider drafters Qwen3-8B-Q4_K_M.gguf --json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..settings.settings import Settings

if TYPE_CHECKING:
    from ..model.target import Model
    from ..settings.drafter_search import Candidate

MOVED = {"--measure": "`outrider tune --model MODEL --drafter-path FOLDER`; this list then has the drafter's times"}
SHAPE = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_hidden_layers": "layers"}
UNKNOWN: dict[str, Any] = dict.fromkeys(("draft_ms", "step_ms", "known_from"))
"""Times of a drafter without a profile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="folder, hub name or GGUF file (default: the embedded model)")
    add("--gamma", type=int, default=Settings().gamma, metavar="N", help="tokens of a draft (default: %(default)s)")
    add("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list. Fetches only the model's config.json."""
    settings = Settings(model=args.model, gamma=args.gamma)

    from ..model import target
    from ..settings import drafter_search

    model = target.find(settings.model)
    drafters = drafter_search.candidates(settings, model)
    rows = [_row(drafter) | (_times(settings, model, drafter) if drafter.fits else UNKNOWN) for drafter in drafters]
    taken = next((drafter for drafter in drafters if drafter.fits), None)
    if args.json:
        shape = {key: model.config.get(key) for key in SHAPE}
        listed = {"model": model.name, **shape, "auto": None if taken is None else taken.name, "drafters": rows}
        print(json.dumps(listed, indent=1))
        return 0
    print(f"{model.name}: " + ", ".join(f"{SHAPE[key]} {model.config[key]}" for key in SHAPE if key in model.config))
    for drafter, row in zip(drafters, rows, strict=True):
        line = f"  {drafter.kind or '?':9} {drafter.name}, {_said(drafter)}"
        if row["known_from"]:
            line += f"; a draft takes {row['draft_ms']:.1f} ms beside a step of {row['step_ms']:.1f} ms"
            line += f" ({row['known_from']})"
        print(line)
    auto = "ngram, prompt lookup without a model" if taken is None else f"{taken.kind}, {taken.name}"
    print(f"--drafter auto takes {auto}")
    return 0


def _said(drafter: Candidate) -> str:
    """Return the place of a drafter, and whether it fits."""
    if drafter.folder is None:
        where = f"not here ({drafter.origin})"
        return f"{where}, does not fit: {drafter.obstacle}" if drafter.obstacle else where
    return f"{drafter.origin}, " + (f"does not fit: {drafter.obstacle}" if drafter.obstacle else "fits")


def _row(drafter: Candidate) -> dict[str, Any]:
    return {
        "name": drafter.name,
        "kind": drafter.kind or None,
        "from": drafter.origin,
        "folder": None if drafter.folder is None else str(drafter.folder),
        "fits": None if drafter.folder is None and not drafter.obstacle else drafter.fits,
        "obstacle": drafter.obstacle or None,
    }


def _times(settings: Settings, model: Model, drafter: Candidate) -> dict[str, Any]:
    """Return a drafter's times for one request in this machine's profile, of any activations."""
    import numpy as np

    from outrider.drafters import registry
    from outrider.kernels.blocks import ACTIVATIONS
    from outrider.profiles import store

    from ..settings import profile_lookup

    settings = replace(settings, drafter=registry.serving(drafter.kind)[0], drafter_path=str(drafter.folder))
    for activations in ACTIVATIONS:
        here = profile_lookup.fingerprint(replace(settings, activations=activations), model)
        if (profile := store.find(here, profile_lookup.roots())) is not None:
            cost, tokens = profile.cost(), np.array([settings.gamma + 1])
            context = min(point.context for point in profile.points)
            step = float(cost.seconds(1, tokens, context)[0])
            draft = cost.draft_seconds(1)
            return {"draft_ms": draft * 1e3, "step_ms": step * 1e3, "known_from": f"profile {profile.name}"}
    return UNKNOWN
