"""Every public drafter is of a served kind, and names find it."""

import re

import pytest

from outrider.drafters import public, registry


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
