"""Speculation data of answers: counts, acceptance, and each token's source."""

from typing import Any

import pytest
from metrics_page import metric
from running import Server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse, CompletionResponse
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from outrider.server.http.answers.speculation import KEY, TokenTrace, add_totals
from outrider.server.plugin.decode.optional.trace import LOOKUP, MAKERS, TARGET

REPEATING = "Say it again and again: the fox ran, the fox ran, the fox ran, the fox"
TRACE = {"speculation": {"trace": True}}


class Bytes:
    """Tokens are bytes, so that many characters have several."""

    def __init__(self) -> None:
        vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self.backend_tokenizer = Tokenizer(BPE(vocabulary, []))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend_tokenizer.decoder = decoders.ByteLevel()

    def content(self, text: str, *, ended: bool = True) -> dict[str, Any]:
        """The engine's output for an answer."""
        ids = self.backend_tokenizer.encode(text).ids
        makers = [(LOOKUP, 0.5)] * (len(ids) - 1) + [(TARGET, float("nan"))]
        meta = {KEY: makers, "finish_reason": {"type": "stop"} if ended else None}
        return {"text": text, "output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize(
    ("text", "changes", "tokens"),
    [
        ("aé☃", {}, ["a", "", "é", "", "", "☃"]),  # a character's last token has its text
        ("one two", {"text": "one "}, ["o", "n", "e", " ", "", "", ""]),  # a stop string is cut off
        ("a☃", {"text": "a�", "output_ids": slice(-1)}, ["a", "", "�"]),  # an end within a character
    ],
)
def test_each_token_has_its_text_and_source(text: str, changes: dict[str, Any], tokens: list[str]) -> None:
    tokenizer = Bytes()
    content = tokenizer.content(text)
    for name, value in changes.items():
        content[name] = content[name][value] if isinstance(value, slice) else value
    entries = TokenTrace(tokenizer).follow(content)
    assert [entry["token"] for entry in entries] == tokens
    if not changes:
        assert [entry["source"] for entry in entries] == ["lookup"] * (len(tokens) - 1) + ["target"]
        assert [entry["confidence"] for entry in entries] == [0.5] * (len(tokens) - 1) + [None]


def test_pieces_of_a_stream_together_are_the_whole() -> None:
    tokenizer = Bytes()
    trace, pieces = TokenTrace(tokenizer), []
    for length in range(1, 8):
        content = tokenizer.content("déjà vu"[:length], ended=length == 7)
        pieces.append("".join(entry["token"] for entry in trace.follow(content)))
    assert pieces == list("déjà vu")


def test_a_text_that_runs_ahead_of_whole_characters_is_sent_once() -> None:
    tokenizer, text = Bytes(), "a☃b"
    trace, pieces = TokenTrace(tokenizer), []
    for length in range(1, 6):
        shown = text.encode()[:length].decode(errors="replace")
        content = tokenizer.content(text)
        content |= {"text": shown, "output_ids": content["output_ids"][:length]}
        pieces.append("".join(entry["token"] for entry in trace.follow(content)))
    assert pieces == ["a", "�", "", "", "b"]


def test_a_token_without_a_record_has_no_entry() -> None:
    tokenizer = Bytes()
    content = tokenizer.content("déjà vu")
    content["meta_info"][KEY][2:5] = [None] * 3
    entries = TokenTrace(tokenizer).follow(content)
    assert len(entries) == len(content["output_ids"]) - 3
    assert "".join(entry["token"] for entry in entries) == "déjà vu"


