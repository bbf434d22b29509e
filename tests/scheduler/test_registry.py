"""The registry of planners."""

import pytest
from planning import curve_cost

from outrider.scheduler import registry
from outrider.scheduler.contract import Planner

ALL = {"gamma": 3, "threshold": 0.5}


@pytest.mark.parametrize("name", registry.PLANNERS)
def test_every_entry_makes_its_planner(name: str) -> None:
    entry = registry.find(name)
    assert isinstance(registry.make(name, **ALL, cost=curve_cost(1, [1.0, 1.1])), Planner)
    assert entry.help
    if entry.needs_profile:
        with pytest.raises(ValueError, match=f"{name} needs measured step costs"):
            registry.make(name, **ALL)
    else:
        assert isinstance(registry.make(name, **ALL), Planner)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    known = ", ".join(registry.PLANNERS)
    for ask in (registry.find, lambda name: registry.make(name, **ALL)):
        with pytest.raises(ValueError, match=f"a planner is one of {known}, not 'best'"):
            ask("best")
