"""Everything that an engine is started with, resolved from settings for `serve`, `tune` and `bench` alike."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from ..model import families, target
from ..model.target import Model
from . import adapters, checkpoints, drafter_search, learning, lookup_store, memory, model_kinds, profile_lookup
from .activations import with_activations
from .memory import MemoryPlan
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Resolved:
    """Everything that an engine is started with.

    settings: as given, with the drafter, its checkpoint and the profile named.
    model: the target, found. memory: its need, known to fit.
    unmeasured: no profile fits; settings.profile is the folder for a new one.
    """

    settings: Settings
    model: Model
    memory: MemoryPlan
    unmeasured: bool

    def to_measure(self, name: str | None) -> Self:
        """Return a copy that writes the profile `name`; None: a name made from model, drafter and machine."""
        if name is None:
            name = profile_lookup.default_name(profile_lookup.fingerprint(self.settings, self.model), self.model)
        folder = profile_lookup.roots()[0] / name
        return replace(self, settings=replace(self.settings, profile=str(folder)), unmeasured=True)


def resolve(settings: Settings, say: Callable[[str], None] = lambda message: None) -> Resolved:
    """Find target, drafter checkpoint and profile, and check that the target fits into memory.

    say: receives lines for people. Raises UserError, in one line, for the first fault.
    """
    settings, model, plan = _without_profile(settings, say)
    how = f"unmasking by {settings.unmasking}" if settings.diffusion else f"drafter {settings.drafter}"
    say(
        f"Loading {model.name} on {settings.resolved_device} ({settings.resolved_dtype}), {how}"
        + (f"; {plan.reason}" if plan.reason else "")
    )
    if not settings.parallel.leads:  # the first node plans
        return Resolved(settings, model, plan, unmeasured=False)
    settings, unmeasured = profile_lookup.with_profile(settings, model)
    return Resolved(settings, model, plan, unmeasured)


def resolve_to_measure(settings: Settings, name: str | None = None) -> Resolved:
    """Resolve like `resolve`, for an engine that is started to measure a profile (`Resolved.to_measure`)."""
    settings, model, plan = _without_profile(settings)
    return Resolved(settings, model, plan, unmeasured=True).to_measure(name)


def _without_profile(
    settings: Settings, say: Callable[[str], None] = lambda message: None
) -> tuple[Settings, Model, MemoryPlan]:
    model = target.find(settings.model)
    families.check(model, settings.resolved_device)
    model_kinds.check_quantized(settings, model)
    settings = with_activations(settings, model, say)
    target.check_heads(model, settings.parallel.tp_size)
    settings = adapters.with_adapters(model_kinds.with_diffusion(settings, model), model)
    settings = drafter_search.with_found_drafter(settings, model, say)
    settings = learning.with_start(settings, model)
    settings = model_kinds.with_recurrent(settings, model)
    settings = lookup_store.with_lookup_store(checkpoints.with_drafter_path(settings, model), model)
    return settings, model, memory.plan(settings, model)
