"""The source of each token, from a step's record to the request's data."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from outrider.scheduler.calibration.classes import CLASSES
from outrider.server.plugin.decode.boundary import Boundary
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.optional.trace import ACROSS, KEY, LOOKUP, MODEL, TARGET, StepTrace

CONFIDENCE = torch.tensor([[0.9, 0.5, 0.25], [0.75, 0.5, 0.1], [0.6, 0.2, 0.1]])
ACCEPT_LENS = torch.tensor([3, 1, 4])


def request() -> SimpleNamespace:
    return SimpleNamespace(customized_info=None)


def commit(count: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=(5,) * count)


def step(traced: list[bool], third: str = "sampled, model") -> StepTrace:
    """Drafts of three requests, the first ones from a model."""
    classes = torch.tensor([CLASSES.index(case) for case in ("greedy, model", "seeded, model", third)])
    admission = SimpleNamespace(confidence=CONFIDENCE, classes=classes)
    return StepTrace.of_step(np.array(traced), admission, ACCEPT_LENS)


@pytest.mark.parametrize(
    ("third", "last"), [("sampled, model", MODEL), ("greedy, lookup", LOOKUP), ("seeded, across", ACROSS)]
)
def test_accepted_drafts_are_the_drafters_and_the_last_token_the_targets(third: str, last: int) -> None:
    requests = [request() for _ in range(3)]
    step([True, True, True], third).consume(SimpleNamespace(reqs=requests), [commit(n) for n in (3, 1, 4)])
    made = [[maker for maker, _ in each.customized_info[KEY]] for each in requests]
    assert made == [[MODEL, MODEL, TARGET], [TARGET], [last, last, last, TARGET]]
    sure = [confidence for _, confidence in requests[0].customized_info[KEY]]
    assert sure[:2] == pytest.approx([0.9, 0.5])
    assert math.isnan(sure[2])


def test_only_committed_tokens_of_traced_requests_count() -> None:
    requests = [request() for _ in range(3)]
    # the first ends within the step, the last was retracted
    step([True, False, True]).consume(SimpleNamespace(reqs=requests), [commit(2), commit(1), None])
    assert [maker for maker, _ in requests[0].customized_info[KEY]] == [MODEL, MODEL]
    assert requests[1].customized_info is None
    assert requests[2].customized_info is None


def test_steps_follow_the_prefill_and_other_information_stays() -> None:
    asking = request()
    asking.customized_info = {KEY: []}
    StepTrace.of_first_tokens(np.array([True]), "cpu").consume(SimpleNamespace(reqs=[asking]), [commit(1)])
    step([True, False, False]).consume(SimpleNamespace(reqs=[asking, None, None]), [commit(3), None, None])
    assert [maker for maker, _ in asking.customized_info[KEY]] == [TARGET, MODEL, MODEL, TARGET]


def test_a_copy_that_fails_leaves_the_trace_on_the_device(registry: CollectorRegistry) -> None:
    metrics = SpeculationMetrics(3, "dspark", registry)
    trace = replace(step([True, True, True]), optional=Boundary(metrics.failures))
    assert trace.copy_to_host(lambda tensor: 1 / 0) is trace
    assert trace.optional.off == {"tracing"}


def test_a_step_on_a_device_is_copied_when_sglang_copies_the_rest() -> None:
    copied = []
    trace = step([True, True, True]).copy_to_host(lambda tensor: copied.append(tensor) or tensor.clone())
    assert len(copied) == 2
    assert trace.makers.shape == trace.confidence.shape == (3, 4)
