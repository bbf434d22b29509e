"""Features of texts read together equal those of each text alone."""

from collections.abc import Callable

import pytest
import torch
from margins import assert_near
from small_target import SmallTarget
from tiny_drafters import TERMS
from transformers import AutoModelForCausalLM, Qwen2Config

from outrider.drafters.training import features
from outrider.drafters.training.target import TargetModel

BEGIN, LAYERS = [40, 300, 41, 77, 500, 90], (0, 1)
ENDS = [[12, 33, 9, 8], [12, 5, 7], [6, 2, 81, 44, 3, 7]]
TEXTS = [([*BEGIN, *end], prompt) for end, prompt in zip(ENDS, (8, 7, 9), strict=True)]


def sliding() -> TargetModel:
    """A random model whose second layer sees four tokens."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=1,
    )  # fmt: skip
    assert config.layer_types == ["full_attention", "sliding_attention"]
    return TargetModel(AutoModelForCausalLM.from_config(config).eval(), None, "sliding")


def small(small_target: SmallTarget) -> TargetModel:
    return TargetModel.load(str(small_target.folder), dtype=torch.float32)


@pytest.fixture(params=[small, lambda _: sliding()], ids=["full", "sliding"])
def target(request: pytest.FixtureRequest, small_target: SmallTarget) -> TargetModel:
    make: Callable[[SmallTarget], TargetModel] = request.param
    return make(small_target)


@pytest.mark.parametrize("at_once", [1, 12, 2048])
def test_a_common_beginning_is_read_once_a_batch(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(features, "BATCH_TOKENS", at_once)
    read: list[int] = []
    target.model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: read.append(given[0].numel()))
    made = list(features.read_texts(target, TEXTS, LAYERS, 8))
    assert read == {1: [9, 10, 12], 12: [6, 2 * 4, 12], 2048: [6, 3 * 6]}[at_once]
    together = {number: sequence for batch in made for number, sequence in batch.items()}
    for number, text in enumerate(TEXTS):
        [alone] = features.sequence_features(target, [text], LAYERS, 8)
        assert together[number].tokens.tolist() == text[0]
        assert together[number].prompt == text[1]
        assert_near(together[number].features, alone.features, TERMS)
        assert_near(together[number].top_probs, alone.top_probs, TERMS)


def test_answers_and_recurrent_states_are_never_shared(
    small_target: SmallTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small(small_target)
    assert features.shared_tokens(target, [(BEGIN, 3), (BEGIN, 4)]) == 2  # the last one says the answer
    assert features.shared_tokens(target, [([1, *BEGIN], 4), (BEGIN, 4)]) == 0
    monkeypatch.setattr(target.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    assert features.shared_tokens(target, TEXTS) == 0
