"""Waiting choices count from their arrival until the engine has ended them."""

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.server.http.errors import ApiError
from outrider.server.http.keys import admission
from outrider.server.http.keys.metering import ChoiceTable
from outrider.server.http.keys.queue_limit import QueueLimit


class Engine:
    """An engine as seen through SGLang's tokenizer manager."""

    def __init__(self, places: int, most: int | None) -> None:
        self.waiting = 0
        self.places = places
        self.load_snapshot_reader = SimpleNamespace(read_all=self.loads)
        self.table = ChoiceTable()
        self.limit = QueueLimit(self, self.table, most)

    def loads(self) -> list[Any]:
        return [SimpleNamespace(max_running_requests=self.places, num_waiting_reqs=self.waiting)]

    def state(self, *, measuring: bool = False) -> Any:
        return SimpleNamespace(dispatched=True, output_ids=[], obj=SimpleNamespace(log_metrics=not measuring))


def refusal(engine: Engine, choices: int) -> str | None:
    """Error code for this many choices; None if they are accepted, and then end at once."""
    with admission.admitted(None) as asking:
        try:
            with engine.limit.entering():
                pass
            asking.add_choices(choices, 1)
            engine.limit.check_choices(choices)
        except ApiError as error:
            return f"{error.status} {error.code}"
    return None


def test_each_choice_takes_a_place() -> None:
    engine = Engine(places=2, most=3)
    assert [refusal(engine, choices) for choices in (1, 5, 6)] == [None, None, "400 too_many_choices"]
    with admission.admitted(None) as asking:
        asking.add_choices(2, 2)
        engine.limit.check_choices(4)
        assert engine.table.under_way == 4
        assert [refusal(engine, choices) for choices in (1, 2)] == [None, "429 queue_full"]
        engine.table.update({name: engine.state() for name in "ab"})  # as SGLang adds a prompt's choices
        for name in "cd":
            engine.table[name] = engine.state()
        assert engine.table.under_way == 4
        del engine.table["a"], engine.table["b"]
        assert engine.table.under_way == 2
        assert refusal(engine, 3) is None
    # Its client has left; the engine has not ended the rest yet.
    assert engine.table.under_way == 2
    engine.table.pop("c")
    engine.table.pop("d")
    assert (engine.table.under_way, len(engine.table.requests), engine.table) == (0, 0, {})
    assert refusal(engine, 5) is None


def test_the_schedulers_counts_are_added() -> None:
    engine = Engine(places=8, most=2)
    engine.waiting = 2
    with admission.admitted(None) as asking:
        asking.add_choices(2, 1)
        engine.limit.check_choices(2)
        assert refusal(engine, 1) == "429 queue_full"
        engine.waiting = 0
        assert refusal(engine, 1) is None


def test_our_measurements_take_places_without_a_key() -> None:
    engine = Engine(places=1, most=1)
    with admission.admitted(None) as asking:
        engine.table["m"] = engine.state(measuring=True)
        assert asking.places == 1
    assert engine.table.under_way == 1
    assert engine.table.owners == {}
    assert refusal(engine, 2) == "429 queue_full"
    del engine.table["m"]
    assert refusal(engine, 2) is None


def test_unused_states_of_sglang_are_dropped() -> None:
    """For choices without seeds, SGLang makes more states than requests."""
    engine = Engine(places=4, most=4)
    with admission.admitted(None) as asking:
        asking.add_choices(4, 1)
        engine.limit.check_choices(4)
        for name in "abcd":
            engine.table[name] = engine.state()
            engine.table[name].dispatched = False
    assert (engine.table, engine.table.under_way) == ({}, 0)


def test_without_a_limit_no_request_is_refused() -> None:
    assert refusal(Engine(places=1, most=None), 1000) is None


def test_a_name_that_is_not_there() -> None:
    table = ChoiceTable()
    assert table.pop("none", None) is None
    with pytest.raises(KeyError):
        table.pop("none")
