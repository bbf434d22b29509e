"""Token counters: no window exceeds its limit, in any interleaving."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.http.errors import ApiError
from outrider.server.http.keys.access import KeyUsage
from outrider.server.http.keys.admission import RequestAdmission
from outrider.server.http.keys.key_file import Key, RequestRate
from outrider.server.http.keys.token_limits import DAY_SECONDS, MINUTE_SECONDS, DayCount, ServerClock, TokenWindow

MIDNIGHT = 20000 * DAY_SECONDS


@dataclass
class Time:
    """Seconds since 1970; the test advances it."""

    now: float = MIDNIGHT + 3600.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Choice:
    """The needed fields of SGLang's state of a choice."""

    dispatched: bool = True
    output_ids: list[int] = field(default_factory=list)


def key_usage_of(time: Time | None = None, **limits: Any) -> KeyUsage:
    return KeyUsage(Key(name="k", digest=b"", **limits), time or Time())


def today(key_usage: KeyUsage) -> int:
    """Tokens taken today."""
    return key_usage.day.taken(key_usage.clock())


def begun(key_usage: KeyUsage) -> RequestAdmission:
    key_usage.begin()
    return RequestAdmission(key_usage)


def refused(call: Any, *arguments: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        call(*arguments)
    return raised.value


def test_tokens_count_for_a_minute() -> None:
    window = TokenWindow()
    first = window.take(60, 0.0)
    window.take(30, 20.0)
    assert window.taken(59.9) == 90
    assert window.wait(10, 100, 59.9) == 0
    assert window.wait(11, 100, 30.0) == pytest.approx(30.0)  # the first have expired
    assert window.wait(71, 100, 30.0) == pytest.approx(50.0)
    assert window.wait(101, 100, 30.0) == math.inf
    assert window.reset(30.0) == pytest.approx(50.0)
    window.give_back(first, 50, 40.0)
    assert window.taken(40.0) == 40
    assert window.taken(60.0) == 30
    window.give_back(first, 10, 61.0)
    assert window.taken(61.0) == 30
    assert window.taken(80.0) == 0
    assert window.reset(80.0) == 0


def test_a_day_ends_at_midnight() -> None:
    count = DayCount()
    grant = count.take(80, MIDNIGHT - 100.0)
    assert count.wait(20, 100, MIDNIGHT - 50.0) == 0
    assert count.wait(21, 100, MIDNIGHT - 50.0) == 50
    assert count.taken(MIDNIGHT) == 0
    count.take(5, MIDNIGHT)
    count.give_back(grant, 70, MIDNIGHT + 1)
    assert count.taken(MIDNIGHT + 1) == 5


def test_no_jump_of_the_wall_clock_begins_a_day() -> None:
    wall, monotonic = [MIDNIGHT - 10.0], [500.0]
    clock = ServerClock(lambda: wall[0], lambda: monotonic[0])
    count = DayCount()
    count.take(100, clock())
    wall[0] += 400 * DAY_SECONDS
    assert count.taken(clock()) == 100
    monotonic[0] += 9
    assert count.taken(clock()) == 100
    monotonic[0] += 2
    assert count.taken(clock()) == 0


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 90),  # seconds since the previous one
        st.integers(1, 60),  # tokens of its prompt
        st.integers(1, 3),  # choices
        st.one_of(st.none(), st.integers(1, 60)),  # max_tokens
        st.floats(0, 1),  # share of them that it writes
        st.floats(0, 200),  # seconds that it takes
        st.booleans(),  # ends by itself; otherwise its client leaves, and the engine follows later
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=300)
@given(REQUESTS, st.integers(20, 300), st.integers(50, 900), st.one_of(st.none(), st.integers(10, 300)))
def test_concurrent_requests_never_exceed_a_window(
    requests: list[Any], per_minute: int, per_day: int, per_request: int | None
) -> None:
    """The used tokens are counted exactly, as they are reserved in advance."""
    time = Time(MIDNIGHT - 600.0)
    limits = {"tokens_per_minute": per_minute, "tokens_per_day": per_day, "max_tokens_per_request": per_request}
    key_usage = key_usage_of(time, **limits)
    codes: set[str | None] = set()
    used: list[tuple[float, int]] = []  # times of admission, with all tokens written
    running: list[tuple[float, RequestAdmission, int, bool]] = []

    def until(moment: float) -> None:
        for ends, admission, tokens, left in sorted(running, key=lambda each: each[0]):
            if ends > moment:
                break
            time.now = max(time.now, ends)
            admission._open["id"].output_ids += range(tokens)
            admission.closed("id")
            if not left:
                admission.end()
        running[:] = [each for each in running if each[0] > moment]
        time.now = moment

    for after, prompt, choices, asked, share, seconds, leaves in requests:
        until(time.now + after)
        admission = begun(key_usage)
        try:
            admission.add_choices(choices, 1)
            answer = admission.reserve(prompt, choices, asked, 1000, None)
        except ApiError as error:
            codes.add(error.code)
            admission.end()
            continue
        assert answer is not None
        assert answer >= 1
        assert asked in (None, answer)
        written = int(share * choices * answer)
        assert per_request is None or prompt + choices * answer <= per_request
        admission.opened("id", Choice())
        used.append((time.now, prompt + written))
        running.append((time.now + seconds, admission, written, leaves))
        if leaves:
            admission.end()
    until(time.now + 1000)

    assert codes <= {"token_limit_exceeded", "request_too_many_tokens"}
    for begin, _ in used:
        within = sum(tokens for at, tokens in used if begin <= at < begin + MINUTE_SECONDS)
        assert within <= per_minute
    for day in (MIDNIGHT - DAY_SECONDS, MIDNIGHT):
        assert sum(tokens for at, tokens in used if day <= at < day + DAY_SECONDS) <= per_day
    today = time.now - time.now % DAY_SECONDS
    assert key_usage.day.taken(time.now) == sum(tokens for at, tokens in used if at >= today)
    assert key_usage.minute.taken(time.now) == key_usage.under_way == 0


