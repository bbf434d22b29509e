"""The gate: its statistics, and that it rejects a drafter that memorised answers."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_drafters import TINY, decode_along, make_model, make_target

from outrider.drafters import networks, registry
from outrider.drafters.block.model import BlockModel, TrainedModel
from outrider.drafters.commands.train import read_drafter, schedule_of
from outrider.drafters.diffusion.denoise import Schedule
from outrider.drafters.learning import gate
from outrider.drafters.learning.drafters import mixed
from outrider.drafters.learning.gate import CHANCE, Followed, chance_of, compare, enough, follow, level
from outrider.drafters.learning.lookups import Lookups
from outrider.drafters.learning.start import KINDS, first_drafter, settings
from outrider.drafters.training.batches import BatchMaker, anchor_range
from outrider.drafters.training.features import sequence_features
from outrider.drafters.training.forward import frozen_part
from outrider.drafters.training.loop import ReaderRun, Recipe
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel
from outrider.drafters.training.validate import drafts_of


@pytest.fixture(scope="module")
def target(learned_target: Path) -> TargetModel:
    return TargetModel.load(str(learned_target), dtype=torch.float32)


def followed(tokens: int, steps: int) -> Followed:
    nothing = np.zeros(steps, np.int64)
    return Followed(tokens, steps, np.zeros((steps, 4), np.float32), nothing, nothing)


def answers(steps: list[int], tokens: int = 60) -> list[Followed]:
    return [followed(tokens, count) for count in steps]


def prompts(count: int) -> list[str]:
    return [f"{i:016x}" for i in range(count)]


GENERAL = answers([30] * 4)


def judge(candidate: list[int], in_use: list[int], **how: object) -> gate.GateVerdict:
    names = how.pop("prompts", prompts(len(candidate)))
    general = how.pop("general", GENERAL)
    return compare(answers(candidate), answers(in_use), names, general, GENERAL, **how)


def test_better_passes_and_equal_or_worse_does_not() -> None:
    assert judge([20] * 10, [30] * 10).passed
    assert judge([20] * 10, [30] * 10).ratio == pytest.approx(1.5)
    for candidate in ([30] * 10, [31] * 10, [20] * 3 + [33] * 7):
        assert judge(candidate, [30] * 10).reason == "not better on held-out answers"


def test_mixed_weights_lie_between_the_two() -> None:
    def drafter(seed: int) -> BlockModel:
        return make_model(TINY, seed).requires_grad_(False)

    first, trained = drafter(0), dict(drafter(1).named_parameters())
    between = dict(mixed(drafter(0), drafter(1), 0.7).named_parameters())
    assert between.keys() == trained.keys()
    for name, weight in first.named_parameters():
        torch.testing.assert_close(between[name], 0.3 * weight + 0.7 * trained[name])
    other = make_model(dataclasses.replace(TINY, intermediate_size=TINY.intermediate_size * 2))
    with pytest.raises(ValueError, match="is not in both drafters, or has another shape"):
        mixed(first, other, 0.5)


def test_too_few_prompts_are_no_verdict() -> None:
    assert judge([20] * 6, [30] * 6).reason == "6 held-out prompts are too few"
    assert judge([20] * 7, [30] * 7).passed
    assert not judge([20] * 10, [30] * 10, prompts=["a" * 16] * 5 + ["b" * 16] * 5).passed


def test_repeated_requests_of_one_prompt_are_one_observation() -> None:
    often = ["f" * 16] * 40
    assert judge([31] * 9 + [20] * 40, [30] * 49).passed
    assert not judge([31] * 9 + [20] * 40, [30] * 49, prompts=prompts(9) + often).passed


def test_a_drafter_worse_on_general_answers_fails() -> None:
    assert judge([20] * 10, [30] * 10, general=answers([34] * 4)).reason == "worse on general answers"
    assert judge([20] * 10, [30] * 10, general=answers([33] * 4)).passed
    # 10 % worse than the drafter in use, again and again, would be much worse than the first drafter
    assert judge([20] * 10, [30] * 10, first_general=2.3).reason == "worse on general answers"


def test_the_first_drafter_has_to_be_worth_it() -> None:
    assert judge([50] * 10, [60] * 10, least=1.3).reason == "less than 1.3 times as good"
    assert judge([40] * 10, [60] * 10, least=1.3).passed
    assert judge([40] * 10, [60] * 10, least=1.3).in_use_tau == 1.0


def test_the_chance_is_that_of_all_signs() -> None:
    draw = np.random.default_rng(0)
    for count in range(9):
        saved = draw.integers(-4, 5, count)
        signed = [int(np.dot(signs, saved)) for signs in itertools.product((-1, 1), repeat=count)]
        assert chance_of(saved) == np.mean([total >= saved.sum() for total in signed])


def test_all_attempts_together_have_the_chance_once() -> None:
    assert sum(map(level, range(1, 10**5))) == pytest.approx(CHANCE, rel=1e-4)
    assert [min(n for n in range(99) if enough(n, attempt)) for attempt in (1, 2, 3, 8)] == [7, 8, 9, 12]
    assert judge([20] * 8, [30] * 8, attempt=2).passed
    assert judge([20] * 8, [30] * 8, attempt=3).reason == "8 held-out prompts are too few"


ATTEMPTS = 8
NOISE: dict[str, tuple[float, float, float]] = {
    "steps of whole answers": (20, 10, 0),
    "drafters that hardly differ": (29.5, 0.5, 0),
    "one prompt asked often": (20, 10, 40),
    "drafters of one run": (37, 3, 0),
}
"""Mean steps of a prompt: a common part and one of each drafter; additional requests with the first prompt."""


def promoted(trials: int, prompts_asked: int, noise: str, gain: float = 0.0) -> int:
    """Trials in which a candidate of a run passes. Each candidate saves `gain` of the current drafter's steps, on the
    same answers."""
    draw, passed = np.random.default_rng(7), 0
    common, own, often = NOISE[noise]
    times = np.ones(prompts_asked, np.int64)
    times[0] += int(often)
    for _ in range(trials):
        shared = draw.poisson(common * times)
        in_use = shared + draw.poisson(own * times)
        for attempt in range(1, ATTEMPTS + 1):
            candidate = shared + draw.poisson((own - gain * (common + own)) * times)
            if judge((1 + candidate).tolist(), (1 + in_use).tolist(), attempt=attempt).passed:
                passed += 1
                break
    return passed


TRIALS = 500
MOST = stats.binom.isf(1e-4, TRIALS, CHANCE)
"""The chance of more passing trials is below 1e-4 if the gate is as strict as declared."""


@pytest.mark.slow
@pytest.mark.parametrize("prompts_asked", [6, 8, 16])
@pytest.mark.parametrize("noise", NOISE)
def test_candidates_that_are_no_better_seldom_pass(prompts_asked: int, noise: str) -> None:
    assert promoted(TRIALS, prompts_asked, noise) <= MOST


@pytest.mark.slow
def test_uncorrected_attempts_would_be_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "level", lambda attempt: CHANCE)
    assert promoted(TRIALS, 8, "steps of whole answers") > MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "prompts_asked", "gain"),
    [
        ("steps of whole answers", 10, 0.2),
        ("steps of whole answers", 32, 0.1),
        ("drafters of one run", 10, 0.07),
        ("drafters of one run", 16, 0.05),
    ],
)
def test_better_candidates_pass(noise: str, prompts_asked: int, gain: float) -> None:
    assert promoted(100, prompts_asked, noise, gain) >= 80


@pytest.mark.parametrize("kind", [*KINDS, "deer in three steps"])
def test_following_equals_serving(kind: str, target: TargetModel, tmp_path: Path) -> None:
    """It gives the same steps, accepted tokens and confidences as the folder's drafter in a server."""
    kind, _, more = kind.partition(" ")
    model = drafter_of(kind, target, tmp_path)
    draw, layers = torch.Generator().manual_seed(2), model.config.target_layers
    texts = [(model.vocab[torch.randint(3, (60,), generator=draw)].tolist(), 6) for _ in range(3)]
    held = sequence_features(target, texts, layers, 8)
    gamma, steps = model.config.gamma, 3 if more else 0
    served = registry.make(
        kind, make_target(target.config, target.embedding, target.head), gamma=gamma, checkpoint=str(tmp_path),
        denoising_steps=steps,
    )  # fmt: skip
    followed = following(model, target, held, schedule_of(kind, gamma, steps))
    runs = set()
    for s, one in zip(held, followed, strict=True):
        accepted, confidence = decode_along(served, s)
        assert one.accepted.tolist() == accepted
        assert one.tokens == len(s.tokens) - 1 - s.prompt
        assert one.confidence.shape == (one.steps, gamma)
        assert one.confidence.dtype == np.float32
        for k in range(gamma):  # tokens after a wrong one are not verified
            right = one.accepted >= k
            np.testing.assert_allclose(one.confidence[right, k], confidence.numpy()[right, k], atol=2e-3)
        assert ((one.accepted <= one.reach) & (one.reach <= gamma)).all()
        runs |= set(accepted)
    assert len(runs) > (1 if kind == "dflash2" else 2)  # it proposes all tokens, so it is right less often


