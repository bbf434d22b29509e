"""Asks a server many things at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from metrics_page import metric
from running import HTTP, Server

MODEL = "SmolLM2-135M-Instruct"


def complete(
    server: Server, prompt: str | list[int], *, speculate: bool, chat: bool = True, **body: Any
) -> dict[str, Any]:
    """The whole answer to /v1/completions, with token ids; `chat` puts a text in the model's chat format."""
    if chat and isinstance(prompt, str):
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    request = {"model": MODEL, "prompt": prompt, "return_token_ids": True, "speculation": {"enabled": speculate}}
    answer = HTTP.post(f"{server.url}/v1/completions", json=request | body, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete_all(
    server: Server, prompts: Sequence[str], concurrency: int, *, speculate: bool, **body: Any
) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: complete(server, prompt, speculate=speculate, **body), prompts))


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def accepted_tokens(server: Server) -> float:
    """Drafted tokens that the server has accepted since it started."""
    return metric(server.url, "outrider_accepted_tokens_total")
