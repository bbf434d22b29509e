"""Start `--learn`: find the learner's folder, the drafter to train, and the drafter learned so far."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.drafters.block.config import BLOCK_KINDS
from outrider.kernels.cache import cache_root
from outrider.profiles.fingerprint import folder_digest

from ..errors import UserError
from .declared import TRAINED_DRAFTERS

if TYPE_CHECKING:
    from ..model.target import Model
    from .settings import Settings

START = "start"
"""Subfolder for the untrained drafter of a model that ships without a drafter."""
DRAFTERS = "drafters"
"""Subfolder for learned drafters."""


def root() -> Path:
    """Return the folder of all learners' folders."""
    return cache_root() / "learned"


def folder_of(settings: Settings, model: Model, kind: str) -> Path:
    if settings.learn_folder is not None:
        return settings.learn_folder.expanduser()
    digest = folder_digest(model.folder) if model.folder else ""
    return root() / re.sub(r"[^a-z0-9._-]+", "-", f"{model.name}-{kind}-{digest[:8]}".lower()).strip("-.")


def with_start(settings: Settings, model: Model) -> Settings:
    """Return settings with the learner's folder, and with a drafter that learns; raises UserError where none can.

    A model without a drafter gets an untrained one, which the planner leaves at rest until it has learned.
    """
    if not settings.learn:
        return settings
    if settings.diffusion is not None:
        raise UserError("--learn trains drafters; a block-diffusion model has none")
    if settings.parallel.tp_size > 1 or settings.parallel.nnodes > 1:
        raise UserError("--learn serves one rank so far; leave --tp-size and --nnodes out")
    if settings.learn_per == "key" and settings.api_key is None and settings.api_keys is None:
        raise UserError("--learn-per key gives each API key a drafter; it goes with --api-keys")
    if settings.learn_per == "adapter" and not settings.has_adapters:
        raise UserError("--learn-per adapter gives each adapter a drafter; it goes with --lora-paths or --enable-lora")
    if settings.learns_per_owner and settings.resolved_device != "cpu":
        raise UserError(f"--learn-per {settings.learn_per} serves on a CPU so far; leave it out on a GPU")
    if settings.drafter not in ("auto", *TRAINED_DRAFTERS):
        raise UserError(f"--learn goes with --drafter {' or '.join(TRAINED_DRAFTERS)}, not {settings.drafter}")
    from .checkpoints import shipped

    kind = settings.drafter if settings.drafter != "auto" else BLOCK_KINDS[0]
    if settings.drafter_path is not None:
        kind = _trained_kind(settings, kind)
    if settings.learns_per_owner and kind not in BLOCK_KINDS:
        raise UserError(f"--learn-per {settings.learn_per} goes with --drafter {' or '.join(BLOCK_KINDS)}, not {kind}")
    folder = folder_of(settings, model, kind)
    learned = "" if settings.learns_per_owner else in_use(folder)
    settings = replace(settings, learn_folder=folder, learned=learned)
    if settings.drafter_path is not None or (shipped(model, kind) / "config.json").is_file():
        return settings if settings.drafter_path else replace(settings, drafter=kind)
    start = folder / START
    if not (start / "config.json").is_file():
        from outrider.drafters.learning.start import write_start

        from ..model.target import plain_folder

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            write_start(start, plain_folder(settings.model), kind)
        except (ValueError, OSError) as error:
            raise UserError(f"no drafter can be learned for {model.name}: {error}") from None
    return replace(settings, drafter=kind, drafter_path=str(start))


def _trained_kind(settings: Settings, kind: str) -> str:
    """Return the kind of the drafter in --drafter-path; kind: --drafter. Raises UserError if it cannot be trained."""
    from outrider.drafters import networks, registry

    from .checkpoints import find, read_config

    config = read_config(find(str(settings.drafter_path)))
    if what := networks.not_trained(config):
        raise UserError(f"--learn does not train {settings.drafter_path}: it has {what}")
    return registry.serving(config.kind)[0] if settings.drafter == "auto" else kind


def in_use(folder: Path) -> str:
    """Return the folder of the learned drafter in use; "" if none is."""
    from outrider.drafters.learning.answers import ServerState

    name = ServerState.read(folder).in_use
    drafter = folder / DRAFTERS / name if name else None
    return str(drafter) if drafter is not None and (drafter / "config.json").is_file() else ""
