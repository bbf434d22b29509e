"""Fuzzed requests, within and outside the API's description. None may be a 5xx or hang.

`pytest tests/server/http/test_fuzz.py --fuzz 5000` sends this many of both; the default is a few.
"""

import copy
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from metrics_page import metric
from running import Server
from schemathesis.checks import CheckFunction
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation

from outrider.server.http.requests.bounds import RANGES

SECONDS = 30
"""of an answer of two tokens"""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
OBJECT = {"type": "object"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ],
        "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "logit_bias": {"5": 1.0}, "logprobs": True,
        "top_logprobs": 2, "speculation": {"enabled": True}, "stream_options": {"include_usage": True}, "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}},
    },
    TEXT: {"prompt": ["Hello", "World"], "max_tokens": 2, "logprobs": 1, "echo": True, "seed": 1, "regex": "a+"},
    MESSAGES: {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}]},
        ],
        "max_tokens": 2, "stop_sequences": ["x"], "thinking": {"type": "disabled"}, "metadata": {"user_id": "a"},
        "output_config": {"format": {"type": "json_schema", "schema": OBJECT}}, "stream": True,
    },
    RESPONSES: {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Well"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
        ],
        "max_output_tokens": 2, "text": {"format": {"type": "json_schema", "name": "a", "schema": OBJECT}},
        "include": ["message.output_text.logprobs"], "reasoning": {"effort": "none"}, "store": False, "stream": True,
    },
    "/v1/tokenize": {"prompt": ["Hello", "World"], "add_special_tokens": False},
    "/v1/detokenize": {"tokens": [[1, 2], [3]], "skip_special_tokens": False},
}  # fmt: skip
LONGEST = {CHAT: "max_completion_tokens", TEXT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
FIXED = ["\x00", "\ud800", "9" * 400, -0.0, 1e308, [[[[[[]]]]]], {"$ref": "#"}, {"type": "nothing"}, {}, [], None]
ODD = st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20) | st.sampled_from(FIXED)
RAW = "raw:"
"""Mark before a number that Python's JSON would not write."""
POWERS = (0, 8, 16, 24, 31, 32, 53, 63, 64)
EDGES: list[Any] = [
    *(sign * (2**power + step) for power in POWERS for step in (-1, 0, 1) for sign in (1, -1)),
    *(10**400, -(10**400), 49_151, 49_152, 4095, 4096),
    *(0.0, -0.0, 0.5, 1.0, 2.0, 99.9, 100.0, math.nextafter(100, 101), math.nextafter(1, 0), math.nextafter(1, 2)),
    *(1e-3, 0.01, math.nextafter(0.01, 0), 1e-6, math.nextafter(1e-6, 0), 1e-7, 1e6, 1e7),
    *(2.0**-126, 2.0**-149, 1e-40, 1e-46, 2.0**-1022, 5e-324, 3.4028234e38, 3.5e38, -3.5e38, 1.7976931348623157e308),
    *(
        math.nan, math.inf, -math.inf, RAW + "1e400", RAW + "-1e400", RAW + "1e-400", RAW + "9" * 5000, RAW + "01",
        RAW + "1e0",
    ),
    *(True, False, None, "1", [1], {"1": 1}),
]  # fmt: skip
"""Values at and around the limits of number types and our own bounds, and some of other types."""
BOTH = (
    *("temperature", "top_p", "min_p", "top_k", "seed", "n", "max_tokens", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens_per_second"),
    *("logit_bias", "bias of", "stop_token_ids"),
)
NUMBERS: dict[str, tuple[str, ...]] = dict.fromkeys(BOTH, (CHAT, TEXT))
NUMBERS |= {"top_logprobs": (CHAT,), "max_completion_tokens": (CHAT,), "reasoning_effort": (CHAT,)}
NUMBERS |= {"logprobs": (TEXT,), "prompt": (TEXT,), "prompts": (TEXT,), "best_of": (TEXT,)}
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50}


@pytest.fixture(scope="module")
def amount(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fuzz") or 80


@pytest.fixture(scope="module")
def operations(server: Server) -> list[APIOperation]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    every = [operation.ok() for operation in schema.get_all_operations()]
    return [operation for operation in every if operation.path != "/outrider/tune"]  # it would measure for minutes


def run(strategy: st.SearchStrategy[Any], amount: int, check: Any) -> None:
    """Call `check` with as many examples; shows the first failing one unshrunk."""
    quiet = settings(
        max_examples=amount, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck], derandomize=True,
    )  # fmt: skip
    quiet(given(strategy)(check))()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", GenerationMode)
