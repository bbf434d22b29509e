"""Drafters of single keys in the engine: memory, use, and roll-backs."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planning import Request, shifted, step_drafts

from outrider.drafters.dummy import FixedDrafter
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.table import parameters_of_each
from outrider.server.plugin.decode.optional.learning import WINDOW
from outrider.server.plugin.decode.optional.owner_drafters import OwnerDrafters
from outrider.server.plugin.options import RequestOptions

GAMMA = 3
RIDS: Iterator[int] = count()


class SeveralSets(FixedDrafter):
    gamma = GAMMA

    def __init__(self) -> None:
        self.sets: dict[int, str] = {}

    def reload(self, checkpoint: str, number: int = 0) -> None:
        if not (Path(checkpoint) / "config.json").is_file():
            raise ValueError(f"{checkpoint} has no drafter")
        self.sets[number] = "/".join(Path(checkpoint).parts[-3::2])

    def drop(self, number: int) -> None:
        del self.sets[number]


def learned(folder: Path, learner: str, name: str, shift: float | None = None) -> None:
    """A drafter where the learner puts one."""
    made = folder / learner / "drafters" / name
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    if shift is not None:
        (made / "calibration.json").write_text(json.dumps(shifted(shift, GAMMA).to_json()))


def request(learner: str, name: str = "", adapter: str | None = None, lora_id: str | None = None) -> Request:
    params = RequestOptions(learner=learner, learned=name, adapter=adapter).to_custom_params()
    return Request(rid=str(next(RIDS)), sampling_params=SimpleNamespace(custom_params=params), lora_id=lora_id)


@pytest.fixture
def drafter() -> SeveralSets:
    return SeveralSets()


@pytest.fixture
def keys(tmp_path: Path, drafter: SeveralSets) -> OwnerDrafters:
    for learner in "abcd":
        for name in ("0001", "0002"):
            learned(tmp_path, learner, name)
    return OwnerDrafters(tmp_path, 2, drafter)


def served_by(keys: OwnerDrafters, drafter: SeveralSets, *requests: Request) -> list[str]:
    """The owner of each request's drafting weights; "": the start's."""
    return [drafter.sets.get(int(number), "") for number in map(keys.admitted, requests)]


def test_each_key_is_drafted_by_its_own(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    reqs = [request("a", "0001"), request(""), request("b"), request("b", "0002"), request("a", "0001")]
    assert served_by(keys, drafter, *reqs) == ["a/0001", "", "", "b/0002", "a/0001"]
    numbers = [keys.admitted(req) for req in reqs]  # again, as for chunks of prompts
    assert numbers[1] == 0
    assert numbers[0] == numbers[4]
    assert len(set(numbers)) == 4


def test_an_adapters_drafter_drafts_for_that_adapter_alone(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    reqs = [request("a", "0001", adapter, lora_id) for adapter in ("x", None) for lora_id in ("x", "y", None)]
    assert served_by(keys, drafter, *reqs) == ["a/0001", "", "", "", "", "a/0001"]


def test_the_least_recently_used_goes_and_comes_back(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    for learner, there in (("a", {"a/0001"}), ("b", {"a/0001", "b/0001"}), ("a", {"a/0001", "b/0001"}),
                           ("c", {"a/0001", "c/0001"}), ("b", {"c/0001", "b/0001"})):  # fmt: skip
        req = request(learner, "0001")
        assert served_by(keys, drafter, req) == [f"{learner}/0001"]
        assert set(drafter.sets.values()) == there
        keys.finished(req)


def test_drafters_of_running_requests_stay(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    first, second, third = (request(learner, "0001") for learner in "abc")
    assert served_by(keys, drafter, first, second, third) == ["a/0001", "b/0001", ""]
    keys.finished(first)
    assert served_by(keys, drafter, third) == ["c/0001"]
    del second, third
    assert served_by(keys, drafter, request("d", "0001")) == ["d/0001"]


def test_numbers_are_never_reused_for_another_key(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    """An ended request may have left its row in the table."""
    seen: dict[int, str] = {}
    for _ in range(3):
        for learner in "abcd":
            for name in ("0001", "0002"):
                req = request(learner, name)
                number = keys.admitted(req)
                assert seen.setdefault(number, learner) == learner
                assert {n: weights[0] for n, weights in drafter.sets.items()}.items() <= seen.items()
                keys.finished(req)
        keys.drop_owner("a")


def test_requests_keep_their_drafter_and_later_ones_have_the_new(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    running = request("a", "0001")
    assert served_by(keys, drafter, running) == ["a/0001"]
    assert served_by(keys, drafter, request("a", "0002"), running) == ["a/0002", "a/0001"]
    keys.finished(running)
    assert served_by(keys, drafter, request("a", "0002")) == ["a/0002"]


def show(keys: OwnerDrafters, numbers: list[int], chances: list[float], steps: int) -> None:
    """Steps in which each request's first token is accepted with its chance."""
    rng, count = np.random.default_rng(0), len(numbers)
    for _ in range(steps):
        accepted = (rng.random(count) < chances).astype(int)
        drafts = step_drafts(np.full((count, GAMMA), 0.5), np.ones(count, int), accepted + 1, sets=np.array(numbers))
        keys.drafted(drafts)


