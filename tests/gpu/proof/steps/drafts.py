"""Step 2: drafts by Qwen3-8B's DSpark drafter as published, with random weights; acceptance; prompt lookup."""

from functools import partial
from typing import Any

import torch
from shapes import DSPARK, QWEN3_8B
from timing import DEVICE, TINY, captured, say, timed, write

from outrider.drafters.base import DraftBatch
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.drafters.graphs import DraftGraphs
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels.acceptance import Verification, accept_logits
from outrider.kernels.noise import Purpose, streams, uniforms
from outrider.kernels.sampling import Rules

CONTEXT = 64 if TINY else 600
REQUESTS = (1, 2) if TINY else (1, 8, 32, 64)
ROWS = (8,) if TINY else (8, 32, 128)
TEXTS = (64,) if TINY else (1024, 8192, 32768)
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
VOCABULARY = QWEN3_8B["vocab_size"]


def batch_of(requests: int, table: torch.Tensor, longest: int, gamma: int) -> DraftBatch:
    """Return greedy requests, each with `longest` tokens in the cache."""
    numbers = torch.arange(requests, device=DEVICE)
    return DraftBatch(
        anchors=numbers + 5, seq_lens=torch.full_like(numbers, longest), page_table=table, rows=numbers + 1,
        temperatures=torch.zeros(requests, device=DEVICE),
        keys=torch.randint(1 << 60, (requests, gamma), device=DEVICE), seeds=numbers,
        seeded=torch.zeros(requests, dtype=torch.bool, device=DEVICE),
        decided=torch.ones(requests, dtype=torch.bool, device=DEVICE), wants_probs=False, all_greedy=True,
        longest=1 << longest.bit_length(),
    )  # fmt: skip


def pages(requests: int, each: int) -> torch.Tensor:
    """Return a page table [requests + 1, each] with an unused row 0."""
    table = torch.arange(1, 1 + (requests + 1) * each, dtype=torch.int32, device=DEVICE).view(-1, each)
    table[0] = 0
    return table


def drafter() -> BlockDrafter:
    torch.manual_seed(1)
    with torch.device(DEVICE):
        model = BlockModel(BlockConfig.from_json(DSPARK), None)
        rows = torch.randn(VOCABULARY, QWEN3_8B["hidden_size"], dtype=DTYPE) * 0.02
    made = BlockDrafter(model.to(DTYPE), embedding=rows, head=rows.clone())
    made.allocate((max(REQUESTS) + 2) * (CONTEXT + 64))
    return made


@torch.inference_mode()
def drafting() -> dict[str, Any]:
    """Return microseconds of a draft, by a graph and eagerly, and of the graph's replay alone."""
    made, table = drafter(), pages(max(REQUESTS), CONTEXT + 64)
    batches = {count: batch_of(count, table, CONTEXT, made.gamma) for count in REQUESTS}
    results: dict[str, Any] = {}
    for count, batch in batches.items():
        results[f"eager, {count}"] = timed(partial(made.propose, batch), 50)
    if DEVICE == "cuda":
        room = made.reserve_probs(max(REQUESTS))[0]
        graphs = DraftGraphs(made.propose, REQUESTS, table, made.gamma, room)
        for count, batch in batches.items():
            results[f"graph, {count}"] = timed(partial(graphs.propose, batch), 100)
            replay = graphs._graphs[count][0]
            results[f"replay alone, {count}"] = timed(replay, 100)
    return results


@torch.inference_mode()
def acceptance() -> dict[str, Any]:
    """Return microseconds of accepting a batch's tokens, captured as at the end of a verification."""
    results, gamma = {}, 7
    for rows in ROWS:
        requests = rows // (gamma + 1)
        seeds = torch.arange(requests, device=DEVICE)
        q = torch.rand(requests, gamma, VOCABULARY, device=DEVICE)
        batch = Verification(
            torch.randint(VOCABULARY, (requests, gamma), device=DEVICE),
            torch.full_like(seeds, gamma),
            torch.arange(requests + 1, device=DEVICE) * (gamma + 1),
            draft_probs=q / q.sum(2, keepdim=True),
        )
        logits = torch.randn(rows, VOCABULARY, device=DEVICE)
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            rules = Rules(torch.full((requests,), temperature, device=DEVICE))
            results[f"{kind}, {rows} rows"] = timed(captured(partial(_accept, batch, seeds, logits, rules)), 50)
    return results


def _accept(batch: Verification, seeds: torch.Tensor, logits: torch.Tensor, rules: Rules) -> object:
    """Draw the numbers that acceptance needs and accept, as the server's tail does."""
    gamma = batch.tokens.shape[1]
    request = torch.arange(len(logits), device=DEVICE) // (gamma + 1)
    anchors = seeds + 100
    drawn = batch._replace(
        uniforms=uniforms(streams(seeds, anchors, Purpose.ACCEPT), gamma),
        final_keys=streams(seeds, anchors, Purpose.FINAL),
        decided=rules.temperatures <= 0,
    )
    return accept_logits(drawn, request, logits, rules, streams(seeds[request], anchors[request], Purpose.TOKEN))


@torch.inference_mode()
def lookup() -> dict[str, Any]:
    """Return microseconds of looking up 8 requests in their own texts, by length of text."""
    results, requests = {}, 2 if TINY else 8
    for length in TEXTS:
        made = NgramDrafter(15, device=DEVICE)
        made.allocate((requests + 2) * (length + 16))
        made.history.tokens.copy_(torch.randint(2000, made.history.tokens.shape, device=DEVICE))
        batch = batch_of(requests, pages(requests, length + 16), length, 15)
        results[f"{length} tokens"] = timed(captured(partial(made.propose, batch)), 50)
    return results


def main() -> None:
    results: dict[str, Any] = {}
    for part in (drafting, acceptance, lookup):
        results[part.__name__] = part()
        for name, times in results[part.__name__].items():
            say(f"{part.__name__:12} {name:24} host {times['host']:9.1f} µs, with the device {times['whole']:9.1f} µs")
        write("drafts", results, unit="microseconds", shape=DSPARK)


if __name__ == "__main__":
    main()