def test_described_requests(
    operations: list[APIOperation], mode: GenerationMode, request: pytest.FixtureRequest
) -> None:
    """Each answer's status, type and fields are described, and no answer is a 5xx."""
    checks: list[CheckFunction] = [
        schemathesis.checks.not_a_server_error,
        *schemathesis.checks.CHECKS.get_by_names(
            ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
        ),
    ]

    def check(case: schemathesis.Case) -> None:
        if (longest := LONGEST.get(case.operation.path)) is not None:
            case.body = brief(case.body, longest)
        case.call_and_validate(checks=checks, timeout=SECONDS)

    assert {operation.path for operation in operations} >= {CHAT, TEXT, "/v1/models", "/health", "/metrics"}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue
        few = (request.config.getoption("--fuzz") or 40) if operation.method == "post" else 3
        run(operation.as_strategy(generation_mode=mode), few // 2, check)


def brief(body: Any, longest: str) -> Any:
    """The body with a short answer, so that thousands can be sent."""
    if not isinstance(body, dict):
        return body
    short = dict(body)
    for name in (longest, "max_tokens", "max_completion_tokens", "n"):
        value = short.get(name)
        if (value is None and name == longest) or (isinstance(value, int) and value > 2):
            short[name] = 2
    return short


@pytest.mark.timeout(7200)
def test_malformed_bodies(server: Server, amount: int) -> None:
    """Parts of a valid body are exchanged, dropped, added or nested, or bytes changed; some bodies stay valid."""
    client = httpx.Client(base_url=server.url, timeout=SECONDS)

    def check(malformed: tuple[str, bytes, str]) -> None:
        path, data, content_type = malformed
        answer = client.post(path, content=data, headers={"Content-Type": content_type})
        assert answer.status_code < 500, (malformed, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], malformed

    with client:
        run(requests(), amount, check)
    assert server.status("/ready") == 200
    assert metric(server.url, "outrider_http_requests_total", status="500") == 0


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, str]:
    path = draw(st.sampled_from([*BODIES]))
    body = copy.deepcopy(BODIES[path])
    for _ in range(draw(st.integers(1, 3))):
        change(draw, body)
    if path in LONGEST:
        body = brief(body, LONGEST[path])
    data = json.dumps(body).encode("utf-8", "replace")
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=8)) + (b"" if draw(st.booleans()) else data[at:])
    elif draw(st.integers(0, 30)) == 0:
        data = b"[" * 50_000
    types = ["application/json"] * 8 + ["text/plain", "", "application/json; charset=x"]
    return path, data, draw(st.sampled_from(types))


def change(draw: st.DrawFn, body: Any) -> None:
    """Change one place of the body."""
    place = body
    while True:
        keys = [*place] if isinstance(place, dict) else [*range(len(place))]
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        inner = place[key]
        if not (isinstance(inner, (dict, list)) and inner and draw(st.booleans())):
            break
        place = inner
    how = draw(st.sampled_from(["exchange", "drop", "add", "nest"]))
    if how == "drop":
        del place[key]
    elif how == "add" and isinstance(place, dict):
        place[draw(st.text(max_size=12))] = copy.deepcopy(draw(ODD))
    else:
        place[key] = copy.deepcopy(draw(ODD)) if how == "exchange" else {"x": [inner]}


def numeric(path: str, name: str, value: Any, base: dict[str, Any]) -> bytes:
    fields = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    fields |= {"max_tokens": 2} | base
    if name == "logit_bias":
        fields["logit_bias"] = {"5": value}
    elif name == "bias of":
        fields["logit_bias"] = {str(value).removeprefix(RAW): 1}
    elif name in ("stop_token_ids", "prompt"):
        fields[name] = [value]
    elif name == "prompts":
        fields["prompt"] = [[5, value], [5]]
    else:
        fields[name] = value
        fields |= {"logprobs": True} if name == "top_logprobs" else {}
    return json.dumps(fields).replace(f'"{RAW}', "").replace(f"{RAW}", "").encode()


@pytest.mark.timeout(7200)
def test_numbers_at_the_edges(server: Server, request: pytest.FixtureRequest) -> None:
    """For every numeric field, greedy and sampled, no answer is a 5xx, and the engine continues. Without --fuzz, a
    tenth of the fields."""
    cases = [
        (path, name, value, base)
        for name, paths in NUMBERS.items()
        for path in paths
        for value in EDGES
        for base in (GREEDY, SAMPLED)
        if not (name in ("max_tokens", "max_completion_tokens") and type(value) is int and value > 64)
    ]
    random.Random(1).shuffle(cases)
    if not request.config.getoption("--fuzz"):
        cases = cases[::10]

    with httpx.Client(base_url=server.url, timeout=SECONDS) as client, ThreadPoolExecutor(8) as pool:

        def answered(case: tuple[str, str, Any, dict[str, Any]]) -> int:
            path, name, value, base = case
            sent = numeric(path, name, value, base)
            answer = client.post(path, content=sent, headers={"Content-Type": "application/json"})
            assert answer.status_code in (200, 400), (path, sent[:300], answer.text[:500])
            return answer.status_code

        seen = list(pool.map(answered, cases))
    assert {200, 400} == set(seen)
    assert server.status("/ready") == 200


@pytest.mark.timeout(7200)
def test_allowed_extremes_together(server: Server, amount: int) -> None:
    """Small divisors meet large factors."""
    draw = random.Random(2)
    ends = {name: (range_.low, range_.high) for name, range_ in RANGES.items()} | {"top_k": (1, -1, 2**31 - 1)}
    ends |= {"temperature": (0, 1e-6, 1e-5, 100), "logit_bias": ({"5": 100, "6": -100}, {"5": -100.0})}  # type: ignore[dict-item]
    ends |= {"min_tokens": (0, 2)}
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:

        def answered(fields: dict[str, Any]) -> None:
            body = {"prompt": "1 2 3 1 2 3 1 2", "max_tokens": 6, "logprobs": 1} | fields
            answer = client.post(TEXT, json=body)
            assert answer.status_code in (200, 400), (body, answer.text)
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] >= fields.get("min_tokens", 0)
                logprobs = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
                assert all(math.isfinite(value) and value <= 1e-3 for value in logprobs), (body, logprobs)

        bodies = [
            {name: draw.choice(values) for name, values in ends.items() if draw.random() < 0.6} for _ in range(amount)
        ]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(answered, bodies))
    assert server.status("/ready") == 200
