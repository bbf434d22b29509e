"""Files of a measurement: the log while it runs, and the profile at its end."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.profiles import store
from outrider.profiles.measurement_log import PartialMeasurement
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point, merge

from ..settings import profile_lookup
from .effort import Effort

if TYPE_CHECKING:
    from ..settings.resolve import Resolved


def begin(resolved: Resolved) -> PartialMeasurement:
    """Open the log next to the folder `resolved.settings.profile`, with the points of an interrupted measurement."""
    folder = _folder(resolved)
    here = profile_lookup.fingerprint(resolved.settings, resolved.model)
    return PartialMeasurement(folder.parent / f".{folder.name}.partial.jsonl", here)


def write(resolved: Resolved, points: Iterable[Point], effort: Effort, how: str, **beside: Any) -> Profile:
    """Save the measurement to the folder `resolved.settings.profile`. how: the command, for people. beside: `prefills`
    of the profile, `calibration` and `graphs` of `store.save`, `refined` of `measure.tune`. Raises RuntimeError."""
    folder = _folder(resolved)
    if beside.get("refined") and store.read(folder).thorough:  # by POST /outrider/tune
        raise RuntimeError("it was measured thoroughly meanwhile")
    profile = Profile(
        name=folder.name,
        fingerprint=profile_lookup.fingerprint(resolved.settings, resolved.model),
        points=tuple(merge(points)),
        thorough=effort.final,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        measured_how=how,
        prefills=tuple(beside.get("prefills", ())),
    )
    return store.save(profile, folder.parent, beside.get("calibration"), beside.get("graphs"))


def _folder(resolved: Resolved) -> Path:
    assert resolved.settings.profile is not None
    return Path(resolved.settings.profile)
