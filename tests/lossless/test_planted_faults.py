"""Power of `test_sampled.py`: faults planted in the real acceptance, and in what is verified, fail its check.

Power is the share of whole tests that fail, each of as many of the small target's answers as there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from drawn_answers import Admit, Answers, by_survival, peeking
from exact_answers import PROMPT, RULES, SAMPLES, answers_p_value
from power import THRESHOLD
from scipy import stats
from small_target import SmallTarget

from outrider.kernels import acceptance
from outrider.server.plugin.decode import sampling

RUNS = 12


@pytest.fixture(scope="module")
def answers(small_target: SmallTarget) -> Answers:
    return Answers.of(small_target, small_target.tokenizer(PROMPT)["input_ids"], 5, RULES)


def keep_wrong_drafts(patch: pytest.MonkeyPatch) -> None:
    """A tenth of the tests are passed by all that the target may say at all."""
    honest, draw = sampling.uniforms, torch.Generator().manual_seed(0)

    def uniforms(keys: torch.Tensor, count: int) -> torch.Tensor:
        found = honest(keys, count)
        return found.masked_fill(torch.rand(found.shape, generator=draw) < 0.1, 0.0)

    patch.setattr(sampling, "uniforms", uniforms)


def replace_from_p(patch: pytest.MonkeyPatch) -> None:
    """Draw the last token as if no draft had been rejected."""
    honest = acceptance._draw
    patch.setattr(acceptance, "_draw", lambda p, rows, rejected, *rest: honest(p, rows, rejected & False, *rest))


def nothing(patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "admit"),
    [(keep_wrong_drafts, by_survival), (replace_from_p, by_survival), (nothing, peeking)],
    ids=["a tenth of wrong drafts kept", "replaced from p", "peeking at the second confidence"],
)
def test_faults_are_seen(
    answers: Answers, plant: Callable[[pytest.MonkeyPatch], None], admit: Admit, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = [answers_p_value(answers.draw(SAMPLES, seed, admit)[0], answers.exact) for seed in range(RUNS)]
    scores = stats.norm.isf(np.maximum(found, 1e-300))  # near normal, so that few runs tell the share beyond a bound
    assert stats.norm.cdf((scores.mean() - stats.norm.isf(THRESHOLD)) / scores.std(ddof=1)) >= 0.95
    assert max(found) < THRESHOLD


def test_honest_decoding_passes(answers: Answers) -> None:
    found, observed = [], []
    for seed in range(20):
        drawn, positions = answers.draw(SAMPLES, seed)
        found.append(answers_p_value(drawn, answers.exact))
        observed.append(positions)
    assert min(found) > THRESHOLD
    assert sum(p < 0.25 for p in found) < 14
    assert all(second > 0.2 * first for first, second, *_ in observed)
