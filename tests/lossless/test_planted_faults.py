"""Faults planted in the real acceptance and admission fail the check of `test_sampled.py`.

Power is the share of failing tests, each with as many answers as there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import THRESHOLD
from drawn_answers import Admit, Answers, by_survival, peeking
from exact_answers import PROMPT, RULES, SAMPLES, answers_p_value
from faults import every_test_by_the_scale
from scipy import stats
from small_target import SmallTarget

from outrider.kernels import acceptance
from outrider.server.plugin.decode import sampling

RUNS = 12


@pytest.fixture(scope="module")
def answers(small_target: SmallTarget) -> Answers:
    return Answers.of(small_target, small_target.tokenizer(PROMPT)["input_ids"], 5, RULES)


def keep_wrong_drafts(patch: pytest.MonkeyPatch) -> None:
    """A tenth of wrong drafts is kept, if the target can generate the token at all."""
    honest, draw = sampling.uniforms, torch.Generator().manual_seed(0)

    def uniforms(keys: torch.Tensor, count: int) -> torch.Tensor:
        numbers = honest(keys, count)
        return numbers.masked_fill(torch.rand(numbers.shape, generator=draw) < 0.1, 0.0)

    patch.setattr(sampling, "uniforms", uniforms)


def replace_from_p(patch: pytest.MonkeyPatch) -> None:
    """Draw the last token as if no draft had been rejected."""
    decide(
        patch,
        acceptance.kept_drafts,
        lambda batch, kept, scale: acceptance.draw_each(batch._replace(verify_lens=kept), kept, scale),
    )


def keep_by_the_scale(patch: pytest.MonkeyPatch) -> None:
    """Test every token of a block by the scale, as only the last should be."""

    def kept(batch: acceptance.Verification) -> tuple[torch.Tensor, torch.Tensor]:
        return every_test_by_the_scale(acceptance.kept_drafts, batch)

    decide(patch, kept, acceptance.draw_each)


def decide(patch: pytest.MonkeyPatch, kept: Callable[..., Any], draw: Callable[..., torch.Tensor]) -> None:
    """Replace the decision on drafts by `kept`, and the last token's draw by `draw`."""

    def accept(batch: acceptance.Verification, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number, scale = kept(batch)
        return number[requests], draw(batch, number, scale)[requests]

    patch.setattr(acceptance, "_accept_compiled", accept)


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "admit"),
    [
        (keep_wrong_drafts, by_survival),
        (replace_from_p, by_survival),
        (keep_by_the_scale, by_survival),
        (nothing, peeking),
    ],
    ids=["a tenth of wrong drafts kept", "replaced from p", "kept by the scale", "peeking"],
)
def test_planted_faults_fail_the_check(
    answers: Answers, plant: Callable[[pytest.MonkeyPatch], None], admit: Admit, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    p_values = [answers_p_value(answers.draw(SAMPLES, seed, admit)[0], answers.exact) for seed in range(RUNS)]
    scores = stats.norm.isf(np.maximum(p_values, 1e-300))  # near normal, so few runs suffice
    assert stats.norm.cdf((scores.mean() - stats.norm.isf(THRESHOLD)) / scores.std(ddof=1)) >= 0.95
    assert max(p_values) < THRESHOLD


def test_honest_decoding_passes(answers: Answers) -> None:
    p_values, observed = [], []
    for seed in range(20):
        drawn, positions = answers.draw(SAMPLES, seed)
        p_values.append(answers_p_value(drawn, answers.exact))
        observed.append(positions)
    assert min(p_values) > THRESHOLD
    assert sum(p < 0.25 for p in p_values) < 14
    assert all(second > 0.2 * first for first, second, *_ in observed)
