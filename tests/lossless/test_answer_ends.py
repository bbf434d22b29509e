"""An answer ends where it ends without speculation, whole and streamed.

The prompts repeat a short cycle, so prompt lookup drafts past the ends of answers and is often right.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asking import MODEL, accepted_tokens
from running import HTTP

CYCLES = (
    "Question: is it so?\nAnswer: yes.\nUser: next\n",
    "foo\nbar ### baz\n",
    "one, two, three; one, two, three.\n\n",
    "<|im_start|>user\nThe capital of France?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n",
    "a\n\n\nb ## c ### d\n\n",
    "caf\u00e9 \u96ea \U0001f600 ok. ",
)
ENDS = {
    "later in the list, earlier in the text": {"stop": ["###", "User:", "\n"]},
    "several words": {"stop": ["two, three;", "ar ###", "ext\nQ", "capital of"]},
    "more tokens than its own": {"stop": ["\n\n\n", "## ", "o. c"]},
    "trimmed of nothing": {"stop": ["User:", "three.", "###", "\n\n"], "no_stop_trim": True},
    "special tokens shown": {"stop": ["\nThe", "baz\n"], "skip_special_tokens": False},
    "stop tokens": {"stop": ["\nbar"], "stop_token_ids": [30, 42]},
    "a least length": {"stop": ["ok", "b ##", "baz"], "min_tokens": 12},
    "no end token": {"stop": ["Paris.\n", "next\n"], "ignore_eos": True},
    "its length": {"max_tokens": 7},
}
SAMPLING = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.6, "seed": 7}}


def seen(server: Any, prompt: str, *, speculate: bool, stream: bool, **body: Any) -> dict[str, Any]:
    """The parts of an answer that speculation must not change."""
    request = {"model": MODEL, "prompt": prompt, "logprobs": 2, "return_token_ids": True, "max_tokens": 32} | body
    request["speculation"] = {"enabled": speculate}
    if not stream:
        answer = HTTP.post(f"{server.url}/v1/completions", json=request, timeout=600)
        assert answer.status_code == 200, answer.text
        return summary([answer.json()["choices"][0]], answer.json()["usage"])
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=request, timeout=600) as answer:
        assert answer.status_code == 200
        text = b"".join(answer.iter_bytes()).decode()  # `iter_lines` would also break at U+2028
        lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return summary(choices, chunks[-1]["usage"])


def summary(choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "tokens": [token for choice in choices for token in choice.get("token_ids") or ()],
        "finish": choices[-1]["finish_reason"],
        "matched": choices[-1].get("matched_stop"),
        "completion_tokens": usage["completion_tokens"],
        "logprob_tokens": [token for one in logprobs for token in one["tokens"]],
        "logprobs": [value for one in logprobs for value in one["token_logprobs"]],
        "top_logprobs": len([top for one in logprobs for top in one["top_logprobs"]]),
    }


def ends_within(text: str) -> list[dict[str, Any]]:
    """Stop strings contained in this answer, the later one first."""
    middle = len(text) // 2
    first, later = text[middle : middle + 2], text[middle + 3 : middle + 6]
    return [
        {"stop": [text[middle]]},
        {"stop": [later, first]},
        {"stop": [later, first], "no_stop_trim": True},
        {"stop": [text[middle : middle + 5], first]},
        {"stop": [later], "stop_token_ids": [30, 42]},
    ]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_answers_end_as_without_speculation(exact_server, sampling, request):
    """Half of the prompts are greedy and half seeded, unless --exhaustive."""
    everything = request.config.getoption("--exhaustive")
    chosen = CYCLES if everything else CYCLES[sampling == "seeded" :: 2]
    prompts = [cycle * 6 for cycle in chosen]
    texts = [
        seen(exact_server, prompt, speculate=False, stream=False, **SAMPLING[sampling])["text"] for prompt in prompts
    ]
    asked = [
        (prompt, stream, SAMPLING[sampling] | end)
        for prompt, text in zip(prompts, texts, strict=True)
        for end in [*ENDS.values(), *ends_within(text)]
        for stream in (False, True)
    ]

    def ask(speculate: bool) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(8) as pool:
            one = lambda each: seen(exact_server, each[0], speculate=speculate, stream=each[1], **each[2])  # noqa: E731
            return list(pool.map(one, asked))

    without = ask(False)
    before = accepted_tokens(exact_server)
    drafted = ask(True)
    assert accepted_tokens(exact_server) - before > len(asked)
    for each, got, want in zip(asked, drafted, without, strict=True):
        assert got.pop("logprobs") == pytest.approx(want.pop("logprobs"), abs=1e-4), each
        assert got == want, each
    assert sum(want["finish"] == "stop" for want in without) > len(asked) / 4
