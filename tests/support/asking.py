import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any, Protocol

import httpx
from metrics_page import metric
from running import Server

MODEL = "SmolLM2-135M-Instruct"


class Posts(Protocol):
    """A server, or two that answer together."""

    def send(self, path: str, body: dict[str, Any]) -> httpx.Response: ...


def complete(
    server: Posts, prompt: str | list[int], *, speculate: bool, chat: bool = True, **body: Any
) -> dict[str, Any]:
    """The answer to /v1/completions, with token ids; `chat` applies the model's chat format."""
    if chat and isinstance(prompt, str):
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    request = {"model": MODEL, "prompt": prompt, "return_token_ids": True, "speculation": {"enabled": speculate}}
    answer = server.send("/v1/completions", request | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete_all(
    server: Posts, prompts: Sequence[str], concurrency: int, *, speculate: bool, **body: Any
) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, speculate=speculate, **body), prompts))


def answer_ids(
    server: Posts, prompts: Sequence[str], concurrency: int, *, speculate: bool, **body: Any
) -> list[list[int]]:
    """Token ids of each answer."""
    return [tokens(answer) for answer in complete_all(server, prompts, concurrency, speculate=speculate, **body)]


def ask_as(server: Server, secret: str, prompt: str, *, speculate: bool = True, **body: Any) -> dict[str, Any]:
    """The answer of 40 tokens to a key, with the id and source of each token."""
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    request |= {"speculation": {"enabled": speculate, "trace": speculate}}
    headers = {"Authorization": f"Bearer {secret}"}
    answer = server.send("/v1/completions", request | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextmanager
def asked(server: Server, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request and leave without reading the answer."""
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    try:
        yield
    finally:
        connection.close()


@contextmanager
def unread(server: Server, path: str, body: dict[str, Any], **headers: str) -> Iterator[socket.socket]:
    """Send a request and read nothing of its answer, for which the system has little room."""
    content = json.dumps(body).encode()
    headers |= {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content))}
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        client.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + content)
        yield client


def drafts(answer: dict[str, Any]) -> Any:
    """Source and confidence of each token of an answer of `ask_as`; the details of its usage."""
    return answer["choices"][0]["speculation"]["trace"], answer["usage"]["completion_tokens_details"]


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def accepted_tokens(server: Server) -> float:
    """Drafts accepted since the server's start."""
    return metric(server.url, "outrider_accepted_tokens_total")