def test_totals_of_several_choices_are_one_usage_and_no_acceptance() -> None:
    meta = {
        "spec_num_correct_drafts": 4,
        "spec_verify_ct": 3,
        "spec_cap_lens_histogram": [0, 1, 0, 1, 1],
        "spec_correct_drafts_histogram": [1, 0, 2],
    }
    body: dict[str, Any] = {"usage": {"completion_tokens": 14}}
    add_totals(body, [meta, meta], 4)
    details = body["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (8, 2)
    assert "metrics" not in body
    add_totals(body, [meta], 4)
    assert body["metrics"]["speculative_decoding"]["acceptance_histogram"] == [1, 0, 2, 0, 0]


def ask(server: Server, path: str = "completions", **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    (ChatCompletionResponse if path.startswith("chat") else CompletionResponse).model_validate(answer)
    return answer


def test_usage_equals_the_servers_counters(server: Server) -> None:
    names = [f"outrider_{name}_tokens_total" for name in ("accepted", "wasted")]
    before = [metric(server.url, name) for name in names]
    answer = ask(server, prompt=REPEATING, max_tokens=40, temperature=0)
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    counted = [metric(server.url, name) - old for name, old in zip(names, before, strict=True)]
    assert [details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]] == counted


def test_acceptance_as_aiperf_checks_it(server: Server) -> None:
    asked = {"prompt": REPEATING, "max_tokens": 40, "temperature": 0}
    *_, last = server.stream("completions", asked | {"stream_options": {"include_usage": True}})
    for answer in (ask(server, **asked), last):
        statistics = answer["metrics"]["speculative_decoding"]
        histogram, steps = statistics["acceptance_histogram"], statistics["num_spec_steps"]
        assert len(histogram) == statistics["num_spec_tokens"] + 1
        assert sum(histogram) == steps
        assert sum(j * count for j, count in enumerate(histogram)) == statistics["num_accepted_draft_tokens"]
        assert statistics["num_accepted_draft_tokens"] <= statistics["num_draft_tokens"]
        assert statistics["mean_acceptance_length"] == pytest.approx(39 / steps)  # prefill draws the first token
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == statistics["num_accepted_draft_tokens"]
        assert sum(details.values()) == statistics["num_draft_tokens"]


def test_without_speculation_no_drafts_are_counted(server: Server) -> None:
    answer = ask(server, prompt=REPEATING, max_tokens=8, temperature=0, speculation={"enabled": False, "trace": True})
    assert set(answer["usage"]["completion_tokens_details"].values()) == {0}
    assert {entry["source"] for entry in answer["choices"][0]["speculation"]["trace"]} == {"target"}


def test_a_trace_changes_no_token_and_names_every_one(server: Server) -> None:
    asked = {"prompt": REPEATING, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    plain, traced = ask(server, **asked), ask(server, **asked, **TRACE)
    choice = traced["choices"][0]
    assert choice["token_ids"] == plain["choices"][0]["token_ids"]
    assert "speculation" not in plain["choices"][0]
    entries = choice["speculation"]["trace"]
    assert len(entries) == len(choice["token_ids"])
    assert "".join(entry["token"] for entry in entries) == choice["text"]
    drafted = [entry for entry in entries if entry["source"] != "target"]
    assert len(drafted) == traced["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert all((entry["confidence"] is None) == (entry["source"] == "target") for entry in entries)
    assert all(0 < entry["confidence"] <= 1 for entry in drafted)


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"stop": ["again"]}, {"response_format": {"type": "json_object"}}],
    ids=["plain", "choices", "stop", "grammar"],
)
def test_the_trace_is_streamed_with_its_text(server: Server, more: dict[str, Any]) -> None:
    message = {"role": "user", "content": "Repeat three times in a row: 日本語 and again ☃."}
    asked = {"messages": [message], "max_tokens": 32, "temperature": 0} | more | TRACE
    texts, entries = {}, {}
    for chunk in server.stream("chat/completions", asked):
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content") or "")
            entries.setdefault(index, []).extend(choice.get("speculation", {}).get("trace", ()))
            told = "".join(entry["token"] for entry in entries[index])
            assert told == texts[index]
    whole = ask(server, "chat/completions", **asked)["choices"]
    assert [choice["message"]["content"] for choice in whole] == [texts[index] for index in sorted(texts)]
    for index, choice in enumerate(whole):
        trace = choice["speculation"]["trace"]
        assert len(trace) == len(entries[index])
        assert {entry["source"] for entry in trace} <= set(MAKERS)


def test_a_stream_without_trace_or_usage_is_sglangs(server: Server) -> None:
    chunks = [*server.stream("completions", {"prompt": "Hello", "max_tokens": 4})]
    assert all("speculation" not in chunk["choices"][0] and "metrics" not in chunk for chunk in chunks)


@pytest.mark.parametrize("enabled", [False, True])
def test_an_answer_may_fill_the_cache(server: Server, enabled: bool) -> None:
    """There is no room for another step's drafts."""
    body = {"prompt": [100 + number % 400 for number in range(4040)], "ignore_eos": True, "temperature": 0}
    answer = server.post("completions", body | {"max_tokens": 4096 - 4040, "speculation": {"enabled": enabled}})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 20 <= answer["usage"]["completion_tokens"] <= 56
