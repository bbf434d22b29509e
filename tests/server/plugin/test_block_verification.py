"""Block verification in exact fractions, by an independent rule, compared with the worker's code.

Drafted tokens decide where blocks end, as the planner may; p depends on the whole text.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from faults import every_test_by_the_scale
from measured_acceptance import Acceptance, Batch, Text, Verified

from outrider.kernels import acceptance

VOCAB, DEPTH = 3, 3
TOKENS = range(VOCAB)
Law = tuple[Fraction, ...]
Next = Callable[[Text], Law]


def table(seed: int, zeros: float = 0.0) -> Next:
    """Distributions in sixty-fourths, different for every text."""

    @cache
    def after(text: Text) -> Law:
        generator = np.random.default_rng([seed, len(text), *text])
        weights = generator.dirichlet(np.full(VOCAB, 0.7)) * (generator.random(VOCAB) >= zeros)
        counts = np.floor(64 * weights / max(weights.sum(), 1e-9)).astype(int)
        counts[generator.integers(VOCAB)] += 64 - counts.sum()
        return tuple(Fraction(int(n), 64) for n in counts)

    return after


def point(text: Text) -> Law:
    return tuple(Fraction(int(token == (2 * len(text) + sum(text)) % VOCAB)) for token in TOKENS)


Stop = Callable[[Text], bool]
STOPS: dict[str, Stop] = {
    "never": lambda drafts: False,
    "after one": lambda drafts: len(drafts) == 1,
    "after two": lambda drafts: len(drafts) == 2,
    "by the draft": lambda drafts: bool(drafts) and (drafts[-1] + len(drafts)) % 3 == 0,
}


def rest(scale: Fraction, p: Law, q: Law) -> list[Fraction]:
    return [max(Fraction(0), scale * each - other) for each, other in zip(p, q, strict=True)]


@dataclass(frozen=True)
class Rule:
    """A verification rule; p and q are of the token after a text."""

    p: Next
    q: Next

    def scales(self, drafts: Text) -> list[Fraction]:
        """s_0, s_1, ..."""
        scale = [Fraction(1)]
        for k, x in enumerate(drafts):
            scale.append(min(Fraction(1), scale[-1] * self.p(drafts[:k])[x] / self.q(drafts[:k])[x]))
        return scale

    def by_block(self, drafts: Text) -> Iterator[tuple[int, Fraction, list[Fraction]]]:
        """(drafts kept, chance, weights of the next token)."""
        scales, later = self.scales(drafts), Fraction(1)
        for k in range(len(drafts), -1, -1):
            p, scale = self.p(drafts[:k]), scales[k]
            weights, chance = list(p), scale
            if k < len(drafts):
                weights = rest(scale, p, self.q(drafts[:k]))
                total = sum(weights)
                chance = total / (total + 1 - scale) if total + 1 - scale else Fraction(1)
                weights = weights if total else list(p)
            yield k, later * chance, weights
            later *= 1 - chance

    def by_token(self, drafts: Text) -> Iterator[tuple[int, Fraction, list[Fraction]]]:
        reached = Fraction(1)
        for k, x in enumerate(drafts):
            p, q = self.p(drafts[:k]), self.q(drafts[:k])
            keep = min(Fraction(1), p[x] / q[x])
            yield k, reached * (1 - keep), rest(Fraction(1), p, q) if keep < 1 else list(p)
            reached *= keep
        yield len(drafts), reached, list(self.p(drafts))

    def blocks(self, stop: Stop) -> Iterator[tuple[Text, Fraction]]:
        def longer(drafts: Text, chance: Fraction) -> Iterator[tuple[Text, Fraction]]:
            if len(drafts) == DEPTH or stop(drafts):
                yield drafts, chance
                return
            for x in TOKENS:
                if self.q(drafts)[x]:
                    yield from longer((*drafts, x), chance * self.q(drafts)[x])

        yield from longer((), Fraction(1))


def between(one: Next, other: Next) -> Next:
    return lambda text: tuple((a + b) / 2 for a, b in zip(one(text), other(text), strict=True))


def laws() -> Iterator[tuple[str, Rule]]:
    for seed in range(4):
        yield f"model {seed}", Rule(table(seed), table(100 + seed))
    yield "near", Rule(table(5), between(table(5), table(6)))
    yield "equal", Rule(table(7), table(7))
    yield "with zeros", Rule(table(8, 0.5), table(9, 0.3))
    yield "lookup", Rule(table(10), point)
    yield "lookup behind a model", Rule(table(11), lambda text: table(12)(text) if len(text) % 2 else point(text))


LAWS = dict(laws())


Outcomes = dict[Text, Any]
"""Chances of a step's outcomes."""


def outcomes(rule: Rule, verify: str, drafts: Text) -> Outcomes:
    chances: Outcomes = defaultdict(Fraction)
    for k, chance, weights in getattr(rule, verify)(drafts):
        for y in TOKENS:
            chances[*drafts[:k], y] += chance * weights[y] / sum(weights)
    return chances


def said(rule: Rule, stop: Stop, of: Callable[[Text], Outcomes]) -> Outcomes:
    """Chances of the texts of DEPTH + 1 tokens; after a step the target continues alone."""
    chances: Outcomes = defaultdict(Fraction)
    for drafts, drawn in rule.blocks(stop):
        begun = {text: drawn * chance for text, chance in of(drafts).items()}
        for _ in range(DEPTH + 1):
            chances |= {text: chances[text] + chance for text, chance in begun.items() if len(text) > DEPTH}
            begun = {
                (*text, y): chance * rule.p(text)[y]
                for text, chance in begun.items()
                for y in TOKENS
                if len(text) <= DEPTH
            }
    return chances


