"""Lookup of the measured profile for a server: its fingerprint, the folders, and the fallback without one."""

import hashlib
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

from outrider.kernels.cache import cache_root
from outrider.profiles import store
from outrider.profiles.draft_graphs import TEMPERATURES, GraphFingerprint, require
from outrider.profiles.fingerprint import (
    STEP_REVISION,
    Fingerprint,
    core_count,
    cpu_name,
    folder_digest,
    package_version,
)
from outrider.profiles.store import ProfileError
from outrider.scheduler.spiffy.calibration import NODES

from ..errors import UserError
from ..machine import hardware
from ..model.target import Model
from .declared import PROFILED_PLANNERS
from .settings import Settings


def roots() -> list[Path]:
    """Return the folders of profiles: the user's own, then the ones shipped with Outrider."""
    return [cache_root() / "profiles", store.SHIPPED]


def fingerprint(settings: Settings, model: Model) -> Fingerprint:
    """Return the fingerprint of an engine; settings: from `with_drafter_path` and `with_activations`."""
    on_cpu = settings.resolved_device == "cpu"
    drafter, gamma = settings.drafter, settings.gamma
    if settings.diffusion is not None:
        drafter, gamma = f"spiffy {settings.unmasking_policy} block {settings.diffusion.block_size}", NODES
    if settings.resolved_denoising_steps:
        drafter += f"+{settings.resolved_denoising_steps}-left"
    if settings.looks_up:
        drafter += "+lookup"
    return Fingerprint(
        device=cpu_name() if on_cpu else hardware.gpu_name(),
        cores=core_count() if on_cpu else 0,
        threads=settings.resolved_threads,
        target=digest(model),
        drafter=drafter,
        gamma=gamma,
        drafter_checkpoint=folder_digest(settings.drafter_path) if settings.drafter_path else "",
        dtype=number_format(settings),
        attention_backend=" ".join(["flat" if on_cpu else "default", *settings.parallel.step_flags]),
        instruction_set=hardware.instruction_set() if on_cpu else "",
        sglang=package_version("sglang"),
        step_revision=STEP_REVISION[settings.resolved_device],
    )


def number_format(settings: Settings) -> str:
    """Return the format of weights and activations; settings: from `with_activations`."""
    dtype = settings.resolved_dtype
    if settings.quantization != "none":
        dtype += f"+{settings.quantization}"
    assert settings.activations != "auto"
    if settings.activations != "float":
        dtype += f"+{settings.activations} activations"
    return dtype


def digest(model: Model) -> str:
    """Return the digest of a model's folder; its name if the weights are not here."""
    return folder_digest(model.folder) if model.folder else model.path


def graph_fingerprint(settings: Settings, model: Model, temperature: str) -> GraphFingerprint:
    """Return the fingerprint of a block-diffusion model's draft graph. temperature: one of `TEMPERATURES`."""
    assert settings.diffusion is not None
    return GraphFingerprint(
        model=digest(model),
        policy=settings.unmasking_policy,
        block_size=settings.diffusion.block_size,
        temperature=temperature,
    )


def default_name(here: Fingerprint, model: Model) -> str:
    """Return the default name of this engine's profile folder."""
    short = hashlib.sha256(json.dumps(asdict(here), sort_keys=True).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{model.name}-{here.drafter}-{short}".lower()).strip("-.")


def with_profile(settings: Settings, model: Model) -> tuple[Settings, bool]:
    """Return settings with a profile folder, and whether it has still to be measured.

    A profile that the user names must fit; without a name, one that fits is found. Planners that use no costs get none.
    """
    if not settings.profiled:
        if settings.profile is not None:
            raise UserError("--profile goes with a drafter and one of the planners " + ", ".join(PROFILED_PLANNERS))
        return settings, False
    here = fingerprint(settings, model)
    named = settings.profile
    try:
        profile = store.find(here, roots()) if named is None else store.load(named, here, roots())
        if profile is not None:
            _require_graphs(profile, settings, model)
    except ProfileError as error:
        raise UserError(str(error) if named is None else f"--profile {named}: {error}") from None
    if profile is None:
        return replace(settings, profile=str(roots()[0] / default_name(here, model))), True
    return replace(settings, profile=str(profile.folder)), False


def _require_graphs(profile: store.Profile, settings: Settings, model: Model) -> None:
    """Raise ProfileError unless a block-diffusion model's profile has the draft graphs that were calibrated for it."""
    if settings.diffusion is None:
        return
    if profile.graphs is None:
        raise ProfileError(f"profile {profile.name} lacks {store.GRAPHS}; measure anew: outrider tune")
    try:
        require(json.loads(profile.graphs.read_text()), graph_fingerprint(settings, model, TEMPERATURES[0]))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{profile.graphs}: {error}") from None
