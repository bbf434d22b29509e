"""Requests of a LoRA adapter are planned by the outcomes of its own drafts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planned_steps import GAMMA, admit, begin, prefill, run

from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.decode.boundary import Boundary
from outrider.server.plugin.decode.optional.adapters import AdapterOutcomes
from outrider.server.plugin.decode.optional.learning import Exchange
from outrider.server.plugin.decode.optional.part import OptionalParts


def requested(lora_id):
    return SimpleNamespace(lora_id=lora_id, sampling_params=SimpleNamespace(custom_params=None))


@pytest.fixture
def planning(make, registry):
    planner, adapters = make(), AdapterOutcomes({"a": SimpleNamespace(lora_name="a")}, GAMMA, registry)
    planner.exchange = Exchange(PluginConfig(), None)
    planner.parts = OptionalParts(Boundary(), [planner.metrics, adapters, planner.exchange])
    prefill(planner, 2, 5)
    planner.requests.numbers["adapters"][[2, 5]] = [adapters.admitted(requested(each)) for each in (None, "a")]
    return planner


def step(planning, *accepted):
    admission = admit(planning, begin(planning, 2, 5))
    planning.finish(admission, torch.tensor(accepted))
    return admission


@pytest.mark.slow
def test_an_adapter_where_drafts_fail_has_a_calibration_of_its_own(planning):
    first = step(planning, GAMMA + 1, 1)
    torch.testing.assert_close(first.confidence, torch.full((2, GAMMA), 0.9))
    for _ in range(400):
        step(planning, GAMMA + 1, 1)
    last = step(planning, GAMMA + 1, 1)
    torch.testing.assert_close(last.confidence[0], torch.full((GAMMA,), 0.9))
    assert last.confidence[1, 0] < 0.3


def test_the_models_own_records_exclude_it(planning):
    for _ in range(20):
        step(planning, GAMMA + 1, 1)
    records = planning.state()["records"]
    assert records["accepted"] == [GAMMA] * 20
    assert planning.exchange.watch._weight == 20


def test_a_new_request_starts_from_its_adapters_history(planning):
    for _ in range(60):
        step(planning, GAMMA + 1, 1)
    planning.flush()
    history, generations = planning.planner.history, planning.requests.generations

    def first(row, generation, group):
        return history.read(np.array([row]), np.array([generation]), 1, np.array([group]))[0][0, 0, 0]

    confidences = [first(6, 1, group) for group in (0, 2)]  # without rules
    assert confidences == pytest.approx([first(row, generations[row], 0) for row in (2, 5)], abs=0.1)


@pytest.mark.parametrize("ruled", [False, True])
def test_requests_with_rules_are_expected_to_be_alike(make, ruled):
    """A new request's drafts are expected to fare as other requests' with rules, or without, did."""
    planning = make()
    prefill(planning, 2, 5, 3)
    planning.requests.ruled[[5, 3]] = True, ruled
    for _ in range(80):
        run(planning, 2, accepted=GAMMA + 1, confidence=0.9)
        run(planning, 5, accepted=GAMMA, confidence=0.5)
    view = begin(planning, 3).view
    survival, _ = planning.planner.history.read(view.rows, view.generations, 1, view.groups)
    assert survival[0, 0, 0] == pytest.approx(0.5 if ruled else 0.9, abs=0.05)
