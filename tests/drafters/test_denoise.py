"""Several denoising steps: the q of `denoise.py` keeps the target's distribution, the naive q does not."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

import pytest
import torch
from chi_square import p_value
from margins import assert_near

from outrider.drafters.diffusion import denoise as module
from outrider.drafters.diffusion.denoise import Schedule, denoise, keeps_distribution, make_schedule, most_certain
from outrider.kernels.acceptance import Verification, accept
from outrider.kernels.noise import Purpose, gumbel_argmax, streams, uniforms
from outrider.kernels.sampling import Rules

# -- in exact fractions, every draw enumerated ------------------------------------------------------------------------

GAMMA, TOKENS = 3, (0, 1)
State = tuple[int | None, ...]
Dist = tuple[Fraction, ...]


def least_certain(masked: torch.Tensor, certainty: torch.Tensor, count: int) -> torch.Tensor:
    return most_certain(masked, 1 - certainty, count)


def rightmost(masked: torch.Tensor, certainty: torch.Tensor, count: int) -> torch.Tensor:
    return most_certain(masked, torch.arange(masked.shape[1]).expand(masked.shape) / 100, count)


ORDERS = {
    **{f"{name} {steps}": make_schedule(name, GAMMA, steps) for name in module.SCHEDULES for steps in (1, 2, 3)},
    "least certain": Schedule((1, 1, 1), least_certain),
    "right to left": Schedule((1, 1, 1), rightmost),
    "right two first": Schedule((2, 1), rightmost),
}


class Tables:
    """A random drafter, target and confidence, all as tables of exact fractions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.drafts: dict[tuple[State, int], Dist] = {}
        self.targets: dict[tuple[int, ...], Dist] = {}
        self.sure: dict[tuple[State, int], Fraction] = {}

    def some(self) -> Dist:
        part = Fraction(self.random.randint(1, 19), 20)
        return part, 1 - part

    def draft(self, state: State, position: int) -> Dist:
        return self.drafts.setdefault((state, position), self.some())

    def target(self, prefix: tuple[int, ...]) -> Dist:
        return self.targets.setdefault(prefix, self.some())

    def confidence(self, state: State, position: int) -> Fraction:
        return self.sure.setdefault((state, position), self.some()[0])


@dataclass(frozen=True)
class Drafted:
    """A finished block: its chance, tokens, and by position the step, distribution and confidence."""

    chance: Fraction
    tokens: State = (None,) * GAMMA
    at: tuple[int, ...] = (-1,) * GAMMA
    drawn_from: dict[int, Dist] = field(default_factory=dict)
    sure: dict[int, Fraction] = field(default_factory=dict)


def blocks(tables: Tables, schedule: Schedule, so_far: Drafted, step: int = 0) -> Iterator[Drafted]:
    """Every block that the schedule can draft, with its chance."""
    if step == len(schedule.counts):
        yield so_far
        return
    state = so_far.tokens
    masked = torch.tensor([[token is None for token in state]])
    rows = {i: tables.draft(state, i) for i in range(GAMMA) if state[i] is None}
    certainty = torch.tensor([[float(max(rows[i])) if i in rows else 0.0 for i in range(GAMMA)]])
    if schedule.pick is None:
        picked = list(rows)[: schedule.counts[step]]
    else:
        picked = schedule.pick(masked, certainty, schedule.counts[step])[0].nonzero()[:, 0].tolist()
    for draws in product(TOKENS, repeat=len(picked)):
        tokens, at, chance = list(state), list(so_far.at), so_far.chance
        for i, token in zip(picked, draws, strict=True):
            tokens[i], at[i] = token, step
            chance *= rows[i][token]
        drawn_from = so_far.drawn_from | {i: rows[i] for i in picked}
        sure = so_far.sure | {i: tables.confidence(state, i) for i in picked}
        yield from blocks(tables, schedule, Drafted(chance, tuple(tokens), tuple(at), drawn_from, sure), step + 1)


def point(token: int | None) -> Dist:
    return tuple(Fraction(token == other) for other in TOKENS)


def by_the_rule(block: Drafted) -> list[Dist]:
    kept = keeps_distribution(torch.tensor([block.at]))[0].tolist()
    return [block.drawn_from[i] if kept[i] else point(block.tokens[i]) for i in range(GAMMA)]


def naive(block: Drafted) -> list[Dist]:
    return [block.drawn_from[i] for i in range(GAMMA)]


