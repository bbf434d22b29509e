"""An answer does not depend on how many of its tokens come in a step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import answering
import pytest
from answering import THINK_START, WIDTH, Answering, answer, hooked, keep_nothing, tokenizer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outrider.server.plugin.hooks import answer_ends

PIECES = ("\n", "\n\n", "User", " User", ":", "Answer", " yes", ".", "###", "#", " ###", " a", "a", "aa", ">", "\u00e9")
"""Tokens that make repetitive texts, next to parts of a character, special ones and one beyond the vocabulary."""
STRINGS = (
    "\n", "\n\n", "\n\n\n", "User:", "###", "##", ":\n", " yes", "a a", "aaa", "\u00e9", "\u96ea", " \u96ea",
    "<|im_end|>",
)  # fmt: skip
PATTERNS = ("a+:", r"\n$", "User", "[.:]\n", "a{3}")
END, BEYOND = 2, 49_152


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


@pytest.fixture(scope="module", autouse=True)
def _without_a_cache() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        keep_nothing(patch)
        yield


@st.composite
def token_ids(draw: st.DrawFn) -> list[int]:
    known = [token for piece in PIECES for token in ids_of(piece)]
    parts = ids_of("\u96ea\U0001f600")
    token = st.sampled_from([*known, *known, *parts, 1, END, BEYOND])
    mixed = st.lists(
        st.one_of(token.map(lambda one: [one]), st.sampled_from([parts, *map(ids_of, STRINGS)])), max_size=14
    )
    opening = draw(st.sampled_from([[], THINK_START]))
    return [*opening, *(token for part in draw(mixed) for token in part)][:40] or [known[0]]


@st.composite
def in_runs(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    """The tokens cut at random; the prefill's first one is alone."""
    runs, at = [tokens[:1]], 1
    while at < len(tokens):
        length = draw(st.integers(1, WIDTH))
        runs.append(tokens[at : at + length])
        at += length
    return runs


REQUESTS = st.fixed_dictionaries(
    {"stream": st.booleans()},
    optional={
        "stop": st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3),
        "stop_regex": st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
        "stop_token_ids": st.sampled_from([{42}, {198, 30}]), "max_new_tokens": st.integers(1, 40),
        "min_new_tokens": st.just(1), "ignore_eos": st.just(True), "no_stop_trim": st.just(True),
        "skip_special_tokens": st.just(False), "stream_interval": st.integers(1, 4), "reasoning": st.just(True),
    },
)  # fmt: skip


def singly(tokens: list[int]) -> list[list[int]]:
    return [[token] for token in tokens]


def without_drafts(answered: answering.Answer) -> answering.Answer:
    return replace(answered, accepted=0, accepted_by_step=0)


def check(runs: list[list[int]], request: dict[str, Any], but: str | None = None) -> None:
    """but: a method that is not hooked."""
    tokens = [token for run in runs for token in run]
    expected = None if request.get("stream_interval", 1) > 1 else answer(singly(tokens), **request)
    with hooked(answer_ends.register, but):
        alone = answer(singly(tokens), **request)
        answered = answer(runs, **request)
    # SGLang may send a character twice, see `test_no_character_is_sent_twice`
    expected = expected or alone
    assert alone == expected
    assert without_drafts(answered) == expected
    # the last token is the target's own; only drafts in the answer count
    left, drafted = len(expected.ids), 0
    for run in runs:
        drafted += min(max(left, 0), len(run) - 1)
        left -= len(run)
    assert answered.accepted == answered.accepted_by_step == drafted


@settings(max_examples=200, deadline=None)
@given(st.data(), token_ids(), REQUESTS)
def test_runs_of_any_length_give_the_answer_of_single_tokens(data, tokens, request):
    """Single tokens go through unmodified SGLang. Text, ids, end, usage and logprobs are compared, whole and
    streamed."""
    check(data.draw(in_runs(tokens)), request)


HOOKS = ("finish_state", "reasoning_tokens", "self_opened_reasoning_tokens", "spec_correct_drafts_histogram")


@pytest.mark.parametrize("hook", [f"update_{name}" for name in HOOKS])
def test_without_one_of_the_hooks_some_answer_differs(hook):
    @settings(
        max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        report_multiple_bugs=False,
    )  # fmt: skip
    @given(st.data(), token_ids(), REQUESTS)
    def find(data, tokens, request):
        check(data.draw(in_runs(tokens)), request, but=hook)

    with pytest.raises(AssertionError):
        find()


A, LINE, LINES, WORD = (ids_of(text)[0] for text in ("a", "\n", "\n\n\n", " a"))
LATE = [[A], [LINE], [LINE], [LINE]]
"""Here a token is the stop string; SGLang misses three line ends, and cuts at a later one."""


@pytest.mark.parametrize(
    ("hook", "runs"),
    [
        ("stream_output", [*LATE, [WORD, LINES]]),  # text before the end, within its run
        ("accept", [*LATE, [WORD, LINE], [LINES]]),  # text before a withheld token
    ],
)
def test_a_run_is_released_as_far_as_single_tokens(hook, runs):
    request = {"stop": ["\n\n\n"], "stream": True}
    check(runs, request)
    with pytest.raises(AssertionError):
        check(runs, request, but=hook)


def test_an_unstreamed_text_is_not_sent_before_its_end():
    """SGLang sends every 50 tokens, even if they begin a stop string."""
    runs = singly([A] * 49 + ids_of("User:") + ids_of("\n"))
    assert answer(runs, stop=["User:"], stream=False).text == "a" * 49 + "User"
    with hooked(answer_ends.register):
        assert answer(runs, stop=["User:"], stream=False).text == "a" * 49


def test_no_character_is_sent_twice():
    """Runs end within a character, after a Chinese one and after a letter."""
    snow, smile = ids_of("\u96ea"), ids_of("\U0001f600")
    runs = [ids_of("\n"), [*snow, smile[0]], [*smile[1:], *ids_of("a"), snow[0]], [snow[1], *ids_of(".")]]
    sent = answer(runs, stream=True)
    assert sent.text == "\n\u96ea\u96ea\U0001f600a\u96ea."
    with hooked(answer_ends.register):
        assert answer(runs, stream=True) == replace(sent, text="\n\u96ea\U0001f600a\u96ea.")


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_grammar_ends_at_the_end_of_its_run(length):
    """The grammar has read the whole run before the first token is judged."""
    with hooked(answer_ends.register):
        answering = Answering(stream=False, stop=["###"])
        answering.request.grammar = Grammar(length)
        answering.step(ids_of("a") * 6)
    assert answering.answer.completion_tokens == length
    assert answering.answer.finish["type"] == "stop"
    assert answering.answer.accepted == length  # the run was cut to `length`: all of it was drafted


class Grammar:
    """Ends after `length` tokens of any kind."""

    def __init__(self, length: int):
        self.left, self.finished = length, False

    def accept_token(self, token: int) -> None:
        self.left -= 1

    def is_terminated(self) -> bool:
        return self.left <= 0