def drafter_of(kind: str, target: TargetModel, folder: Path) -> TrainedModel:
    """A random drafter in `folder` that is right now and then, since it knows only three tokens."""
    args = settings(kind, target, "target")
    args.draft_vocab, args.rank, args.gamma = 3, 8, 4
    model = first_drafter(args, target, torch.arange(96.0), torch.arange(40))
    torch.manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=1.0 if weight.ndim == 1 else 0.0, std=0.3)
    networks.save(model, frozen_part(model, target).head, folder)
    return read_drafter(folder, kind, target)


def following(
    model: TrainedModel, target: TargetModel, sequences: list[Sequence], schedule: Schedule | None = None
) -> list[Followed]:
    maker = BatchMaker(model.config, model.vocab, device=torch.device("cpu"))
    return follow(drafts_of(model, frozen_part(model, target), schedule), maker, sequences, Lookups("dspark", 0))


@pytest.fixture(scope="module")
def noise(target: TargetModel) -> list[Sequence]:
    """Random answers, which a drafter can only memorise."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 96, (46,), generator=generator).tolist() for _ in range(16)]
    made = sequence_features(target, [(tokens, 6) for tokens in ids], (1, 3, 4), 8)
    return [Sequence(s.tokens, s.prompt, s.features, s.tokens[s.prompt :, None], torch.ones(40, 1)) for s in made]


@pytest.fixture(scope="module")
def held(noise: list[Sequence]) -> list[Sequence]:
    return noise[8:]


def test_a_memorising_drafter_does_not_pass(
    target: TargetModel, noise: list[Sequence], held: list[Sequence], tmp_path: Path
) -> None:
    """Judged by its training answers, it would pass."""
    torch.manual_seed(0)
    model = BlockModel(dataclasses.replace(TINY, head_dim=8))
    before = [following(model, target, part) for part in (noise[:8], held)]
    run = ReaderRun(tmp_path, model, frozen_part(model, target), Recipe(steps=10**6, lr=0.01, decay_steps=0, warmup=5))
    maker = BatchMaker(model.config, model.vocab, device=torch.device("cpu"))
    for i in range(120):
        s = noise[i % 8]
        run.update(maker.cut([s], [torch.arange(*anchor_range(s))], 4))
    trained, unseen = (following(model, target, part) for part in (noise[:8], held))
    names = prompts(8)
    assert not compare(unseen, before[1], names, GENERAL, GENERAL).passed
    assert compare(trained, before[0], names, GENERAL, GENERAL).passed
