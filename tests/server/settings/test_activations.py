"""`--activations auto`: measured once, then fixed."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refuses

from outrider.kernels.cpu import native
from outrider.profiles import store
from outrider.profiles.store import Profile
from outrider.scheduler.cost.step_times import Point
from outrider.server.model import target
from outrider.server.model.target import Model
from outrider.server.settings import activations, profile_lookup
from outrider.server.settings.activations import with_activations
from outrider.server.settings.settings import Settings

AUTO = Settings(model="model.gguf", device="cpu", dtype="bfloat16", drafter="ngram")
needs_kernels = pytest.mark.skipif(not native.available(), reason="blocks are multiplied by the compiled kernels")


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return target.find(None)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(activations, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "activations"


def profile_of(settings: Settings, model: Model) -> None:
    here = profile_lookup.fingerprint(settings, model)
    points = (Point(1, 1, 128.0, (0.01,)),)
    store.save(
        Profile(name="it", fingerprint=here, points=points, thorough=True, measured_at="2026", measured_how="by hand"),
        store.SHIPPED,
        None,
    )


def measuring(monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float]) -> list[str]:
    """Make measurements return these times; yields the kinds of blocks measured."""
    kinds: list[str] = []

    def measure(settings: Settings, sizes: Mapping[str, int]) -> dict[str, float]:
        kinds.append(" ".join(sorted(sizes)))
        return dict(seconds)

    monkeypatch.setattr(activations, "_measure", measure)
    return kinds


@needs_kernels
@pytest.mark.parametrize(("float_time", "choice"), [(2.0, "int8"), (1.05, "float"), (0.5, "float")])
def test_the_first_measurement_holds(
    float_time: float, choice: str, smollm2: Model, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 is chosen only if clearly faster; there is no later measurement."""
    measured = measuring(monkeypatch, {"float": float_time, "int8": 1.0})
    said: list[str] = []
    assert with_activations(AUTO, smollm2, said.append).activations == choice
    again = measuring(monkeypatch, {"float": 1.0, "int8": float_time})
    assert with_activations(AUTO, smollm2, said.append).activations == choice
    assert (measured, again) == (["Q4_1 Q8_0"], [])
    assert said[0] == said[1]
    assert f"Activations {choice}: " in said[0]


@needs_kernels
def test_other_processors_are_measured_anew(smollm2: Model, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch, {"float": 2.0, "int8": 1.0})
    with_activations(AUTO, smollm2)
    with_activations(replace(AUTO, dtype="float32"), smollm2)
    monkeypatch.setattr(activations, "cpu_name", lambda: "another")
    with_activations(AUTO, smollm2)
    assert len(measured) == len(list(kept.glob("*.json"))) == 3
    for path in kept.glob("*.json"):
        path.write_text("{")
    with_activations(AUTO, smollm2)
    with_activations(AUTO, smollm2)
    assert len(measured) == 4


@needs_kernels
def test_a_real_measurement(smollm2: Model, kept: Path) -> None:
    """Each kind counts with all bytes of its weights."""
    before = torch.get_num_threads()
    chosen = with_activations(AUTO, smollm2).activations
    assert torch.get_num_threads() == before
    [path] = kept.glob("*.json")
    written = json.loads(path.read_text())
    assert (written["dtype"], written["kinds"]) == ("bfloat16", ["Q4_1", "Q8_0"])
    assert 0.1 < written["milliseconds"]["int8"] < 1000
    assert (written["milliseconds"]["float"] >= activations.MARGIN * written["milliseconds"]["int8"]) == (
        chosen == "int8"
    )
    weights = activations.GgufWeights(Path(smollm2.path))
    sizes = activations._bytes_by_kind(smollm2)
    assert sizes == {
        kind: sum(stored.size for stored in weights.stored.values() if stored.kind == kind) for kind in ("Q4_1", "Q8_0")
    }


@needs_kernels
@pytest.mark.parametrize("measured_by", ["float", "int8"])
def test_a_shipped_profile_decides(
    measured_by: str, smollm2: Model, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measuring(monkeypatch, {"float": 1.0, "int8": 1.0})
    profile_of(replace(AUTO, activations=measured_by), smollm2)
    assert with_activations(replace(AUTO, model=None), smollm2).activations == measured_by
    assert not measured
    with_activations(replace(AUTO, dtype="float32"), smollm2)
    monkeypatch.setattr(activations, "cpu_name", lambda: "another")
    with_activations(AUTO, smollm2)
    assert len(measured) == 2


@needs_kernels
def test_checkpoints_in_groups_are_measured(kept: Path) -> None:
    config = {"hidden_size": 256, "intermediate_size": 128, "quantization_config": {"group_size": 64}}
    assert with_activations(AUTO, Model("it", "it", config, None)).activations in ("float", "int8")
    [path] = kept.glob("*.json")
    assert json.loads(path.read_text())["kinds"] == ["GROUPS_64"]


def test_without_integer_products_auto_is_float(smollm2: Model, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requesting int8 is refused with the reason."""
    plain = replace(smollm2, folder=None)
    ranks = ("--tp-size", "2")
    cases: list[tuple[Settings, Model, str]] = [
        (AUTO, plain, f"{smollm2.name} has none"),
        (replace(AUTO, quantization="int8"), smollm2, "--quantization int8 rounds activations as well"),
        (replace(AUTO, sglang_flags=ranks), smollm2, "over several ranks"),
    ]
    if not native.available():
        cases = []
    for settings, model, reason in cases:
        assert with_activations(settings, model).activations == "float"
        refuses(reason, with_activations, replace(settings, activations="int8"), model)
    monkeypatch.setattr(activations.native, "available", lambda: False)
    assert with_activations(AUTO, smollm2).activations == "float"
    refuses("compiled kernels", with_activations, replace(AUTO, activations="int8"), smollm2)
    assert not kept.exists()


@needs_kernels
def test_a_choice_that_cannot_be_stored_is_refused(
    smollm2: Model, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(activations, "cache_root", lambda: tmp_path / "file")
    refuses("name float or int8", with_activations, AUTO, smollm2)


def test_the_fingerprint_depends_on_the_activations(smollm2: Model) -> None:
    types = [profile_lookup.fingerprint(replace(AUTO, activations=name), smollm2).dtype for name in ("float", "int8")]
    assert types == ["bfloat16", "bfloat16+int8 activations"]
