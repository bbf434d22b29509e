"""Servers of tiny block-diffusion models."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from metrics_page import MetricsPage
from running import HTTP, TAKES_MANY, ForkedServer, Server, overlaps
from tiny_diffusion import PROMPTS, Reference, TinyDiffusion
from transformers import AutoTokenizer

POOL = 512
FLAGS = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--served-model-name", "tiny")

ALL = ("--planner", "verify-all")
"""Verify all drafts, whatever they cost on this machine."""
OFF = {"speculation": {"enabled": False}}
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 7}


@dataclass(frozen=True)
class Served:
    """A started server, and the reference for its answers.

    threshold: of its unmasking; None: static, of `per_step` tokens.
    """

    server: Server
    reference: Reference
    tokenizer: Any
    threshold: float | None
    per_step: int = 1

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Token ids of these lengths, with different beginnings."""
        text = PROMPTS.read_text()
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [tokens[7 * i : 7 * i + length] for i, length in enumerate(lengths)]

    def exact(self, prompt: Sequence[int], count: int) -> list[int]:
        return self.reference.answer(prompt, count, threshold=self.threshold, per_step=self.per_step)

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return self.server.send("/v1/completions", {"model": "tiny"} | body)

    def ask(self, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
        body = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = self.post(body | {"return_token_ids": True, "skip_special_tokens": False} | options)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def ask_all(self, prompts: Sequence[Sequence[int]], count: int, at_once: int, **options: Any) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, count, **options), prompts))

    def live(self) -> dict[str, Any]:
        return HTTP.get(f"{self.server.url}/outrider/live", timeout=30).json()

    def cached(self) -> dict[str, int]:
        """Cache tokens that requests hold, and the cache's size."""
        return self.live()["cache"]


def serve(
    folder: Path, shape: TinyDiffusion, *flags: str, threshold: float | None, per_step: int = 1, **env: str
) -> Iterator[Served]:
    if overlaps():
        pytest.skip("SGLang does not overlap the rounds of block-diffusion models")
    model = shape.write(folder / "model")
    unmasking = ("--unmasking", "static", "--unmasking-tokens", str(per_step))
    if threshold is not None:
        unmasking = ("--unmasking", "threshold", "--unmasking-threshold", str(threshold))
    tokenizer = AutoTokenizer.from_pretrained(model)
    with ForkedServer(folder / "log", "--model", str(model), *FLAGS, *unmasking, *flags, **TAKES_MANY, **env) as server:
        yield Served(server, Reference(shape, tokenizer.mask_token_id), tokenizer, threshold, per_step)


def forwards(served: Served) -> dict[str, float]:
    page = MetricsPage(served.server.url)
    names = ("diffusion_request_forwards", "drafted_states", "accepted_states", "joined_commits")
    return {name: page.value(f"outrider_{name}_total") for name in names}


def check_spiffy(served: Served) -> None:
    """Check that Spiffy gives the same text in fewer forwards, for prompts of every length modulo the block, one and
    eight at a time, greedy and seeded. The server was started with ALL."""
    block = served.reference.shape.block_size
    prompts = served.prompts([*range(9, 9 + block)])
    count = 3 * block + 1
    for options in (GREEDY, SEEDED):
        before = forwards(served)
        expected = served.ask_all(prompts, count, 8, **OFF, **options)
        base = {name: value - before[name] for name, value in forwards(served).items()}
        assert base["drafted_states"] == 0
        before = forwards(served)
        assert served.ask_all(prompts, count, 8, **options) == expected
        assert served.ask_all(prompts[:: block // 4], count, 1, **options) == expected[:: block // 4]
        counts = {name: value - before[name] for name, value in forwards(served).items()}
        assert counts["accepted_states"] > 0
        assert counts["joined_commits"] > 0 or block > 4
        rounds = base["diffusion_request_forwards"] * (1 + 4 / block)
        assert counts["diffusion_request_forwards"] < rounds
    assert served.cached()["used"] == 0
