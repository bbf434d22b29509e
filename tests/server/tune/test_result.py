"""Profiles that a measurement saves."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from profile_samples import HERE, POINTS, profile

from outrider.profiles import store
from outrider.server.settings import profile_lookup
from outrider.server.tune import result
from outrider.server.tune.effort import IDLE, THOROUGH


def test_a_thorough_measurement_outlives_the_one_in_idle_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one on demand came while the other was under way."""
    monkeypatch.setattr(profile_lookup, "fingerprint", lambda *_: HERE)
    settings = SimpleNamespace(profile=str(tmp_path / "mine"))
    resolved: Any = SimpleNamespace(settings=settings, model=None)
    quick = store.save(replace(profile("mine"), thorough=False), tmp_path, None)
    on_demand = result.write(resolved, POINTS[:3], THOROUGH, "outrider tune --server")
    with pytest.raises(RuntimeError, match="it was measured thoroughly meanwhile"):
        result.write(resolved, POINTS[:2], IDLE, "in idle time", refined=quick)
    assert store.read(tmp_path / "mine") == on_demand

    store.save(quick, tmp_path, None)
    assert result.write(resolved, POINTS[:2], IDLE, "in idle time", refined=quick).measured_how == "in idle time"
