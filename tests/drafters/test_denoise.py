"""Several denoising steps keep the target's distribution."""

from collections import Counter
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

GAMMA = 3
SCHEDULES = {steps: make_schedule(GAMMA, steps) for steps in (1, 2, 3)}
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
