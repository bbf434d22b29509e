"""One tensor-parallel engine on two nodes, on loopback."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import accepted_tokens
from metrics_page import metric
from running import ForkedServer, Server, changed, free_port, wait_until
from tiny_drafters import TINY, make_model, save_target
from transformers import LlamaForCausalLM

from outrider.drafters.block.checkpoint import save_compact
from outrider.server.processes.run_folder import PREFIX

pytestmark = pytest.mark.server
NAME = "tiny"
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 9, 9], [40, 41, 42, 43, 40, 41], list(range(30, 60))]
TOKENS = 40


@dataclass(frozen=True)
class Nodes:
    first: Server
    second: Server

    def complete(self, prompt: list[int], **body: Any) -> dict[str, Any]:
        request = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        return self.first.post("completions", request | body)["choices"][0]

    def all_tokens(self, *, speculate: bool, **body: Any) -> list[list[int]]:
        body |= {"speculation": {"enabled": speculate}}
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **body)["token_ids"], PROMPTS))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Iterator[Nodes]:
    """Only the first one has the drafter; its random numbers cut the prompts."""
    folder = tmp_path_factory.mktemp("nodes")
    save_compact(make_model(TINY), folder / "drafter")
    meeting, cut = f"127.0.0.1:{free_port()}", changed("any-chunks")

    def start(rank: int) -> Server:
        flags = ("--model", str(target), "--served-model-name", NAME, "--dtype", "float32", "--threads", "1")
        drafter = ("--drafter", "dspark", "--gamma", "4")
        if rank == 0:
            drafter += ("--drafter-path", str(folder / "drafter"))
        spread = ("--tp-size", "2", "--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", meeting)
        return ForkedServer(folder / f"log{rank}", *flags, *drafter, "--max-total-tokens", "2048", "--", *spread, **cut)

    started = Nodes(start(0), start(1))
    try:
        started.second.wait_until_ready()
        started.first.wait_until_ready()
        yield started
    finally:
        started.first.kill()
        started.second.kill()


@pytest.fixture(scope="module")
def exact(target: Path) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        context = torch.tensor([prompt])
        for _ in range(TOKENS):
            context = torch.cat([context, model(context).logits[:, -1:].argmax(-1)], 1)
        answers.append(context[0, len(prompt) :].tolist())
    return answers


def test_greedy_answers_equal_the_models_with_and_without_speculation(nodes: Nodes, exact: list[list[int]]) -> None:
    for speculate in (True, False):  # no text to look up yet: the model drafts
        assert nodes.all_tokens(speculate=speculate, temperature=0) == exact
    position = {"source": "model", "sampling": "greedy"}
    assert metric(nodes.first.url, "outrider_verified_position_total", **position) > 20


def test_greedy_answers_with_many_accepted_drafts_equal_the_models(nodes: Nodes) -> None:
    body = {"temperature": 0, "logit_bias": {"10": 100, "11": 100}}  # repeats two words for ever
    plain, before = nodes.all_tokens(speculate=False, **body), accepted_tokens(nodes.first)
    assert nodes.all_tokens(speculate=True, **body) == plain
    assert accepted_tokens(nodes.first) - before > 40
    assert {token for answer in plain for token in answer} == {10, 11}


def test_a_seed_decides_and_logprobs_and_rules_hold(nodes: Nodes) -> None:
    body = {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4, "logprobs": 2}
    assert nodes.all_tokens(speculate=True, **body) == nodes.all_tokens(speculate=False, **body)
    nodes.all_tokens(speculate=True, temperature=1.0)


def test_counts_of_the_first_rank_are_counted_once(nodes: Nodes) -> None:
    before = metric(nodes.first.url, "outrider_accepted_length_sum")
    nodes.all_tokens(speculate=True, temperature=0)
    decoded = len(PROMPTS) * (TOKENS - 1)  # prefill draws the first token of each
    wait_until(lambda: metric(nodes.first.url, "outrider_accepted_length_sum") - before >= decoded, 30)
    assert metric(nodes.first.url, "outrider_accepted_length_sum") - before == decoded


def test_the_other_node_answers_probes(nodes: Nodes) -> None:
    second = nodes.second
    assert second.status("/health") == second.status("/ready") == 200
    assert metric(second.url, "outrider_info", model=NAME) == 1
    refused = second.post("completions", {"prompt": "x"}, 404)
    assert refused["error"]["message"] == "this is node 1 of 2: node 0 takes requests"


def test_the_first_node_ends_all_and_the_other_waits_for_it(nodes: Nodes) -> None:
    folders = [_run_folder(server) for server in (nodes.first, nodes.second)]
    nodes.second.process.send_signal(signal.SIGTERM)
    wait_until(lambda: nodes.second.status("/ready") == 503, 30)
    assert nodes.complete(PROMPTS[0], temperature=0)["token_ids"]
    assert nodes.first.stop() == 0
    assert nodes.second.process.wait(30) == 0
    assert not any(folder.exists() for folder in folders)
    assert "Traceback" not in nodes.first.output() + nodes.second.output()


def _run_folder(server: Server) -> Path:
    opened = (os.readlink(file) for file in Path(f"/proc/{server.process.pid}/fd").iterdir())
    (found,) = {Path(name) for name in opened if Path(name).name.startswith(PREFIX)}
    return found
