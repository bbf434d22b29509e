"""The engine's part in learning: answers, promotions, roll-backs."""

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planning import Request
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.drafters.dummy import FixedDrafter
from outrider.drafters.learning.answers import AnswerReader, AnswerStore
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.decode.boundary import Boundary
from outrider.server.plugin.decode.optional.learning import (
    OPEN_STORES,
    WATCHED,
    WINDOW,
    AnswerKeeper,
    DrafterWatch,
    Exchange,
    OwnerStores,
)
from outrider.server.plugin.decode.optional.part import OptionalParts
from outrider.server.plugin.decode.requests import RequestTable
from outrider.server.plugin.options import RequestOptions

MODEL, LOOKUP = 0, 1


def show(watch: DrafterWatch, steps: int, chance: float, seed: int = 0, source: int = MODEL, verified: int = 1) -> int:
    """Steps of four requests, with this chance of the first token, until the verdict "worse"."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        accepted = verified * (rng.random(4) < chance)
        watch.observe(
            np.full((4, 3), chance), np.full(4, source), np.full(4, 3), np.full(4, verified), accepted.astype(int) + 1
        )
        if watch.worse:
            return step + 1
    return steps + 1


def watching(chance: float) -> DrafterWatch:
    watch = DrafterWatch()
    show(watch, 2 * WINDOW, chance)
    watch.exchanged()
    return watch


@pytest.mark.parametrize(
    ("chance", "verified", "seeds", "most"), [(0.05, 1, 1, 10), (0.55, 1, 10, 200), (0.1, 0, 1, 20)],
    ids=["broken", "clearly worse", "unverified drafts count by their confidence"],
)  # fmt: skip
def test_a_worse_drafter_is_detected_within_a_few_steps(chance: float, verified: int, seeds: int, most: int) -> None:
    for seed in range(seeds):
        assert show(watching(0.8), most, chance, seed, verified=verified) <= most


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.75, 0.8, 0.9])
def test_a_drafter_as_good_or_better_is_left_alone(chance: float) -> None:
    """In all of 40 trials, each of which fails with a chance far below one in 40."""
    assert all(show(watching(0.8), WATCHED, chance, seed) > WATCHED for seed in range(40))


def test_lookups_do_not_count_for_the_drafter() -> None:
    watch = watching(0.8)
    assert show(watch, 100, 0.0, source=LOOKUP) == 101
    assert show(watch, 50, 0.05) <= 10


def test_a_drafter_is_no_longer_watched_after_a_while() -> None:
    watch = watching(0.8)
    show(watch, WATCHED, 0.9)
    assert show(watch, 100, 0.0) == 101


class Reloading(FixedDrafter):
    def __init__(self) -> None:
        self.folder, self.gone = "start", "bad"

    def reload(self, checkpoint: str) -> None:
        if checkpoint == self.gone:
            raise ValueError("it has another shape")
        self.folder = checkpoint


def test_exchange_and_back() -> None:
    drafter = Reloading()
    exchange = Exchange(PluginConfig(drafter_path="start"), drafter)
    assert exchange.take("one")
    assert exchange.take("two")
    assert not exchange.take("two")
    assert not exchange.take("bad")
    assert (drafter.folder, exchange.in_use, exchange.refused) == ("two", "two", ["bad"])
    plans: list[str] = []
    exchange.replan = lambda: plans.append(exchange.in_use)
    exchange.begins()
    assert not plans
    show(exchange.watch, 100, 0.0)
    exchange.begins()
    assert (drafter.folder, exchange.in_use, exchange.refused, plans) == ("one", "one", ["bad", "two"], ["one"])
    assert exchange.take("")
    assert (drafter.folder, exchange.state()["in_use"]) == ("start", "")


def test_a_deleted_drafter_is_not_restored() -> None:
    exchange = Exchange(PluginConfig(drafter_path="start"), drafter := Reloading())
    exchange.take("one")
    exchange.take("two")
    drafter.gone = "one"
    show(exchange.watch, 100, 0.0)
    exchange.begins()
    assert (drafter.folder, exchange.in_use, exchange.refused) == ("start", "", ["one", "two"])


def test_a_server_starts_with_the_learned_drafter_if_it_fits() -> None:
    assert Exchange(PluginConfig(drafter_path="start", learned="one"), Reloading()).in_use == "one"
    assert Exchange(PluginConfig(drafter_path="start", learned="bad"), Reloading()).in_use == ""


def request(
    rid: str,
    learn: bool = True,
    reason: Any = None,
    top_k: int = 1,
    lora_id: str | None = None,
    json_schema: str | None = None,
    **options: Any,
) -> Request:
    params = RequestOptions(learn=learn, **options).to_custom_params()
    return Request(
        rid=rid, lora_id=lora_id,
        sampling_params=SamplingParams(custom_params=params, top_k=top_k, temperature=0.7, json_schema=json_schema),
        origin_input_ids=[1, 2, 3], output_ids_through_stop=[4, 5, 6], finished_reason=reason or FINISH_LENGTH(3),
        multimodal_inputs=None, to_finish=None,
    )  # fmt: skip


def keeping(store: AnswerStore) -> AnswerKeeper:
    return AnswerKeeper(lambda _: store)


def admit(keeper: AnswerKeeper, *reqs: Request) -> OptionalParts:
    """The keeper's server, with requests under way."""
    parts = OptionalParts(Boundary(), [keeper])
    parts.admitted(RequestTable(1, 1, "cpu"), [0] * len(reqs), reqs)
    return parts


