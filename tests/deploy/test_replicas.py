"""Two servers with SGLang's router or HAProxy in front (`deploy/replicas`)."""

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from running import HTTP, ForkedServer, Server, environment, free_port, wait_until
from small_openai import SmallServer, answer

REPLICAS = Path(__file__).parents[2] / "deploy" / "replicas"
KINDS = ("sglang-router", "haproxy")
CONVERSATIONS = 4
TURNS = 3
STORY = " ".join(
    f"{word} number {index} went to the market and bought {index} apples."
    for index, word in enumerate(("Fox", "Owl", "Bear", "Hare", "Wolf", "Crow"))
)


@pytest.fixture(scope="module")
def replica_server(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # The router needs a moment to see that it leaves.
    flags = ("--max-total-tokens", "4096", "--lame-duck-seconds", "3")
    with ForkedServer(tmp_path_factory.mktemp("replica") / "log", *flags) as started:
        yield started


@contextmanager
def balancer(kind: str, *servers: Server | SmallServer) -> Iterator[str]:
    port = free_port()
    if kind == "haproxy":
        command: list[str | Path] = ["haproxy", "-f", REPLICAS / "haproxy.cfg"]
        env = {f"SERVER_{index}": each.url.removeprefix("http://") for index, each in enumerate(servers, 1)}
        env["LISTEN"] = f"127.0.0.1:{port}"
    else:
        command = [REPLICAS / "router.sh", *(each.url for each in servers)]
        env = {"PORT": str(port), "METRICS_PORT": str(free_port()), "PYTHON": sys.executable}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment(**env), start_new_session=True, **quiet)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(url), 120)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def fronts(server: Server, replica_server: Server) -> Iterator[dict[str, str]]:
    """Addresses of the installed load balancers, by kind."""
    with contextlib.ExitStack() as stack:
        kinds = [kind for kind in KINDS if kind != "haproxy" or shutil.which("haproxy")]
        yield {kind: stack.enter_context(balancer(kind, server, replica_server)) for kind in kinds}


@pytest.fixture(params=KINDS)
def front(request: pytest.FixtureRequest, fronts: dict[str, str]) -> str:
    if request.param not in fronts:
        pytest.skip(f"needs {request.param}")
    return fronts[request.param]


def chat(url: str, model: str, messages: list[dict[str, str]], **fields: object) -> dict:
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    answer = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_conversation_stays_on_its_server(front: str, model: str) -> None:
    """Each turn is cached, though conversations alternate between two servers."""
    talks = [[{"role": "user", "content": f"Story {front[-5:]}-{index}. {STORY}"}] for index in range(CONVERSATIONS)]
    known = [0] * CONVERSATIONS
    for turn in range(TURNS):
        for index, talk in enumerate(talks):
            answer = chat(front, model, talk)
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            assert cached >= known[index], f"turn {turn} of conversation {index}"
            known[index] = usage["prompt_tokens"] - 8
            talk += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]


def test_it_answers_as_a_server_does(front: str, server: Server, model: str) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    direct, through = chat(server.url, model, messages), chat(front, model, messages)
    assert through["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]
    client = openai.OpenAI(base_url=f"{front}/v1", api_key="unused", max_retries=0)
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == direct["choices"][0]["message"]["content"]


def test_which_fields_come_through(front: str, model: str, request: pytest.FixtureRequest) -> None:
    """docs/scale.md documents them. The wrong type of a passed field is refused."""
    wrong = {"model": model, "max_tokens": 4, "speculation": "no"}
    chats = HTTP.post(f"{front}/v1/chat/completions", json=wrong | {"messages": [{"role": "user", "content": "Hi"}]})
    texts = HTTP.post(f"{front}/v1/completions", json=wrong | {"prompt": "Hi"}, timeout=60)
    assert texts.status_code == 400
    assert "speculation" in texts.text
    router = request.node.callspec.params["front"] == "sglang-router"
    assert chats.status_code == (200 if router else 400)  # sglang-router 0.3.2 drops unknown fields of a chat


async def as_told(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Acts as the message says; to die is to close the connection."""
    told = body["messages"][0]["content"].split()[0]
    if told == "die":
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
    return web.json_response({"error": told}, status=int(told)) if told.isdigit() else await answer(request, body)


@pytest.fixture(scope="module", params=KINDS)
def small_front(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, list[SmallServer]]]:
    """Kind and address of a load balancer in front of two scripted servers, and the servers."""
    if request.param == "haproxy" and not shutil.which("haproxy"):
        pytest.skip("needs haproxy")
    with SmallServer(as_told) as one, SmallServer(as_told) as two, balancer(request.param, one, two) as url:
        yield request.param, url, [one, two]


@pytest.mark.server  # the router's process title is an engine's
@pytest.mark.parametrize("told", ["die", "500", "502", "504", "429"])
def test_a_failed_request_is_not_retried_elsewhere(small_front: tuple[str, str, list[SmallServer]], told: str) -> None:
    """A request that ended one engine would end the next."""
    _, front, servers = small_front
    for number in range(4):
        before = sum(len(each.asked) for each in servers)
        body = {"model": "small", "max_tokens": 4, "messages": [{"role": "user", "content": f"{told} {number}"}]}
        status = HTTP.post(f"{front}/v1/chat/completions", json=body, timeout=60).status_code
        assert status == int(told) if told.isdigit() else status >= 500
        assert sum(len(each.asked) for each in servers) == before + 1


@pytest.mark.server
def test_haproxy_retries_refused_requests_on_the_other_server(small_front: tuple[str, str, list[SmallServer]]) -> None:
    kind, front, servers = small_front
    if kind != "haproxy":
        pytest.skip("the router cannot tell it from what failed")

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"code": "unavailable"}}, status=503)

    for server in servers:
        server.handler = refuse
        for number in range(4):
            body = {"model": "small", "max_tokens": 4, "messages": [{"role": "user", "content": f"hello {number}"}]}
            assert HTTP.post(f"{front}/v1/chat/completions", json=body, timeout=60).status_code == 200
        server.handler = as_told
    assert all(each.asked for each in servers)


def test_no_request_is_lost_when_a_server_leaves(fronts: dict[str, str], replica_server: Server, model: str) -> None:
    """The last test, as the replica ends."""
    replica_server.process.send_signal(signal.SIGTERM)
    for number in itertools.count():
        gone = replica_server.process.poll() is not None
        for front in fronts.values():
            chat(front, model, [{"role": "user", "content": f"Question {number}"}])
        if gone and number > 8:
            break
    assert replica_server.process.returncode == 0


@pytest.mark.server
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_leaves_the_server(small_front: tuple[str, str, list[SmallServer]], stream: bool) -> None:
    asked, left = threading.Event(), threading.Event()

    async def wait(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.set()
        response = web.StreamResponse()
        if stream:
            await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while request.transport is not None:
                await asyncio.sleep(0.02)
                if stream:
                    await response.write(b"data: {}\n\n")
        left.set()
        return response

    _, front, servers = small_front
    for each in servers:
        each.handler = wait
    body = {"model": "small", "stream": stream, "messages": [{"role": "user", "content": "wait"}]}
    connection = HTTPConnection(front.removeprefix("http://"))
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert asked.wait(30)
    connection.close()
    assert left.wait(30)
    for each in servers:
        each.handler = as_told