def test_a_request_reserves_its_maximum_and_returns_the_rest() -> None:
    key_usage = key_usage_of(tokens_per_minute=100)
    first = begun(key_usage)
    assert first.reserve(10, 1, 60, 1000, None) == 60
    second = begun(key_usage)
    refusal = refused(second.reserve, 10, 1, 21, 1000, None)
    assert (refusal.status, refusal.code, refusal.retry_after) == (429, "token_limit_exceeded", 60)
    assert "100 tokens a minute and has 30 left; this request may take 31" in refusal.message
    assert second.reserve(10, 1, 20, 1000, None) == 20
    first.opened("a", Choice(output_ids=[1, 2, 3]))
    first.closed("a")
    assert key_usage.minute.taken(key_usage.clock()) == 100  # the answer has not ended
    first.end()
    assert key_usage.minute.taken(key_usage.clock()) == 13 + 30
    assert key_usage.under_way == 1


def test_an_aborted_answer_counts_when_the_engine_has_released_it() -> None:
    key_usage = key_usage_of(tokens_per_day=100)
    admission, seen = begun(key_usage), []
    admission.on_released.append(lambda released: seen.append(released.tokens))
    admission.reserve(10, 1, 60, 1000, None)
    state = Choice(output_ids=[1] * 5)
    admission.opened("a", state)
    admission.end()
    assert (today(key_usage), seen, key_usage.under_way) == (70, [], 0)
    state.output_ids += [1] * 3
    admission.closed("a")
    assert today(key_usage) == 18
    assert [(tokens.prompt, tokens.completion) for tokens in seen] == [(10, 8)]


def test_requests_that_never_ran_are_free() -> None:
    key_usage = key_usage_of(tokens_per_day=100)
    for waited in (False, True):
        admission = begun(key_usage)
        admission.reserve(10, 1, 60, 1000, None)
        if waited:  # in the engine's queue, beyond its time limit
            admission.opened("a", Choice())
            admission.closed("a")
            admission.never_read("a")
        admission.end()
        assert today(key_usage) == 0


def test_states_that_sglang_leaves_are_forgotten() -> None:
    key_usage = key_usage_of(tokens_per_day=100)
    for running, used in ((True, 12), (False, 24)):
        forgotten, admission = [], begun(key_usage)

        def forget(name: str, forgotten: list[str] = forgotten, admission: RequestAdmission = admission) -> None:
            forgotten.append(name)
            admission.closed(name)

        admission.forget = forget
        admission.reserve(10, 1, 60, 1000, None)
        admission.opened("left", Choice(dispatched=False))
        admission.opened("done", Choice(output_ids=[1, 2]))
        admission.closed("done")
        if running:
            admission.opened("running", Choice())
        admission.end()
        assert forgotten == ["left"]
        assert admission.places == running
        if running:
            assert today(key_usage) == 70
            admission.closed("running")
        assert (admission.places, today(key_usage)) == (0, used)