def test_answers_are_stored_unless_refused_or_aborted(tmp_path: Path) -> None:
    keeper = keeping(AnswerStore(tmp_path, 10_000))
    reqs = [request("a"), request("b", learn=False), request("c", reason=FINISH_ABORT()), request("d", top_k=5)]
    reqs += [request("e", lora_id="an adapter's"), request("g", json_schema="{}"), request("f")]
    reqs[-1].multimodal_inputs = SimpleNamespace()  # images, which a drafter does not read
    parts = admit(keeper, *reqs[:2], *reqs)  # again, after a retraction
    for req in reqs:
        parts.finished(req.rid)
        parts.finished(req.rid)
    parts.save()
    kept = [json.loads(line) for path in (tmp_path / "answers").iterdir() for line in path.read_text().splitlines()]
    assert [(row["prompt_ids"], row["response_ids"], row["temperature"], row["ruled"]) for row in kept] == [
        ([1, 2, 3], [4, 5, 6], 0.0, False),
        ([1, 2, 3], [4, 5, 6], 0.7, False),
        ([1, 2, 3], [4, 5, 6], 0.0, True),
    ]


def test_an_adapters_answers_are_kept_for_its_learner_alone(tmp_path: Path) -> None:
    keeper = AnswerKeeper(OwnerStores(tmp_path, 10_000))
    model, mine = {"learner": ".", "adapter": None}, {"learner": "adapters/a", "adapter": "x"}
    for number, (lora_id, options) in enumerate(((None, model), ("x", mine), ("y", mine), ("x", model), (None, mine))):
        req = request(str(number), lora_id=lora_id, **options)
        req.origin_input_ids = [number]
        keeper.finished(req)
    keeper.save()
    kept = {
        name: [answer.prompt_ids for answer in AnswerReader(tmp_path / name).read()] for name in (".", "adapters/a")
    }
    assert kept == {".": [[0]], "adapters/a": [[1]]}


def test_the_scheduler_never_waits_for_a_store(tmp_path: Path) -> None:
    """Answers are accepted while no store can be opened, and written later in order."""
    stores, ready, opened = OwnerStores(tmp_path, 10_000), threading.Event(), []

    def store_of(learner: str) -> AnswerStore:
        assert ready.wait(10)
        opened.append(learner)
        return stores(learner)

    keeper = AnswerKeeper(store_of)
    for number in range(2 * OPEN_STORES):
        req = request(str(number), learner=f"keys/{number % (OPEN_STORES + 3)}")
        req.origin_input_ids = [number]
        keeper.finished(req)
        req.output_ids_through_stop.clear()  # SGLang may reuse the list
    assert not opened
    ready.set()
    keeper.save()
    assert len(opened) == 2 * OPEN_STORES
    for place in range(OPEN_STORES + 3):
        kept = [answer.tokens for answer in AnswerReader(tmp_path / f"keys/{place}").read()]
        assert kept == [[number, 4, 5, 6] for number in range(place, 2 * OPEN_STORES, OPEN_STORES + 3)]


def test_requests_that_end_unnoticed_are_not_held(tmp_path: Path) -> None:
    parts = admit(keeping(AnswerStore(tmp_path, 10_000)), request("gone"))
    assert not list(parts._running)


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_failed_writes_are_logged_once_and_harmless(
    error: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, numbers = keeping(AnswerStore(tmp_path, 10_000)), itertools.count()

    def fail(*_: Any) -> None:
        raise error

    for time in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr(AnswerStore, "append", fail)
            for _ in range(3):
                keeper.finished(request(str(next(numbers))))
            keeper.save()
        assert len([record for record in caplog.records if "cannot be kept" in record.message]) == time
        keeper.finished(request(str(next(numbers))))
        keeper.save()
    assert len(AnswerReader(tmp_path).read()) == 2
