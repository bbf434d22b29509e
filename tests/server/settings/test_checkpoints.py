"""The parts of the embedded model fit together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profile_samples import profile
from refusals import refuses
from tiny_drafters import DFLASH, DIFFUSION
from tiny_eagle import save_eagle

from outrider.drafters import networks, registry
from outrider.profiles import store
from outrider.profiles.fingerprint import Fingerprint
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.server.errors import UserError
from outrider.server.machine import hardware
from outrider.server.model import bundled_model, target
from outrider.server.settings import checkpoints, model_kinds, profile_lookup
from outrider.server.settings.declared import CHECKPOINT_DRAFTERS
from outrider.server.settings.settings import Settings

OF_THE_MACHINE = {"device", "cores", "threads", "dtype", "instruction_set"}


def found(**settings: Any) -> Settings:
    """Settings of the embedded model, with its drafter."""
    return checkpoints.with_drafter_path(Settings(**settings), target.find(None))


def engine_of(profile: store.Profile) -> Fingerprint:
    name = None if profile.graphs is None else bundled_model.DLLM_NAME
    model, settings = target.find(name), Settings(model=name, unmasking="threshold" if name is None else "static")
    activations = "int8" if profile.fingerprint.dtype.endswith("+int8 activations") else "float"
    settings = replace(model_kinds.with_diffusion(settings, model), activations=activations)
    settings = checkpoints.with_drafter_path(settings, model)
    return profile_lookup.fingerprint(settings, model)


def test_shipped_profiles_fit_the_embedded_models() -> None:
    """New weights need a new profile."""
    folders = [path for path in store.SHIPPED.iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        profile = store.read(folder)
        assert {text.split(":")[0] for text in profile.fingerprint.differences(engine_of(profile))} <= OF_THE_MACHINE
        if profile.graphs is not None:
            continue
        assert profile.cost().draft_seconds(1) > 0
        assert profile.calibration is not None
        assert CalibrationTable.load(profile.calibration).gamma == profile.fingerprint.gamma


def test_a_gpus_profile_from_before_drafts_by_graphs_is_refused_and_a_cpus_is_not(tmp_path, monkeypatch) -> None:
    """In revision 4, drafts took 7.7 ms on a GPU."""
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(hardware, "gpu_name", lambda: "NVIDIA H200")
    model = target.find(None)
    settings = replace(checkpoints.with_drafter_path(Settings(dtype="bfloat16"), model), activations="float")
    for device, refused in (("cuda", ["step_revision: 4, here 7"]), ("cpu", [])):
        here = profile_lookup.fingerprint(replace(settings, device=device), model)
        old = profile(device, replace(here, step_revision=4))
        assert old.fingerprint.differences(here) == refused
        store.save(old, tmp_path, None)
        assert (store.find(here, [tmp_path]) is None) == bool(refused)


def test_a_checkpoint_that_the_drafter_cannot_use_is_refused(tmp_path: Path) -> None:
    dspark = checkpoints.WEIGHTS / "smollm2-135m-instruct" / "dspark"
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for folder, message in (
        (dspark, "holds a dspark drafter; serve it with --drafter dspark"),
        (tmp_path, "is unknown"),
        (tmp_path / "none", "has no config.json"),
    ):
        refuses(message, found, drafter="dflash", drafter_path=str(folder))


def test_our_drafter_models_come_with_the_embedded_model() -> None:
    for drafter in CHECKPOINT_DRAFTERS:
        if drafter not in ("eagle3", "dflash2", "mtp"):
            path = found(drafter=drafter).drafter_path
            assert drafter in registry.serving(networks.read_config(str(path)).kind)


def test_an_eagle_head_has_to_be_named(tmp_path: Path) -> None:
    for kind in ("eagle3", "dflash2"):
        refuses(rf"no {kind} drafter for .*; train one \(outrider train {kind} --target ", found, drafter=kind)
    folder = str(save_eagle(tmp_path))
    settings = found(drafter_path=folder)
    assert (settings.drafter, settings.drafter_path) == ("eagle3", folder)
    refuses("holds an eagle3 drafter; serve it with --drafter eagle3", found, drafter="dspark", drafter_path=folder)


@pytest.mark.parametrize("drafter", ["deer", "specdiff"])
def test_diffusion_drafters_take_each_others_checkpoints(tmp_path: Path, drafter: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DIFFUSION.to_json()))
    settings = found(drafter=drafter, drafter_path=str(tmp_path))
    assert settings.drafter_path == str(tmp_path)
    with pytest.raises(UserError, match="holds a diffusion drafter; serve it with --drafter deer or specdiff"):
        found(drafter="dspark", drafter_path=str(tmp_path))


def test_a_drafter_has_a_hub_name_and_a_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DFLASH.to_json()))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    settings = found(drafter_path="z-lab/Some-DFlash")
    assert (settings.drafter, settings.drafter_path) == ("dflash", str(tmp_path))
    assert found(drafter_path=str(tmp_path)) == settings
    assert asked == ["z-lab/Some-DFlash"]


def test_a_drafter_that_the_hub_cannot_give_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuses("not in the local cache.*give --drafter-path a folder", found, drafter_path="no-such/drafter")
