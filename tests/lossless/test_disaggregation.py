"""A prefill and a decode server together answer and draft as a single server."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import MODEL, accepted_tokens, answer_ids, complete, complete_all, tokens
from failing_parts import Failures
from metrics_page import MetricsPage, metric, until_retracted
from running import (
    HTTP,
    START_SECONDS,
    TAKES_MANY,
    ForkedServer,
    Server,
    changed,
    environment,
    free_port,
    overlaps,
    wait_until,
)
from small_target import SmallTarget

pytestmark = [pytest.mark.server, pytest.mark.skipif(overlaps(), reason="SGLang sends what overlaps from a GPU alone")]
NEEDS = "needs mooncake-transfer-engine-non-cuda and libibverbs1"
pytest.importorskip("mooncake.engine", exc_type=ImportError, reason=NEEDS)
FLAGS = ("--dtype", "float32", "--max-total-tokens", "1024", "--context-length", "1024", "--no-lookup-across")
"""Flags of `exact_server`, with shared prefixes, a smaller cache and random chunks."""
TCP = ("--disaggregation-transfer-backend", "mooncake_tcp")
PLAIN = {"max_tokens": 96, "temperature": 0}
LONG = PLAIN | {"max_tokens": 320}
"""Four of these requests fill the cache."""
SEEDED = {"max_tokens": 64, "temperature": 0.8, "top_p": 0.95, "seed": 11}
rooms = itertools.count(1)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server; `port`: the prefill server's, for transfers."""

    prefill: Server
    decode: Server
    port: int

    def send(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send to both servers as a router does; returns the decode server's answer."""
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": next(rooms)}
        first = threading.Thread(
            target=HTTP.post, args=(self.prefill.url + path,), kwargs={"json": body, "timeout": 300}
        )
        first.start()
        answer = HTTP.post(self.decode.url + path, json=body, timeout=300)
        first.join()
        return answer


@contextmanager
def started(folder: Path, *flags: str, decode: tuple[str, ...] = (), **env: str) -> Iterator[Pair]:
    """decode, env: more flags for the decode server's SGLang, and its environment."""
    port = free_port()
    role = "--disaggregation-mode"
    servers = [
        ForkedServer(
            folder / "prefill", *flags, "--", role, "prefill", *TCP, "--disaggregation-bootstrap-port", str(port),
            **TAKES_MANY | changed("any-chunks"),
        ),
        ForkedServer(folder / "decode", *flags, "--", role, "decode", *TCP, *decode, **TAKES_MANY | env),
    ]  # fmt: skip
    try:
        yield Pair(*(server.wait_until_ready() for server in servers), port)
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Failures:
    return Failures(tmp_path_factory.mktemp("failures") / "planted")


@pytest.fixture(scope="module")
def pair_server(
    tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget, failures: Failures
) -> Iterator[Pair]:
    """The small target; its model drafts where lookup finds no match, and every draft is verified."""
    flags = (*FLAGS, *small_target.flags())
    more = ("--num-reserved-decode-tokens", "16")  # room needed in the cache for a new request
    folder, flags = tmp_path_factory.mktemp("pair"), (*flags, "--planner", "verify-all")
    with started(folder, *flags, decode=more, **failures.environment) as pair:
        yield pair


def outcomes(answers: list[dict[str, Any]]) -> list[tuple[list[int], int, int]]:
    """Tokens, accepted and rejected drafts of each answer."""
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    drafts = [(each["accepted_prediction_tokens"], each["rejected_prediction_tokens"]) for each in details]
    return [(tokens(answer), *each) for answer, each in zip(answers, drafts, strict=True)]


def test_greedy_answers_equal_a_single_servers(pair_server: Pair, exact_server: Server, prompts: list[str]) -> None:
    """Requests run one at a time, so that rounding is equal."""
    wanted, found = (
        outcomes(complete_all(each, prompts[:12], 1, speculate=True, **PLAIN)) for each in (exact_server, pair_server)
    )
    assert found == wanted
    assert sum(accepted for _, accepted, _ in found) > 100
    assert accepted_tokens(pair_server.prefill) == 0


@pytest.mark.parametrize(("body", "first"), [(PLAIN, 0), (SEEDED, 20)], ids=["greedy", "seeded"])
def test_long_prompts(
    pair_server: Pair, exact_server: Server, prompts: list[str], body: dict[str, Any], first: int
) -> None:
    """Drafts also equal those of a single server that read the prompts in other chunks."""
    page, body = MetricsPage(pair_server.prefill.url), body | {"speculate": True}
    long = [" ".join(prompts[at : at + 9]) for at in range(first, first + 4)]
    wanted, found = (complete_all(each, long, 1, **body) for each in (exact_server, pair_server))
    assert outcomes(found) == outcomes(wanted)
    assert answer_ids(pair_server, long, 4, **body) == [tokens(answer) for answer in wanted]
    chunks = "outrider_prefill_chunk_tokens_count"
    assert MetricsPage(pair_server.prefill.url).value(chunks) - page.value(chunks) > 6 * len(long)


def test_many_at_once_in_a_cache_too_small(pair_server: Pair, exact_server: Server, prompts: list[str]) -> None:
    """Some requests are retracted with their draft state; a repeated prompt is cached."""
    plain, drafted = (complete_all(exact_server, prompts[:12], 6, speculate=each, **LONG) for each in (False, True))
    assert [tokens(answer) for answer in drafted] == [tokens(answer) for answer in plain]
    for speculate, wanted in ((True, drafted), (False, plain)):

        def ask(speculate: bool = speculate, wanted: list[dict[str, Any]] = wanted) -> None:
            answers = complete_all(pair_server, prompts[:12], 12, speculate=speculate, **LONG)
            assert outcomes(answers) == outcomes(wanted)

        until_retracted(pair_server.decode.url, ask)
    assert metric(pair_server.prefill.url, "sglang:cached_tokens_total") > 0


@pytest.mark.parametrize(("call", "place"), [("_keep_state", "before"), ("_restore_state", "after")])
def test_no_text_changes_where_draft_state_is_lost(
    pair_server: Pair, exact_server: Server, failures: Failures, prompts: list[str], call: str, place: str
) -> None:
    plain = answer_ids(exact_server, prompts[:12], 6, speculate=False, **LONG)

    def use() -> None:
        assert answer_ids(pair_server, prompts[:12], 12, speculate=True, **LONG) == plain

    retracting = partial(until_retracted, pair_server.decode.url, use)
    failures.of_each(pair_server.decode, [f"drafting:{call}"], retracting, [place])


def test_a_seed_draws_the_same(pair_server: Pair, exact_server: Server, prompts: list[str]) -> None:
    wanted = answer_ids(exact_server, prompts[:12], 6, speculate=False, **SEEDED)
    assert answer_ids(pair_server, prompts[:12], 6, speculate=True, **SEEDED) == wanted


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"regex": "[a-z]{3,12}( [a-z]{3,12}){2,9}"},
        {"logit_bias": {"40": 4.0}, "min_tokens": 30},
        {"stop": ["e", "the"]},
        {"logprobs": 3},
        {"max_tokens": 1},
    ],
    ids=lambda rules: "+".join(rules),
)
def test_rules_of_a_request_hold_from_the_second_token_on(
    pair_server: Pair, exact_server: Server, prompts: list[str], rules: dict[str, Any]
) -> None:
    """The decode server must count the first token, which the prefill server draws."""
    for prompt in prompts[:4]:
        wanted = complete(exact_server, prompt, speculate=True, **PLAIN | rules)["choices"][0]
        answer = complete(pair_server, prompt, speculate=True, **PLAIN | rules)["choices"][0]
        probabilities = [each.pop("logprobs") or {} for each in (answer, wanted)]
        assert answer == wanted
        ours, theirs = (each.get("token_logprobs", []) for each in probabilities)
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_streams_and_several_prompts(pair_server: Pair, exact_server: Server, prompts: list[str]) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompts[0]}], **PLAIN}
    wanted = HTTP.post(f"{exact_server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    lines = pair_server.send("/v1/chat/completions", body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == wanted
    two = {"model": MODEL, "prompt": prompts[:2], **PLAIN}
    alone = HTTP.post(f"{exact_server.url}/v1/completions", json=two, timeout=60).json()["choices"]
    assert pair_server.send("/v1/completions", two).json()["choices"] == alone


def test_each_side_answers_its_part(pair_server: Pair) -> None:
    for server, role in ((pair_server.prefill, "prefill"), (pair_server.decode, "decode")):
        assert server.status("/health") == server.status("/ready") == server.status("/v1/models") == 200
        assert HTTP.post(f"{server.url}/v1/tokenize", json={"prompt": "Hi"}).status_code == 200
        for path, body in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}),
        ):
            refused = HTTP.post(server.url + path, json={"model": MODEL, **body})
            assert refused.status_code == 400, refused.text
            assert f"the {role} server of two" in refused.text
    assert pair_server.send("/v1/completions", {"prompt": "Hi", "n": 2}).json()["error"]["param"] == "n"
    assert metric(pair_server.prefill.url, "sglang:kv_transfer_total_mb_count", engine_type="prefill") > 0


