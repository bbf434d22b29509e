"""The registry of drafters: every entry makes what it says, and an unknown name is answered with the known ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_drafters import CONFIGS, DIFFUSION, TINY, make_diffusion, make_model, make_target

from outrider.drafters import registry
from outrider.drafters.base import Drafter
from outrider.drafters.block import save_compact
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter

GAMMA = 3


def make(name: str, folder: Path, *, lookup_gamma: int = 0) -> tuple[Drafter, list[int]]:
    """The drafter for a tiny target, and the layers that it had captured."""
    captured: list[int] = []
    config = SimpleNamespace(model_type="llama", hidden_size=32, num_hidden_layers=6, vocab_size=96)
    target = dataclasses.replace(make_target(config, torch.randn(96, 32)), capture_layers=captured.extend)
    checkpoint = ""
    if registry.find(name).needs_checkpoint:
        save_compact(make_model(CONFIGS[name]) if name in CONFIGS else make_diffusion(DIFFUSION), folder)
        checkpoint = str(folder)
    return registry.make(name, target, gamma=GAMMA, checkpoint=checkpoint, lookup_gamma=lookup_gamma), captured


@pytest.mark.parametrize("name", registry.DRAFTERS)
def test_every_entry_makes_its_drafter(name: str, tmp_path: Path) -> None:
    entry = registry.find(name)
    drafter, captured = make(name, tmp_path)
    assert isinstance(drafter, Drafter)
    assert drafter.gamma == GAMMA
    assert captured == list(drafter.target_layers)
    assert bool(captured) == entry.needs_hidden_states
    assert entry.help


def test_lookup_stands_beside_drafters_with_a_checkpoint(tmp_path: Path) -> None:
    drafter, captured = make("dspark", tmp_path, lookup_gamma=GAMMA + 3)
    assert isinstance(drafter, LookupFirst)
    assert drafter.lookup.gamma == drafter.gamma == GAMMA + 3
    assert drafter.model.gamma == GAMMA
    assert captured == list(drafter.target_layers) == list(TINY.target_layers)
    assert type(make("ngram", tmp_path, lookup_gamma=GAMMA + 3)[0]) is NgramDrafter


def test_unknown_names_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    for ask in (registry.find, lambda name: make(name, tmp_path)):
        with pytest.raises(ValueError, match="a drafter is one of dspark, dflash, deer, specdiff, ngram, not 'eagle'"):
            ask("eagle")
