"""The registry of drafters."""

from pathlib import Path

import pytest
from tiny_drafters import GAMMA, TINY, make_registered

from outrider.drafters import registry
from outrider.drafters.base import Drafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter


@pytest.mark.parametrize("name", registry.DRAFTERS)
def test_every_entry_makes_its_drafter(name: str, tmp_path: Path) -> None:
    entry = registry.find(name)
    drafter, captured = make_registered(name, tmp_path)
    assert isinstance(drafter, Drafter)
    assert drafter.gamma == GAMMA
    assert captured == list(drafter.target_layers)
    assert bool(captured) == entry.needs_hidden_states
    assert entry.help


def test_lookup_is_combined_with_drafters_with_a_checkpoint(tmp_path: Path) -> None:
    drafter, captured = make_registered("dspark", tmp_path, lookup_gamma=GAMMA + 3)
    assert isinstance(drafter, LookupFirst)
    assert drafter.lookup.gamma == drafter.gamma == GAMMA + 3
    assert drafter.model.gamma == GAMMA
    assert captured == list(drafter.target_layers) == list(TINY.target_layers)
    assert type(make_registered("ngram", tmp_path, lookup_gamma=GAMMA + 3)[0]) is NgramDrafter