def test_a_worse_drafter_is_rolled_back_for_its_key_alone(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    first, other = keys.admitted(request("a", "0001")), keys.admitted(request("b", "0001"))
    show(keys, [first, other], [0.9, 0.9], WINDOW)
    promoted = request("a", "0002")
    second = keys.admitted(promoted)
    show(keys, [second, other], [0.05, 0.05], 100)
    assert keys.state()["refused"] == ["a/0002"]
    assert set(drafter.sets.values()) == {"b/0001"}  # no new drafter, so no comparison
    assert served_by(keys, drafter, promoted, request("a", "0001")) == ["", "a/0001"]
    show(keys, [first], [0.0], 100)  # rolled back to, and not watched
    assert keys.state()["refused"] == ["a/0002"]


def test_mismatched_drafters_are_refused(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    assert served_by(keys, drafter, request("a", "0009"), request("a", "0009")) == ["", ""]
    assert keys.state() == {"in_use": "", "loaded": 0, "refused": ["a/0009"]}


def test_a_forgotten_key_begins_anew(keys: OwnerDrafters, drafter: SeveralSets) -> None:
    running = request("a", "0001")
    before = keys.admitted(running)
    keys.admitted(request("a", "0009"))
    keys.admitted(request("b", "0001"))
    keys.drop_owner("a")
    assert set(drafter.sets.values()) == {"b/0001"}
    assert before not in drafter.sets
    assert keys.state()["refused"] == []
    assert served_by(keys, drafter, request("a", "0001")) == ["a/0001"]


def test_each_set_has_its_calibration(keys: OwnerDrafters, tmp_path: Path) -> None:
    learned(tmp_path, "e", "0001", shift=2.0)
    numbers = [keys.admitted(req) for req in (request("e", "0001"), request(""), request("a", "0001"))]
    common, classes = shifted(-1.0, GAMMA), torch.tensor([0, 2, 5])
    confidence = torch.full((3, GAMMA), 0.5)
    tables = [keys.table(number) or common for number in numbers]
    places, (inverse, shifts) = parameters_of_each(tables, confidence, classes)
    assert shifts[places].tolist() == [[2.0] * GAMMA, [-1.0] * GAMMA, [-1.0] * GAMMA]
    assert inverse.shape == (2 * len(CLASSES), GAMMA)
    places, (_, shifts) = parameters_of_each(tables[1:2], confidence[:1], classes[1:2])
    assert shifts.shape == (len(CLASSES), GAMMA)
    assert places.tolist() == [2]
