"""Drafter and planner from the plugin's configuration."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from profile_samples import profile
from sglang.srt.runtime_context import get_parallel
from tiny_drafters import DIFFUSION, TINY, make_diffusion, make_model

from outrider.drafters.block.checkpoint import save_compact
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.diffusion.drafter import DiffusionDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.wrappers import DeferredObserve, Initialised
from outrider.profiles import store
from outrider.scheduler.baselines import Synchronous, Threshold, VerifyAll
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.planner import Asynchronous
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.loading.drafter import load_drafter
from outrider.server.plugin.loading.from_profile import CALIBRATION, load_plan

PADDED = 104
"""Rows of the target's weights; SGLang pads the vocabulary."""


class Llama:
    def __init__(self) -> None:
        self.model = SimpleNamespace(embed_tokens=torch.nn.Embedding(PADDED, TINY.hidden_size))
        self.lm_head = torch.nn.Linear(TINY.hidden_size, PADDED, bias=False)
        self.captured: list[int] = []

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.captured = layers


class OtherModel:
    """Keeps its weights elsewhere and returns no hidden states."""


def runner(model: object) -> SimpleNamespace:
    config = SimpleNamespace(model_type="llama", hidden_size=32, num_hidden_layers=6, vocab_size=TINY.vocab_size)
    model_config = SimpleNamespace(hf_text_config=config)
    return SimpleNamespace(model=model, model_config=model_config, dtype=torch.float32, device="cpu")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        yield


def test_a_block_drafter_is_joined_to_the_target(tmp_path: Path) -> None:
    save_compact(make_model(TINY), tmp_path)
    model = Llama()
    config = PluginConfig(drafter="dspark", gamma=3, drafter_path=str(tmp_path))
    deferred = load_drafter(config, runner(model))
    assert isinstance(deferred, DeferredObserve)
    drafter = deferred.model
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.gamma, drafter.dtype) == (3, torch.float32)
    assert model.captured == list(TINY.target_layers)
    weights = (model.model.embed_tokens.weight, drafter.embedding), (model.lm_head.weight, drafter.head)
    for theirs, ours in weights:
        assert ours.shape == (TINY.vocab_size, TINY.hidden_size)
        assert ours.data_ptr() == theirs.data_ptr()
    beside = load_drafter(replace(config, lookup_gamma=9), runner(model))
    assert isinstance(beside, LookupFirst)
    assert beside.gamma == 9


@pytest.mark.parametrize("drafter", ["deer", "specdiff"])
def test_a_diffusion_drafter_needs_no_hidden_states(tmp_path: Path, drafter: str) -> None:
    save_compact(make_diffusion(DIFFUSION), tmp_path)
    weights = Llama()
    silent = SimpleNamespace(model=weights.model, lm_head=weights.lm_head)
    config = PluginConfig(drafter=drafter, gamma=3, drafter_path=str(tmp_path))
    made = load_drafter(config, runner(silent))
    assert isinstance(made, DiffusionDrafter)
    assert made.target_layers == ()
    begun = load_drafter(replace(config, initial_tokens=5), runner(silent))
    assert isinstance(begun, Initialised)
    assert begun.tokens == 5


def test_models_without_hidden_states_are_left_to_lookup(tmp_path: Path) -> None:
    silent = runner(OtherModel())
    with pytest.raises(ValueError, match="no hidden states of OtherModel to drafters; use --drafter deer, specdiff"):
        load_drafter(PluginConfig(drafter="dspark", drafter_path=str(tmp_path)), silent)
    assert isinstance(load_drafter(PluginConfig(drafter="ngram"), silent), NgramDrafter)
    assert load_drafter(PluginConfig(drafter="off"), silent) is None


def test_planners_are_made_from_the_profile(tmp_path: Path) -> None:
    store.save(profile(), tmp_path, None)
    measured = str(tmp_path / "epyc")
    for name, kind, costs in (
        ("asynchronous", Asynchronous, True),
        ("synchronous", Synchronous, True),
        ("threshold", Threshold, False),
        ("verify-all", VerifyAll, False),
    ):
        planner, _ = load_plan(PluginConfig(drafter="ngram", planner=name, profile=measured))
        assert type(planner) is kind
        assert (planner.cost is not None) == costs
    unmeasured = PluginConfig(drafter="ngram", profile=str(tmp_path / "none"))
    for config in (unmeasured, PluginConfig(drafter="off", profile=measured)):
        planner, calibration = load_plan(config)
        assert type(planner) is VerifyAll
        assert planner.cost is calibration is None


def test_a_calibration_of_another_verification_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = CalibrationTable.of({}, 3, verification="token")
    store.save(profile(), tmp_path, table.to_json())
    config = PluginConfig(drafter="ngram", profile=str(tmp_path / "epyc"))
    with caplog.at_level(logging.INFO):
        assert load_plan(replace(config, verification="token"))[1] is not None
        assert "--verification" not in caplog.text
        assert load_plan(config)[1] is not None
    assert "epyc was calibrated with --verification token, not block: `outrider tune`" in caplog.text


@pytest.mark.parametrize(("gamma", "lookup_gamma", "positions"), [(3, 0, 3), (3, 8, 7), (7, 0, 7)])
def test_a_drafter_learned_at_a_larger_gamma_serves_a_smaller_one(
    gamma: int, lookup_gamma: int, positions: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(profile(), tmp_path, CalibrationTable.of({}, 3).to_json())
    learned = CalibrationTable.of({CLASSES[0]: Calibration(tuple(range(1, 8)), method="joint")}, 7)
    (tmp_path / "0001").mkdir()
    (tmp_path / "0001" / CALIBRATION).write_text(json.dumps(learned.to_json()))
    config = PluginConfig(drafter="dspark", profile=str(tmp_path / "epyc"), gamma=gamma, lookup_gamma=lookup_gamma)
    _, table = load_plan(config, str(tmp_path / "0001"))
    assert table is not None
    assert table.by_class[0].temperatures == tuple(range(1, positions + 1))
    assert table.parameters(config.longest, torch.device("cpu"))[0].shape[1] == config.longest
    assert ("is for drafts of 7 tokens: its first 3 positions" in caplog.text) == (positions == 3)