@pytest.mark.parametrize(
    ("limits", "most", "answer"),
    [
        ({}, None, None),
        ({}, 200, 190),
        ({"max_tokens_per_request": 50}, 500, 40),
        ({"tokens_per_minute": 200, "tokens_per_day": 100}, None, 90),
        ({"tokens_per_minute": 5000}, None, 300),
    ],
)
def test_without_max_tokens_the_limits_bound_an_answer(
    limits: dict[str, int], most: int | None, answer: int | None
) -> None:
    assert begun(key_usage_of(**limits)).reserve(10, 1, None, 300, most) == answer


def test_several_prompts_share_a_requests_limit() -> None:
    admission = begun(key_usage_of(max_tokens_per_request=100))
    admission.add_choices(2, 2)
    assert [admission.reserve(10, 2, None, 1000, None) for _ in range(2)] == [20, 20]


def test_a_prompt_that_is_sent_for_each_choice_counts_once() -> None:
    """With a seed SGLang gets a prompt for each choice."""
    key_usage = key_usage_of(tokens_per_day=1000)
    admission = begun(key_usage)
    admission.add_choices(3, 2)
    for _ in range(6):
        admission.reserve(10, 1, 5, 1000, None)
    assert today(key_usage) == 2 * 10 + 6 * 5


@pytest.mark.parametrize("limits", [{"max_tokens_per_request": 50}, {"tokens_per_minute": 50}, {"tokens_per_day": 50}])
def test_requests_above_the_limit_are_refused_for_good(limits: dict[str, int]) -> None:
    admission = begun(key_usage_of(**limits))
    for prompt, answer in ((10, 41), (50, None), (60, 1)):
        refusal = refused(admission.reserve, prompt, 1, answer, 1000, None)
        assert (refusal.status, refusal.code) == (400, "request_too_many_tokens")
        assert "one of key k may have 50" in refusal.message


def test_each_choice_counts() -> None:
    key_usage = key_usage_of(concurrency=4)
    first = begun(key_usage)
    first.add_choices(3, 1)
    second = begun(key_usage)
    refusal = refused(second.add_choices, 2, 1)
    assert (refusal.status, refusal.code) == (429, "concurrency_limit_exceeded")
    refusal = refused(second.add_choices, 2, 3)
    assert (refusal.status, refusal.code, refusal.param) == (400, "too_many_choices", "n")
    assert refused(key_usage.begin).status == 429
    second.end()
    first.end()
    assert key_usage.under_way == 0
    begun(key_usage).add_choices(4, 1)


def test_headers_have_what_remains() -> None:
    def remaining(what: str = "tokens") -> tuple[str, ...]:
        shown = {name.decode(): value.decode() for name, value in key_usage.headers()}
        return tuple(shown[f"x-ratelimit-{part}-{what}"] for part in ("limit", "remaining", "reset"))

    time = Time(MIDNIGHT + DAY_SECONDS - 3723.5)
    key_usage = key_usage_of(time, tokens_per_minute=100, tokens_per_day=120, rate=RequestRate(3, 3600))
    assert remaining() == ("100", "100", "0s")
    assert remaining("requests") == ("3", "3", "0s")
    key_usage.begin()
    key_usage.take(50)
    time.now += 1.5
    key_usage.take(30)
    assert remaining() == ("100", "20", "1m0s")
    assert remaining("requests") == ("3", "2", "59m59s")
    time.now += 59.25
    assert remaining() == ("120", "40", "1h1m3s")
    assert dict(key_usage_of().headers()) == {}


def test_changed_limits_keep_the_usage() -> None:
    key_usage = key_usage_of()
    key_usage.take(70)
    key_usage.change(Key(name="k", digest=b"", tokens_per_minute=100, tokens_per_day=80))
    assert refused(key_usage.take, 31).message.startswith("key k may take 100 tokens a minute and has 30 left")
    assert refused(key_usage.take, 11).message.startswith("key k may take 80 tokens a day and has 10 left")
