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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..settings.settings import Settings

if TYPE_CHECKING:
    from ..model.target import Model
    from ..settings.drafter_search import Candidate

MOVED = {"--measure": "`outrider tune --model MODEL --drafter-path FOLDER`; this list then has the drafter's times"}
SHAPE = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_hidden_layers": "layers"}


@dataclass(frozen=True, slots=True)
class Speed:
    """Times for one request. draft: seconds to make a draft. step: seconds to verify it; None: unknown. how: source."""

    draft: float
    step: float | None
    how: str


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
    speeds = [_speed(settings, model, drafter) if drafter.fits else None for drafter in drafters]
    taken = next((drafter for drafter in drafters if drafter.fits), None)
    if args.json:
        print(json.dumps(_as_json(model, drafters, speeds, taken), indent=1))
        return 0
    shape = ", ".join(f"{name} {model.config[key]}" for key, name in SHAPE.items() if key in model.config)
    print(f"{model.name}: {shape}")
    for drafter, speed in zip(drafters, speeds, strict=True):
        line = f"  {drafter.kind or '?':9} {drafter.name}, {_said(drafter)}"
        if speed:
            beside = f" beside a step of {speed.step * 1e3:.1f} ms" if speed.step else ""
            line += f"; a draft takes {speed.draft * 1e3:.1f} ms{beside} ({speed.how})"
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


def _as_json(
    model: Model, candidates: list[Candidate], speeds: list[Speed | None], taken: Candidate | None
) -> dict[str, Any]:
    drafters = [
        {
            "name": drafter.name,
            "kind": drafter.kind or None,
            "from": drafter.origin,
            "folder": None if drafter.folder is None else str(drafter.folder),
            "fits": None if drafter.folder is None and not drafter.obstacle else drafter.fits,
            "obstacle": drafter.obstacle or None,
            "draft_ms": None if speed is None else speed.draft * 1e3,
            "step_ms": None if speed is None or speed.step is None else speed.step * 1e3,
            "known_from": None if speed is None else speed.how,
        }
        for drafter, speed in zip(candidates, speeds, strict=True)
    ]
    shape = {key: model.config.get(key) for key in SHAPE}
    return {"model": model.name, **shape, "auto": None if taken is None else taken.name, "drafters": drafters}


def _speed(settings: Settings, model: Model, drafter: Candidate) -> Speed | None:
    """Return a drafter's times in this machine's profile, of any activations; None without a profile."""
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
            return Speed(cost.draft_seconds(1), step, f"profile {profile.name}")
    return None
