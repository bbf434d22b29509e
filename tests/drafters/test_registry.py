"""The registry of drafters, and the public ones."""

import re
from pathlib import Path

import pytest
from tiny_drafters import GAMMA, TINY, make_registered

from outrider.drafters import public, registry
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


def test_every_entry_is_a_repository_of_a_served_kind_named_by_a_page() -> None:
    listed = public.listed()
    assert len({drafter.repo for drafter in listed}) == len(listed) > 40
    for drafter in listed:
        assert registry.serving(drafter.kind), drafter
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", drafter.repo)
        assert drafter.source.startswith("https://")
        assert drafter in public.drafting_for(drafter.target)


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "qwen3-8b", "Qwen3-8B-AWQ", "Qwen3-8B-GPTQ-Int4", "Qwen3-8B-Q4_K_M", "Qwen3-8B-UD-Q4_K_XL",
     "Qwen/Qwen3-8B-FP8", "Qwen3-8B.IQ4_XS", "Qwen3-8B-GGUF"],
)  # fmt: skip
def test_a_target_is_found_in_every_weight_format(name: str) -> None:
    repos = {drafter.repo for drafter in public.drafting_for(name)}
    assert {"deepseek-ai/dspark_qwen3_8b_block7", "AngelSlim/Qwen3-8B_eagle3"} <= repos


def test_other_models_of_a_family_do_not_match() -> None:
    for name in ("Qwen3-8B-Base", "Qwen3-0.6B", "Qwen3-4B-Instruct-2507", "My-Qwen3-8B", "Llama-3.1-8B"):
        assert not public.drafting_for(name)
    assert public.drafting_for("meta-llama/Meta-Llama-3.1-8B-Instruct")