def said(
    tables: Tables,
    schedule: Schedule,
    q_of: Callable[[Drafted], list[Dist]],
    sure_of: Callable[[Drafted, int], Fraction] = lambda block, i: block.sure[i],
) -> dict[tuple[int, ...], Fraction]:
    """The distribution of the first GAMMA output tokens; c_1 ... c_k decide whether token k is verified."""
    out: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)

    def go_on(prefix: tuple[int, ...], chance: Fraction) -> None:
        if len(prefix) == GAMMA:
            out[prefix] += chance
            return
        for token in TOKENS:
            go_on((*prefix, token), chance * tables.target(prefix)[token])

    def verify(block: Drafted, q: list[Dist], i: int, survival: Fraction, chance: Fraction) -> None:
        prefix = block.tokens[:i]
        survival = survival * sure_of(block, i) if i < GAMMA else Fraction(0)
        if survival < Fraction(1, 6):
            go_on(prefix, chance)  # type: ignore[arg-type]
            return
        p, token = tables.target(prefix), block.tokens[i]  # type: ignore[arg-type]
        kept = min(Fraction(1), p[token] / q[i][token])  # type: ignore[index]
        verify(block, q, i + 1, survival, chance * kept)
        rest = [max(Fraction(0), a - b) for a, b in zip(p, q[i], strict=True)]
        for other in TOKENS:
            if kept < 1 and rest[other]:
                go_on((*prefix, other), chance * (1 - kept) * rest[other] / sum(rest))  # type: ignore[arg-type]

    for block in blocks(tables, schedule, Drafted(Fraction(1))):
        if block.chance:
            verify(block, q_of(block), 0, Fraction(1), block.chance)
    return out


def distance(tables: Tables, found: dict[tuple[int, ...], Fraction]) -> Fraction:
    """Total variation from the target's own distribution."""
    total = Fraction(0)
    for text in product(TOKENS, repeat=GAMMA):
        chance = Fraction(1)
        for i, token in enumerate(text):
            chance *= tables.target(text[:i])[token]
        total += abs(chance - found[text])
    return total / 2


@pytest.mark.parametrize("order", ORDERS)
def test_the_output_has_the_targets_distribution(order: str) -> None:
    for seed in range(20):
        tables = Tables(seed)
        assert distance(tables, said(tables, ORDERS[order], by_the_rule)) == 0


@pytest.mark.parametrize("order", ["certain 2", "certain 3", "least certain", "right to left", "right two first"])
def test_the_softmax_of_each_tokens_own_step_is_wrong(order: str) -> None:
    off = [distance(tables, said(tables, ORDERS[order], naive)) for tables in map(Tables, range(20))]
    assert max(off) > Fraction(1, 20)


def test_a_confidence_that_sees_its_own_token_is_wrong() -> None:
    def late(tables: Tables) -> Callable[[Drafted, int], Fraction]:
        return lambda block, i: tables.confidence(block.tokens, i)

    for order in ("left 1", "left 3", "certain 3"):
        off = [distance(t, said(t, ORDERS[order], by_the_rule, late(t))) for t in map(Tables, range(20))]
        assert max(off) > Fraction(1, 20)


def test_revealing_the_second_token_first() -> None:
    """x_2 is a coin, x_1 copies it: with x_1 as certain, x_1 = x_2 comes out too often."""
    half, nothing = (Fraction(1, 2),) * 2, Fraction(0)
    tables = Tables(0)
    tables.target = lambda prefix: half  # type: ignore[method-assign]
    tables.confidence = lambda state, i: Fraction(i < 2)  # type: ignore[method-assign]
    copies = {(None, None): half, (None, 0): point(0), (None, 1): point(1)}
    tables.draft = lambda state, i: copies[state[:2]] if i < 2 else half  # type: ignore[method-assign]
    two_first = Schedule((1, 1, 1), lambda masked, certainty, count: _column(masked, [1, 0, 2]))
    found = said(tables, two_first, naive)
    assert sum((chance for text, chance in found.items() if text[:2] == (0, 0)), nothing) == Fraction(3, 8)
    assert distance(tables, found) == Fraction(1, 4)
    assert distance(tables, said(tables, two_first, by_the_rule)) == 0


def _column(masked: torch.Tensor, order: list[int]) -> torch.Tensor:
    first = next(i for i in order if masked[0, i])
    return torch.arange(masked.shape[1])[None] == first


# -- the function itself, with its keys, and the acceptance that serves -----------------------------------------------

SAMPLES, WORDS = 60_000, 4