def exact(rule: Rule) -> Outcomes:
    return {
        text: math.prod(rule.p(text[:k])[token] for k, token in enumerate(text))
        for text in itertools.product(TOKENS, repeat=DEPTH + 1)
    }


def off_by(chances: Outcomes, expected: Outcomes) -> float:
    return sum(abs(float(chances.get(text, 0)) - float(expected.get(text, 0))) for text in {*chances, *expected}) / 2


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", LAWS)
def test_texts_have_exactly_the_targets_distribution(name: str, stop: str) -> None:
    rule = LAWS[name]
    chances = said(rule, STOPS[stop], lambda drafts: outcomes(rule, "by_block", drafts))
    assert all(chances[text] == chance for text, chance in exact(rule).items())


def survivals(rule: Rule, stop: Stop, verify: str) -> list[Fraction]:
    """Chances that at least 1, 2, ... tokens are kept."""
    survival = [Fraction(0)] * DEPTH
    for drafts, chance in rule.blocks(stop):
        for k, kept, _ in getattr(rule, verify)(drafts):
            for place in range(k):
                survival[place] += chance * kept
    return survival


@pytest.mark.parametrize("name", LAWS)
def test_at_least_as_many_tokens_are_kept_as_token_by_token(name: str) -> None:
    rule = LAWS[name]
    for stop in STOPS.values():
        block, token = (survivals(rule, stop, verify) for verify in ("by_block", "by_token"))
        assert all(ours >= theirs for ours, theirs in zip(block, token, strict=True))
    if name.startswith("model"):
        assert sum(survivals(rule, STOPS["never"], "by_block")) > sum(survivals(rule, STOPS["never"], "by_token"))
    if name.startswith("lookup") and "model" not in name:
        assert block == token


@pytest.mark.parametrize("name", LAWS)
def test_survival_does_not_depend_on_later_verified_tokens(name: str) -> None:
    """It is the mean of the scale, so the planner may add survivals."""
    rule = LAWS[name]
    for stop in STOPS.values():
        expected = [Fraction(0)] * DEPTH
        for drafts, chance in rule.blocks(stop):
            for k, scale in enumerate(rule.scales(drafts)[1:]):
                expected[k] += chance * scale
        assert survivals(rule, stop, "by_block") == expected
    deep, short = (survivals(rule, STOPS[stop], "by_block") for stop in ("never", "after one"))
    assert deep[0] == short[0]


def by_the_worker(rule: Rule, *, by_block: bool = True) -> dict[Text, Outcomes]:
    """Outcomes of every block, by the worker's code."""

    def logits(batch: Batch) -> torch.Tensor:
        rows = [rule.p(item.drafts[:k]) for item in batch.items for k in range(len(item.drafts) + 1)]
        return torch.tensor([[float(each) for each in row] for row in rows]).log()

    def law(text: Text) -> tuple[float, ...]:
        return tuple(map(float, rule.q(text)))

    blocks = {drafts for stop in STOPS.values() for drafts, _ in rule.blocks(stop)}
    items = {drafts: Verified((0,), drafts, tuple(law(drafts[:k]) for k in range(len(drafts)))) for drafts in blocks}
    measured = Acceptance(logits, by_block=by_block)
    measured.learn(set(items.values()))
    return {drafts: dict(measured.of(item)) for drafts, item in items.items()}


@pytest.mark.parametrize("verify", ["by_block", "by_token"])
@pytest.mark.parametrize("name", LAWS)
def test_the_worker_verifies_by_this_rule(name: str, verify: str) -> None:
    rule = LAWS[name]
    for drafts, found in by_the_worker(rule, by_block=verify == "by_block").items():
        assert off_by(found, outcomes(rule, verify, drafts)) < 1e-6, drafts


# -- faults -----------------------------------------------------------------------------------------------------------


def replaced_as_token_by_token(patch: pytest.MonkeyPatch) -> None:
    """Draw the replacement from max(0, p - q), whatever the scale of p."""
    honest = acceptance.draw_each
    patch.setattr(acceptance, "draw_each", lambda batch, kept, scale: honest(batch, kept, torch.ones_like(scale)))


def left_over_without_the_scale(patch: pytest.MonkeyPatch) -> None:
    """Test by p's own excess over q."""
    kept, honest = acceptance.kept_drafts, acceptance.residual

    def kept_drafts(batch: acceptance.Verification) -> tuple[torch.Tensor, torch.Tensor]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(acceptance, "residual", lambda *given: honest(*given[:-1], torch.ones_like(given[-1])))
            return kept(batch)

    patch.setattr(acceptance, "kept_drafts", kept_drafts)


def kept_by_the_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acceptance, "kept_drafts", partial(every_test_by_the_scale, acceptance.kept_drafts))


@pytest.mark.parametrize("fault", [replaced_as_token_by_token, left_over_without_the_scale, kept_by_the_scale])
@pytest.mark.parametrize("name", ["model 0", "model 1"])
def test_faults_are_detected(
    name: str, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = LAWS[name]
    honest = by_the_worker(rule)
    assert off_by(said(rule, STOPS["never"], honest.__getitem__), exact(rule)) < 1e-6
    fault(monkeypatch)
    assert off_by(said(rule, STOPS["never"], by_the_worker(rule).__getitem__), exact(rule)) > 0.002
