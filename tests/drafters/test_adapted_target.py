"""The trainer's target with a LoRA adapter equals the model with merged weights."""

from pathlib import Path

import pytest
import torch
from adapters import merged, write_adapter
from margins import assert_near
from small_target import SmallTarget
from tiny_drafters import TERMS, save_target

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.drafters.training.decode import decode
from outrider.drafters.training.features import sequence_features
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel

TEXT, LAYERS = [40, 300, 41, 77, 500, 90, 12, 33], (0, 1)


@pytest.fixture
def target(small_target: SmallTarget) -> TargetModel:
    return TargetModel.load(str(small_target.folder), dtype=torch.float32)


def features(target: TargetModel) -> Sequence:
    return sequence_features(target, [(TEXT, 3)], LAYERS, 8)[0]


def greedy(target: TargetModel) -> list[int]:
    (text,) = decode(target, [TEXT], [0.0], max_new_tokens=24, stop_ids=set(), seeds=[0])
    return text.ids


@pytest.mark.parametrize("about", [{"rank": 4}, {"rank": 7, "use_rslora": True, "lora_alpha": 5.3}])
def test_it_equals_the_merged_model(
    target: TargetModel, small_target: SmallTarget, tmp_path: Path, about: dict[str, float]
) -> None:
    folder = write_adapter(tmp_path / "sql", small_target.model, 1, strength=1.0, **about)
    before, said = features(target), greedy(target)
    exact = TargetModel(merged(small_target.folder, folder), target.tokenizer, target.path)
    with target.adapted(AdapterFolder.open(folder)):
        states = features(target)
        assert greedy(target) == greedy(exact) != said
    wanted = features(exact)
    assert_near(states.features, wanted.features, TERMS)
    assert_near(states.top_probs, wanted.top_probs, TERMS)
    assert float((states.features - before.features).abs().max()) > float(before.features.std())
    after = features(target)
    assert torch.equal(after.features, before.features)
    assert torch.equal(after.top_probs, before.top_probs)
    assert greedy(target) == said


def test_another_models_adapter_is_refused(target: TargetModel, small_target: SmallTarget, tmp_path: Path) -> None:
    other = TargetModel.load(str(save_target(tmp_path / "other")))
    folder = AdapterFolder.open(write_adapter(tmp_path / "sql", other.model, 1))
    with pytest.raises(ValueError, match="adapter"), target.adapted(folder):
        pass
    before = features(target)
    assert not target.has_adapter
    assert torch.equal(features(TargetModel.load(target.path, dtype=torch.float32)).features, before.features)