def test_a_prompt_that_never_arrives_delays_no_request(pair_server: Pair, prompts: list[str]) -> None:
    """The prefill server has died with the prompt; the client leaves."""
    body = {"prompt": "Hi", "bootstrap_host": "127.0.0.1", "bootstrap_port": pair_server.port}
    with pytest.raises(httpx.TimeoutException):
        HTTP.post(f"{pair_server.decode.url}/v1/completions", json=body | {"bootstrap_room": next(rooms)}, timeout=2)
    assert tokens(complete(pair_server, prompts[0], speculate=True, **PLAIN))
    wait_until(lambda: metric(pair_server.decode.url, "outrider_requests_in_flight") == 0, 30)


def test_sglangs_router_in_front(pair_server: Pair, exact_server: Server, prompts: list[str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--port", str(port)]
    command += ["--prefill", pair_server.prefill.url, str(pair_server.port), "--decode", pair_server.decode.url]
    command += ["--health-check-endpoint", "/ready", "--prometheus-port", str(free_port())]
    router = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompts[1]}], **PLAIN}
    try:
        wait_until(lambda: answers(f"{url}/v1/models"), START_SECONDS)
        through, direct = (
            HTTP.post(f"{each}/v1/chat/completions", json=body, timeout=60) for each in (url, exact_server.url)
        )
        assert through.status_code == 200, through.text
        assert through.json()["choices"] == direct.json()["choices"]
    finally:
        router.terminate()
        router.wait(30)


def answers(url: str) -> bool:
    try:
        return HTTP.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_servers_with_other_drafters_are_no_pair(
    tmp_path: Path, pair_server: Pair, small_target: SmallTarget, prompts: list[str]
) -> None:
    """The request fails at once, and the prefill server still serves its own decode server."""
    flags = (*FLAGS, *small_target.flags("ngram"), "--", "--disaggregation-mode", "decode", *TCP)
    decoding = ForkedServer(tmp_path / "log", *flags)
    try:
        unlike = Pair(pair_server.prefill, decoding.wait_until_ready(), pair_server.port)
        refused = unlike.send("/v1/completions", {"prompt": "Hi", "max_tokens": 4})
        assert refused.status_code == 500
        assert "start both with the same flags" in pair_server.prefill.output()
        assert tokens(complete(pair_server, prompts[0], speculate=True, **PLAIN))
    finally:
        decoding.kill()
