"""Several denoising steps keep the target's distribution, by every draw enumerated and by many samples."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from chi_square import p_value
from margins import assert_near

from outrider.drafters.diffusion import denoise as module
from outrider.drafters.diffusion.denoise import Schedule, denoise, make_schedule
from outrider.kernels.acceptance import Verification, accept
from outrider.kernels.noise import Purpose, gumbel_argmax, streams, uniforms
from outrider.kernels.sampling import Rules

# -- in exact fractions, every draw enumerated ------------------------------------------------------------------------

GAMMA, TOKENS = 3, (0, 1)
State = tuple[int | None, ...]
Dist = tuple[Fraction, ...]
SCHEDULES = {steps: make_schedule(GAMMA, steps) for steps in (1, 2, 3)}


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
    """A finished block: its chance, its tokens, and by position its distribution and its confidence."""

    chance: Fraction
    tokens: State = (None,) * GAMMA
    drawn_from: dict[int, Dist] = field(default_factory=dict)
    sure: dict[int, Fraction] = field(default_factory=dict)


def blocks(tables: Tables, schedule: Schedule, so_far: Drafted, step: int = 0) -> Iterator[Drafted]:
    """Every block that the schedule can draft, with its chance."""
    if step == len(schedule):
        yield so_far
        return
    state, done = so_far.tokens, sum(schedule[:step])
    picked = range(done, done + schedule[step])
    rows = {i: tables.draft(state, i) for i in picked}
    for draws in product(TOKENS, repeat=len(picked)):
        tokens, chance = list(state), so_far.chance
        for i, token in zip(picked, draws, strict=True):
            tokens[i] = token
            chance *= rows[i][token]
        sure = so_far.sure | {i: tables.confidence(state, i) for i in picked}
        yield from blocks(tables, schedule, Drafted(chance, tuple(tokens), so_far.drawn_from | rows, sure), step + 1)


def its_own(block: Drafted, i: int) -> Dist:
    return block.drawn_from[i]


def said(
    tables: Tables,
    schedule: Schedule,
    q_of: Callable[[Drafted, int], Dist] = its_own,
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

    def verify(block: Drafted, i: int, survival: Fraction, chance: Fraction) -> None:
        prefix = block.tokens[:i]
        survival = survival * sure_of(block, i) if i < GAMMA else Fraction(0)
        if survival < Fraction(1, 6):
            go_on(prefix, chance)
            return
        p, token = tables.target(prefix), block.tokens[i]
        q = q_of(block, i)
        kept = min(Fraction(1), p[token] / q[token])
        verify(block, i + 1, survival, chance * kept)
        rest = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
        for rival in TOKENS:
            if kept < 1 and rest[rival]:
                go_on((*prefix, rival), chance * (1 - kept) * rest[rival] / sum(rest))

    for block in blocks(tables, schedule, Drafted(Fraction(1))):
        if block.chance:
            verify(block, 0, Fraction(1), block.chance)
    return out


def distance(tables: Tables, chances: dict[tuple[int, ...], Fraction]) -> Fraction:
    """Total variation from the target's own distribution."""
    total = Fraction(0)
    for text in product(TOKENS, repeat=GAMMA):
        chance = Fraction(1)
        for i, token in enumerate(text):
            chance *= tables.target(text[:i])[token]
        total += abs(chance - chances[text])
    return total / 2


@pytest.mark.parametrize("steps", SCHEDULES)
def test_what_comes_out_is_the_targets(steps: int) -> None:
    for seed in range(20):
        tables = Tables(seed)
        assert distance(tables, said(tables, SCHEDULES[steps])) == 0


def test_the_q_of_another_step_is_wrong() -> None:
    """The last tokens with the distribution that the first step predicted for them."""
    for steps in (2, 3):
        off = []
        for tables in map(Tables, range(20)):
            chances = said(tables, SCHEDULES[steps], lambda _, i, tables=tables: tables.draft((None,) * GAMMA, i))
            off.append(distance(tables, chances))
        assert max(off) > Fraction(1, 20)


def test_a_confidence_that_sees_its_own_token_is_wrong() -> None:
    def late(tables: Tables) -> Callable[[Drafted, int], Fraction]:
        return lambda block, i: tables.confidence(block.tokens, i)

    for schedule in SCHEDULES.values():
        off = [distance(t, said(t, schedule, sure_of=late(t))) for t in map(Tables, range(20))]
        assert max(off) > Fraction(1, 20)


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
            tokens, torch.full((SAMPLES,), GAMMA), torch.arange(SAMPLES + 1) * (GAMMA + 1),
            uniforms=uniforms(streams(each, each * 0, Purpose.ACCEPT), GAMMA),
            final_keys=streams(each, each * 0, Purpose.FINAL), probs=rows.flatten(0, 1), draft_probs=probs,
        )
    )  # fmt: skip
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


@pytest.mark.parametrize("steps", [2, 3])
def test_sampled_texts_follow_the_target(steps: int) -> None:
    predict, target = tensors(3)
    assert p_value(*texts(predict, target, SCHEDULES[steps]), SAMPLES) > 1e-4


def test_the_sampled_check_sees_a_wrong_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token with the distribution of the one before."""
    draw = module.draw_independently

    def of_the_step_before(*args: Any, **given: Any) -> Any:
        tokens, q, certainty = draw(*args, **given)
        before, latest[0] = latest[0], q
        return tokens, q if before is None else before, certainty

    latest: list[torch.Tensor | None] = [None]
    monkeypatch.setattr(module, "draw_independently", of_the_step_before)
    predict, target = tensors(3)
    assert p_value(*texts(predict, target, SCHEDULES[3]), SAMPLES) < 1e-9


@pytest.mark.parametrize("steps", SCHEDULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_block_depends_on_its_keys_alone(steps: int, temperature: float) -> None:
    predict, _ = tensors(5)
    keys = torch.randint(2**62, (6, GAMMA), generator=torch.Generator().manual_seed(0))
    heat = torch.tensor([temperature, 1.0, 0.7, 0.0, temperature, 1.0])
    together = denoise(predict, SCHEDULES[steps], Rules(heat), keys, vocab=None, wants_probs=True)
    for i in range(6):
        alone = denoise(predict, SCHEDULES[steps], Rules(heat[[i]]), keys[[i]], vocab=None, wants_probs=True)
        assert torch.equal(alone[0][0], together[0][i])
        assert_near(alone[2][0], together[2][i], WORDS)
        if heat[i]:
            assert_near(alone[1][0], together[1][i], WORDS)
        else:
            assert alone[1] is None


def test_schedules_reveal_every_token_once() -> None:
    assert make_schedule(7, 1) == (7,)
    assert make_schedule(7, 2) == (1, 6)
    assert make_schedule(7, 7) == (1,) * 7
    with pytest.raises(ValueError, match=r"1\.\.7.*got 8"):
        make_schedule(7, 8)