def tensors(seed: int) -> tuple[module.Predict, torch.Tensor]:
    """A drafter from a table of logits, and the target's distributions [prefix, WORDS] (prefixes in base WORDS + 1)."""
    generator = torch.Generator().manual_seed(seed)
    table = 2 * torch.randn((WORDS + 1) ** GAMMA, GAMMA, WORDS, generator=generator)
    target = (2 * torch.randn((WORDS + 1) ** GAMMA, WORDS, generator=generator)).softmax(-1)
    return lambda tokens, revealed, columns: (table[number(tokens, revealed)][:, columns], None), target


def number(tokens: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    return (tokens.where(known, WORDS) * (WORDS + 1) ** torch.arange(GAMMA)).sum(-1)


def texts(predict: module.Predict, target: torch.Tensor, schedule: Schedule) -> tuple[Counter, dict]:
    """Counts of texts of GAMMA tokens, and the target's chance of each."""
    each = torch.arange(SAMPLES)
    keys = streams(each[:, None].repeat(1, GAMMA), torch.arange(GAMMA).repeat(SAMPLES, 1), Purpose.DRAFT)
    rules = Rules(torch.ones(SAMPLES))
    tokens, probs, _ = denoise(predict, schedule, rules, keys, vocab=None, wants_probs=True)
    reach = torch.arange(GAMMA)
    rows = torch.stack([target[number(tokens, (reach < k).expand_as(tokens))] for k in range(GAMMA + 1)], 1)
    lens, out = accept(
        Verification(
            tokens,
            torch.full((SAMPLES,), GAMMA),
            torch.arange(SAMPLES + 1) * (GAMMA + 1),
            uniforms=uniforms(streams(each, each * 0, Purpose.ACCEPT), GAMMA),
            final_keys=streams(each, each * 0, Purpose.FINAL),
            probs=rows.flatten(0, 1),
            draft_probs=probs,
        )
    )
    out = out[:, :GAMMA].clone()
    for k in range(1, GAMMA):
        more = gumbel_argmax(
            target[number(out, (reach < k).expand_as(out))], streams(each, each * 0 + k, Purpose.TOKEN)
        )
        out[:, k] = out[:, k].where(lens > k, more)
    chances = {}
    for text in product(range(WORDS), repeat=GAMMA):
        chance, ids = 1.0, torch.tensor([text])
        for k, token in enumerate(text):
            chance *= float(target[number(ids, reach[None] < k), token])
        chances[text] = chance
    return Counter(map(tuple, out.tolist())), chances


@pytest.mark.parametrize("order", ["left 3", "even 2", "certain 2", "certain 3"])
def test_sampled_texts_follow_the_target(order: str) -> None:
    predict, target = tensors(3)
    assert p_value(*texts(predict, target, ORDERS[order]), SAMPLES) > 1e-4


def test_the_sampled_check_detects_a_wrong_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "keeps_distribution", lambda at: torch.ones_like(at, dtype=torch.bool))
    predict, target = tensors(3)
    assert p_value(*texts(predict, target, ORDERS["certain 3"]), SAMPLES) < 1e-9


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_depends_on_its_keys_alone(order: str, temperature: float) -> None:
    predict, _ = tensors(5)
    keys = torch.randint(2**62, (6, GAMMA), generator=torch.Generator().manual_seed(0))
    heat = torch.tensor([temperature, 1.0, 0.7, 0.0, temperature, 1.0])
    together = denoise(predict, ORDERS[order], Rules(heat), keys, vocab=None, wants_probs=True)
    for i in range(6):
        alone = denoise(predict, ORDERS[order], Rules(heat[[i]]), keys[[i]], vocab=None, wants_probs=True)
        assert torch.equal(alone[0][0], together[0][i])
        assert_near(alone[2][0], together[2][i], WORDS)
        if heat[i]:
            assert alone[1] is not None
            assert together[1] is not None
            assert_near(alone[1][0], together[1][i], WORDS)
        else:
            assert alone[1] is None


def test_schedules_reveal_every_token_once() -> None:
    assert make_schedule("left", 7, 1).counts == (7,)
    assert make_schedule("left", 7, 2).counts == (1, 6)
    assert make_schedule("even", 7, 3).counts == (2, 2, 3)
    assert make_schedule("certain", 7, 7).counts == (1,) * 7
    with pytest.raises(ValueError, match=r"1\.\.7.*got 8"):
        make_schedule("left", 7, 8)
    with pytest.raises(ValueError, match="left, even, certain, not 'random'"):
        make_schedule("random", 7, 2)
