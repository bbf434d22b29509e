"""The first profile of an engine that none fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..processes.engine import Engine
    from ..settings.resolve import Resolved


async def measure_first(engine: Engine, resolved: Resolved, say: Callable[[str], None]) -> None:
    """Measure a quick profile if none fits, and plan by it; an engine that cannot be measured runs without."""
    if not (resolved.unmeasured and resolved.settings.tune):
        return
    from . import measure  # not read by an engine that is planned already
    from .effort import QUICK

    say("No profile fits this engine: measuring a quick one (once; `outrider tune` measures a thorough one)")
    try:
        tuned = await measure.tune(engine, resolved, QUICK)
    except (OSError, ValueError, RuntimeError) as error:
        without = "costs are learnt as it serves" if resolved.settings.diffusion else "every draft is verified"
        say(f"Not measured ({error}); {without}")
    else:
        say(f"Profile {tuned.profile.name}: {tuned.summary}")
