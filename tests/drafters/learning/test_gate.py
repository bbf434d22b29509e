"""The gate: its statistics, and that it sees what a drafter learned by heart."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_drafters import DFLASH, TINY, make_model

from outrider.drafters.block import BlockModel
from outrider.drafters.learning import gate
from outrider.drafters.learning.gate import Followed, compare, follow, frozen_part, ratio_interval
from outrider.drafters.training.batches import BatchMaker, anchor_range
from outrider.drafters.training.features import sequence_features
from outrider.drafters.training.loop import Recipe, Run
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel
from outrider.drafters.training.validate import block_hits, sequence_acceptance


@pytest.fixture(scope="module")
def target(learned_target: Path) -> TargetModel:
    return TargetModel.load(str(learned_target), dtype=torch.float32)


def followed(tokens: int, steps: int) -> Followed:
    return Followed(tokens, np.zeros((steps, 4), np.float32), np.zeros(steps, np.int64), np.zeros(steps, np.int64))


def answers(steps: list[int], tokens: int = 60) -> list[Followed]:
    return [followed(tokens, count) for count in steps]


def prompts(count: int) -> list[str]:
    return [f"{i:016x}" for i in range(count)]


GENERAL = answers([30] * 4)


def judge(candidate: list[int], in_use: list[int] | None, **how: object) -> gate.Verdict:
    names = how.pop("prompts", prompts(len(candidate)))
    general = how.pop("general", GENERAL)
    used = None if in_use is None else answers(in_use)
    return compare(answers(candidate), used, names, general, None if used is None else GENERAL, **how)  # type: ignore[arg-type]


def test_better_passes_and_equal_or_worse_does_not() -> None:
    assert judge([20] * 10, [30] * 10).passed
    assert judge([20] * 10, [30] * 10).ratio == pytest.approx(1.5)
    for candidate in ([30] * 10, [31] * 10, [20] * 3 + [33] * 7):
        assert judge(candidate, [30] * 10).reason == "not better on held-out answers"


def test_too_few_prompts_are_no_verdict() -> None:
    assert not judge([20] * 5, [30] * 5).passed
    assert judge([20] * 6, [30] * 6).reason == "6 held-out prompts are too few"
    assert judge([20] * 7, [30] * 7).passed  # 420 tokens
    assert not judge([20] * 10, [30] * 10, prompts=["a" * 16] * 5 + ["b" * 16] * 5).passed


def test_one_prompt_asked_often_is_one_observation() -> None:
    """Nine prompts get worse, and one that was asked forty times better."""
    often = ["f" * 16] * 40
    assert judge([31] * 9 + [20] * 40, [30] * 49).passed
    assert not judge([31] * 9 + [20] * 40, [30] * 49, prompts=prompts(9) + often).passed


def test_what_is_forgotten_refuses() -> None:
    assert judge([20] * 10, [30] * 10, general=answers([31] * 4)).reason == "worse on general answers"
    assert judge([20] * 10, [30] * 10, general=answers([30, 30, 30, 32])).passed
    # 2 % of the drafter in use again and again would be a lot of the one that the server started with
    assert judge([20] * 10, [30] * 10, first_general=2.1).reason == "worse on general answers"


def test_the_first_drafter_has_to_be_worth_it() -> None:
    assert judge([50] * 10, None).reason == "tau below 1.3"
    assert judge([40] * 10, None).passed
    assert judge([40] * 10, None).in_use_tau == 1.0


def test_equal_drafters_seldom_pass() -> None:
    """The lower end of a 95 % interval lies above 1 in one of 40 comparisons of equals, in few more of ten prompts."""
    generator, passed = np.random.default_rng(1), 0
    for _ in range(300):
        passed += ratio_interval(generator.poisson(30, (2, 10)).astype(float))[1] > 1
    assert passed <= 300 * 0.025 + 4 * (300 * 0.025) ** 0.5 + 3


@pytest.mark.parametrize("config", [TINY, DFLASH], ids=["dspark", "dflash"])
def test_following_is_what_the_trainer_measures(target: TargetModel, config: object, held: list[Sequence]) -> None:
    shape = dataclasses.replace(config, head_dim=8, target_layers=(1, 3, 4))  # type: ignore[type-var]
    model = make_model(shape)
    maker = BatchMaker(shape, model.vocab, device=torch.device("cpu"))
    hits = block_hits(model, frozen_part(model, target), maker.columns)
    for s, found in zip(held, follow(model, target, held), strict=True):
        wanted = sequence_acceptance(hits, maker, s)
        assert (found.tokens, found.steps) == (wanted.tokens, wanted.cycles)
        assert int(found.accepted.sum()) == sum(wanted.kept)
        assert found.confidence.shape == (found.steps, shape.gamma)
        assert found.confidence.dtype == np.float32
        assert ((found.accepted <= found.reach) & (found.reach <= shape.gamma)).all()
        assert ((found.confidence > 0) & (found.confidence < 1)).all()


@pytest.fixture(scope="module")
def noise(target: TargetModel) -> list[Sequence]:
    """Answers in which nothing follows from anything: they can be learned by heart alone."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 96, (46,), generator=generator).tolist() for _ in range(16)]
    made = sequence_features(target, [(tokens, 6) for tokens in ids], (1, 3, 4), 8)
    return [Sequence(s.tokens, s.prompt, s.features, s.tokens[s.prompt :, None], torch.ones(40, 1)) for s in made]


@pytest.fixture(scope="module")
def held(noise: list[Sequence]) -> list[Sequence]:
    return noise[8:]


def test_what_was_learned_by_heart_does_not_pass(
    target: TargetModel, noise: list[Sequence], held: list[Sequence], tmp_path: Path
) -> None:
    """The fault that the split by prompt prevents would be seen: judged by answers it was trained on, it passes."""
    torch.manual_seed(0)
    model = BlockModel(dataclasses.replace(TINY, head_dim=8))
    before = [follow(model, target, part) for part in (noise[:8], held)]
    run = Run(tmp_path, model, frozen_part(model, target), Recipe(steps=10**6, lr=0.01, decay_steps=0, warmup=5))
    maker = BatchMaker(model.config, model.vocab, device=torch.device("cpu"))
    for i in range(120):
        s = noise[i % 8]
        run.update(maker.cut([s], [torch.arange(*anchor_range(s))], 4))
    trained, unseen = (follow(model, target, part) for part in (noise[:8], held))
    names = prompts(8)
    assert not compare(unseen, before[1], names, GENERAL, GENERAL).passed
    assert compare(trained, before[0], names, GENERAL, GENERAL).passed
