"""Each adapter's drafts are counted and calibrated separately."""

from types import SimpleNamespace

import numpy as np
import torch
from planning import step_drafts
from prometheus_client import CollectorRegistry

from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.table import CalibrationTable, parameters_of_each
from outrider.server.plugin.decode.optional.adapters import FIRST, AdapterOutcomes
from outrider.server.plugin.options import RequestOptions

GAMMA = 3
COMMON = CalibrationTable.of({CLASSES[0]: Calibration((1.0, 1.0), (0.5, -0.5))}, 2)


def admit(outcomes: AdapterOutcomes, *ids: str | None, learned: str = "") -> np.ndarray:
    options = [RequestOptions(adapter=each, learned=learned).to_custom_params() for each in ids]
    sampling = [SimpleNamespace(custom_params=params) for params in options]
    reqs = [SimpleNamespace(lora_id=each, sampling_params=one) for each, one in zip(ids, sampling, strict=True)]
    return np.array([outcomes.admitted(req) for req in reqs])


def show(outcomes: AdapterOutcomes, numbers: np.ndarray, chances: list[float], steps: int) -> None:
    """Every request drafts with confidence 0.6 per token, accepted with its chance."""
    rng, count = np.random.default_rng(0), len(numbers)
    for _ in range(steps):
        accepted = (rng.random((count, GAMMA)) < np.array(chances)[:, None]).cumprod(1).sum(1)
        raw, whole = np.full((count, GAMMA), 0.6, dtype=np.float32), np.full(count, GAMMA)
        outcomes.drafted(step_drafts(raw, whole, accepted + 1, calibration=COMMON, adapters=numbers))


def confidences(outcomes: AdapterOutcomes, numbers: np.ndarray) -> np.ndarray:
    """[R] calibrated first confidences of 0.6."""
    tables = [outcomes.table(number) or COMMON for number in numbers.tolist()]
    confidence = torch.full((len(numbers), GAMMA), 0.6)
    places, (inverse, shifts) = parameters_of_each(tables, confidence, torch.zeros(len(numbers), dtype=torch.int64))
    return torch.sigmoid(torch.logit(confidence) * inverse[places] + shifts[places])[:, 0].numpy()


def test_an_adapter_where_drafts_fail_is_known_by_its_own() -> None:
    loaded = {each: SimpleNamespace(lora_name=f"name {each}") for each in ("good", "bad")}
    registry = CollectorRegistry()
    outcomes = AdapterOutcomes(loaded, GAMMA, registry)
    numbers = admit(outcomes, "good", None, "bad", "good")
    assert numbers.tolist() == [1, 0, 2, 1]
    common = 1 / (1 + np.exp(-(np.log(1.5) + 0.5)))
    np.testing.assert_allclose(confidences(outcomes, numbers), common, rtol=1e-5)
    show(outcomes, numbers, [0.9, 0.6, 0.1, 0.9], FIRST - 1)
    np.testing.assert_allclose(confidences(outcomes, numbers)[2], common, rtol=1e-5)
    show(outcomes, numbers, [0.9, 0.6, 0.1, 0.9], 8 * FIRST)
    adapted = confidences(outcomes, numbers)
    np.testing.assert_allclose(adapted[[0, 2]], [0.9, 0.1], atol=0.2)
    assert adapted[1] == np.float32(common)
    # Classes without records equal the model's, with as many positions.
    table = outcomes.table(2)
    assert table is not None
    assert table.by_class[1] == Calibration.identity(GAMMA)
    outcomes.flush()

    def value(kind: str, name: str) -> float:
        return registry.get_sample_value(f"outrider_adapter_{kind}_tokens_total", {"adapter": f"name {name}"}) or 0.0

    steps = 9 * FIRST - 1
    assert value("drafted", "bad") == value("verified", "bad") == GAMMA * steps
    assert value("verified", "good") == 2 * GAMMA * steps
    assert value("accepted", "bad") < 0.2 * steps < value("accepted", "good")


def test_an_unloaded_adapter_is_forgotten() -> None:
    loaded = {"a": SimpleNamespace(lora_name="a")}
    outcomes = AdapterOutcomes(loaded, GAMMA, CollectorRegistry())
    numbers = admit(outcomes, "a")
    show(outcomes, numbers, [0.2], FIRST)
    assert outcomes.table(1) is not None
    del loaded["a"]
    loaded["b"] = SimpleNamespace(lora_name="a")  # a new adapter of the same name
    assert admit(outcomes, "b", "b").tolist() == [2, 2]
    assert outcomes.table(1) is outcomes.table(2) is None
    show(outcomes, numbers, [0.2], 1)  # a step from before the change


def test_a_drafter_that_has_learned_more_begins_anew() -> None:
    registry = CollectorRegistry()
    outcomes = AdapterOutcomes({"a": SimpleNamespace(lora_name="a")}, GAMMA, registry)
    numbers = admit(outcomes, "a")
    show(outcomes, numbers, [0.2], FIRST)
    later = admit(outcomes, "a", learned="0001")
    assert (numbers.tolist(), later.tolist()) == ([1], [2])
    assert outcomes.table(1) is not None
    assert outcomes.table(2) is None
    show(outcomes, later, [0.9], 1)
    outcomes.flush()
    assert registry.get_sample_value("outrider_adapter_drafted_tokens_total", {"adapter": "a"}) == GAMMA * (FIRST + 1)
