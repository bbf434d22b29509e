"""The power of sampled tests against planted faults, on a target with few answers."""

import numpy as np
import pytest
from chi_square import THRESHOLD, distance, power, simulated_power
from faults import Decoding, a_tenth_kept, peeking, replaced_from_p
from scipy import stats

SAMPLES, LENGTH, CHOICES = 4800, 5, 4


def table(seed: int, sharp: float = 1.0):
    """Distributions over CHOICES tokens, different for every text."""

    def after(text):
        generator = np.random.default_rng([seed, *text, len(text)])
        weights = np.exp(sharp * generator.standard_normal(CHOICES))
        return dict(enumerate((weights / weights.sum()).tolist()))

    return after


def near(one, other, share: float):
    def after(text):
        mine, theirs = one(text), other(text)
        return {token: (1 - share) * mine[token] + share * theirs[token] for token in mine}

    return after


def likeliest(target):
    """A drafter with certain drafts, as lookup has."""
    return lambda text: {max(probs := target(text), key=probs.__getitem__): 1.0}


TARGET = table(1)
DRAFTERS = {"model": near(TARGET, table(2, 2.0), 0.7), "lookup": likeliest(near(TARGET, table(3), 0.6))}


def chance(text) -> float:
    """Confidence of a perfect head in the model's draft after a text."""
    p, q = TARGET(text), DRAFTERS["model"](text)
    return sum(min(p[token], q[token]) for token in p)


FAULTS = {
    "a tenth of wrong drafts kept": Decoding(4, keep=a_tenth_kept),
    "replaced from p": Decoding(4, replace=replaced_from_p),
    "peeking at the second confidence": Decoding(4, admit=peeking(chance, 0.7)),
}


@pytest.fixture(scope="module")
def exact():
    return Decoding(0).answers(TARGET, DRAFTERS["model"], LENGTH)


def test_honest_decoding_has_the_targets_distribution(exact) -> None:
    assert sum(exact.values()) == pytest.approx(1.0)
    assert len(exact) == CHOICES**LENGTH
    for drafter in DRAFTERS.values():
        for depth in (1, 2, 4):
            assert distance(Decoding(depth).answers(TARGET, drafter, LENGTH), exact) < 1e-9
    few = Decoding(4, admit=lambda text, drafts: 1 + text[-1] % 3)  # independent of the drafts
    assert distance(few.answers(TARGET, DRAFTERS["model"], LENGTH), exact) < 1e-9


def prefixes(probs, length: int):
    shorter: dict = {}
    for text, p in probs.items():
        shorter[text[:length]] = shorter.get(text[:length], 0.0) + p
    return shorter


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected_in_drafts_of_a_model(exact, fault) -> None:
    """Three tokens suffice: positions 1 and 2 of a draft decide the last two."""
    wrong = FAULTS[fault].answers(TARGET, DRAFTERS["model"], LENGTH)
    assert power(prefixes(exact, 3), prefixes(wrong, 3), SAMPLES) > 0.95


@pytest.mark.parametrize("fault", ["a tenth of wrong drafts kept", "replaced from p"])
def test_faults_are_detected_in_drafts_of_lookup(exact, fault) -> None:
    wrong = FAULTS[fault].answers(TARGET, DRAFTERS["lookup"], LENGTH)
    assert power(prefixes(exact, 3), prefixes(wrong, 3), SAMPLES) > 0.95


@pytest.mark.parametrize("total", [300, 600, 1200])
def test_power_is_near_the_simulated_power(exact, total) -> None:
    """They differ slightly: the formula omits the variance of the wrong distribution."""
    probs = prefixes(exact, 2)
    wrong = prefixes(Decoding(4, keep=a_tenth_kept).answers(TARGET, DRAFTERS["lookup"], LENGTH), 2)
    assert simulated_power(probs, wrong, total, runs=500) == pytest.approx(power(probs, wrong, total), abs=0.12)


def test_power_without_a_fault_is_the_threshold(exact) -> None:
    assert power(prefixes(exact, 2), prefixes(exact, 2), SAMPLES) == pytest.approx(THRESHOLD, rel=1e-6)


def test_an_impossible_token_is_detected() -> None:
    probs = {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25}
    wrong = {"a": 0.2498, "b": 0.25, "c": 0.25, "d": 0.25, "e": 0.0002}
    expected = 1 - (1 - 0.0002) ** 10_000
    assert power(probs, wrong, 10_000) == pytest.approx(expected, abs=0.01)
    assert simulated_power(probs, wrong, 10_000, runs=1000) == pytest.approx(expected, abs=0.05)


def test_the_old_test_had_little_power() -> None:
    """A target sure of one token hides the fault, as wrong drafts are rare."""
    p = {0: 0.85, 1: 0.05, 2: 0.05, 3: 0.05}
    wrong = dict(p) | {0: 0.865, 1: 0.045, 2: 0.045, 3: 0.045}
    assert power(p, wrong, 2400) < 0.2
    assert stats.ncx2.sf(stats.chi2.isf(THRESHOLD, 3), 3, 0.0) == pytest.approx(THRESHOLD)
