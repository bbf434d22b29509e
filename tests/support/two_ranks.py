"""Decodes the same requests on two ranks of an engine with different clocks, seeds, confidences and rounding.

The workers are real; target and drafter are tables. Prints a JSON list with a result for each of `WORLDS`: steps that
agree on both ranks, of how many; verified and accepted drafts; token counts of forwards; steps accepted by the first
rank's graph; failures; drafts verified in the last step; whether the first rank has the whole embedding and head;
gloo's error without the other rank.
"""

import json
import os
import secrets
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from planning import curve_cost, request

from outrider.server.plugin import activate

activate()
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402  after the plugin
from sglang.srt.managers.scheduler import GenerationBatchResult  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features  # noqa: E402
from outrider.scheduler.buckets import TokenBuckets  # noqa: E402
from outrider.scheduler.planner import Asynchronous  # noqa: E402
from outrider.server.plugin.config import PluginConfig  # noqa: E402
from outrider.server.plugin.decode import base, leader  # noqa: E402
from outrider.server.plugin.decode import follower as following  # noqa: E402
from outrider.server.plugin.decode import worker as decode  # noqa: E402
from outrider.server.plugin.loading import drafter as loading  # noqa: E402
from outrider.server.plugin.options import KEY  # noqa: E402

GAMMA, VOCAB, REQUESTS, STEPS, CONTEXT = 4, 32, 6, 40, 512
SKEW = 7.0
"""Speed of the second rank's clock relative to the first's."""


@dataclass(frozen=True)
class World:
    """alone: ranks do not communicate. buckets: steps have buckets, and graphs. fails: a part of the first rank's
    worker that fails in the last steps."""

    alone: bool = False
    buckets: bool = False
    greedy: bool = False
    fails: str = ""


WORLDS = {
    "told": World(), "alone": World(alone=True), "buckets": World(buckets=True),
    "greedy": World(buckets=True, greedy=True), "drafting fails": World(buckets=True, fails="drafting"),
    "planning fails": World(fails="planning"), "planning fails with buckets": World(buckets=True, fails="planning"),
}  # fmt: skip


class Group:
    """The part of SGLang's GroupCoordinator that workers use."""

    first_rank, cpu_group = 0, None

    def __init__(self, rank: int, alone: bool) -> None:
        self.rank_in_group, self.world_size = rank, 1 if alone else 2

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, 0)

    def gather(self, tensor: torch.Tensor, dst: int, dim: int) -> torch.Tensor | None:
        parts = [torch.empty_like(tensor) for _ in range(2)] if self.rank_in_group == dst else None
        dist.gather(tensor, parts, dst)
        return None if parts is None else torch.cat(parts, dim)


class Guessing(Drafter):
    """Drafts the most frequent next token, or the one after it, with process-dependent confidences."""

    gamma = GAMMA

    def __init__(self, rank: int) -> None:
        self.draw = torch.Generator().manual_seed(rank)

    def allocate(self, slots: int) -> None:
        pass

    def observe(self, features: Features) -> None:
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        shape = (len(batch.anchors), GAMMA)
        wrong = torch.rand(shape, generator=self.draw) < 0.1
        return Draft(
            tokens=(batch.anchors[:, None] + torch.arange(1, GAMMA + 1) + wrong) % VOCAB,
            lens=torch.full_like(batch.anchors, GAMMA),
            confidence=torch.rand(shape, generator=self.draw),
            drafting=len(batch.anchors),
        )


class Target:
    """The token one above the last is the likeliest; each rank adds noise. With buckets a verification is a graph that
    ends with the worker's captured tail."""

    def __init__(self, rank: int, buckets: TokenBuckets | None) -> None:
        self.draw = torch.Generator().manual_seed(100 + rank)
        self.buckets, self.accepted_by_graphs = buckets, 0
        table = torch.arange(REQUESTS * CONTEXT, dtype=torch.int32).view(REQUESTS, CONTEXT)
        self.pool = SimpleNamespace(req_to_token=table)
        self.model_runner = SimpleNamespace(
            attn_backend=None,
            model_config=SimpleNamespace(context_len=CONTEXT),
            token_to_kv_pool=SimpleNamespace(size=table.numel(), page_size=1), device="cpu",
            capture_tail_hooks=[], lora_manager=None,
        )  # fmt: skip

    def get_memory_pool(self) -> tuple[Any, None]:
        return self.pool, None

    def forward_batch_generation(self, batch: Any, **_: Any) -> GenerationBatchResult:
        tokens = batch.input_ids
        logits = 5.0 * torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()
        logits += 0.5 * torch.randn(logits.shape, generator=self.draw)
        if batch.forward_mode is ForwardMode.EXTEND:  # `is_extend` counts a verify as one
            logits = logits[torch.tensor(batch.extend_lens).cumsum(0) - 1]
        output = LogitsProcessorOutput(logits)
        in_graph = batch.forward_mode is ForwardMode.TARGET_VERIFY and self.buckets is not None
        if in_graph:
            self._end_graph(batch, output)
        return GenerationBatchResult(output, can_run_cuda_graph=in_graph)

    def _end_graph(self, batch: Any, output: LogitsProcessorOutput) -> None:
        tokens = len(batch.input_ids)
        slots = self.buckets.slots(tokens)
        padded = SimpleNamespace(
            batch_size=slots, seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, max(0, slots - REQUESTS))),
            input_ids=batch.input_ids, out_cache_loc=batch.out_cache_loc, positions=batch.spec_info.positions,
        )  # fmt: skip
        for hook in self.model_runner.capture_tail_hooks:
            hook(self.model_runner, output, padded, tokens)
            self.accepted_by_graphs += int(hook.__self__._gate)


def is_greedy(i: int, world: World) -> bool:
    return world.greedy or i % 3 == 0


def requests(world: World) -> list[Any]:
    """A third of the requests, or all, are greedy; one has a service level."""
    made = []
    for i in range(REQUESTS):
        asked = {KEY: {"min_tokens_per_second": 50.0}} if i % 3 == 1 else None
        top_k = 1 if is_greedy(i, world) else VOCAB
        made.append(request(3, CONTEXT, custom_params=asked, sampling_seed=None, top_k=top_k, ignore_eos=True))
        made[-1].origin_input_ids, made[-1].grammar = [i] * 3, None
    return made


def sampling_info(world: World) -> SimpleNamespace:
    return SimpleNamespace(
        temperatures=torch.ones(REQUESTS, 1),
        top_ks=torch.tensor([1 if is_greedy(i, world) else VOCAB for i in range(REQUESTS)], dtype=torch.int32),
        need_top_k_sampling=False, need_top_p_sampling=False, need_min_p_sampling=False, is_all_greedy=world.greedy,
        acc_additive_penalties=None, logit_bias=None,
    )  # fmt: skip


def batch_of(mode: ForwardMode, reqs: list[Any], seq_lens: torch.Tensor, info: Any, **fields: Any) -> SimpleNamespace:
    rows = torch.arange(REQUESTS)
    return SimpleNamespace(
        forward_mode=mode, reqs=reqs, req_pool_indices=rows, req_pool_indices_cpu=rows, seq_lens=seq_lens,
        seq_lens_cpu=seq_lens, sampling_info=info, is_prefill_only=False, return_logprob=False,
        return_hidden_states=False, **fields,
    )  # fmt: skip


def decode_all(rank: int, world: World) -> tuple[list[tuple[Any, ...]], int, dict[str, int]]:
    """Token counts and outcome of each step; number of steps that a graph has accepted; failures."""
    buckets = TokenBuckets(REQUESTS, GAMMA + 1) if world.buckets else None
    leader.buckets_of = following.buckets_of = lambda runner, width: buckets
    base.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=GAMMA + 1)
    base.get_parallel = lambda: SimpleNamespace(tp_group=Group(rank, world.alone))
    target = Target(rank, buckets)
    leads = world.alone or rank == 0
    worker = (decode.SpeculativeWorker if leads else following.FollowerWorker)(None, target)
    worker.alloc_memory_pool()
    worker.verify._direct_sought = True
    if leads:
        cost = curve_cost(REQUESTS, [0.02 + 0.0005 * k for k in range(REQUESTS * GAMMA + 1)])
        worker.planning.plan_by(Asynchronous(cost, GAMMA, held=1), None)
        worker.drafter = Guessing(rank)
    reqs, info, seq_lens = requests(world), sampling_info(world), torch.full((REQUESTS,), 3)
    prompts = [req.origin_input_ids for req in reqs]
    prefill = batch_of(
        ForwardMode.EXTEND, reqs, seq_lens, info, input_ids=torch.tensor(prompts).flatten(), prefix_lens=[0] * REQUESTS,
        extend_lens=[3] * REQUESTS, out_cache_loc=target.pool.req_to_token[:, :3].flatten().long(),
    )  # fmt: skip
    result = worker.forward_batch_generation(prefill)
    seen: list[tuple[Any, ...]] = [tuple(result.next_token_ids.tolist())]
    for step in range(STEPS):
        if leads and world.fails and step == STEPS * 3 // 4:
            failing = {"drafting": (worker.drafter, "propose"), "planning": (worker.planning.planner, "budget")}
            setattr(*failing[world.fails], lambda *_: 1 / 0)
        seq_lens = result.new_seq_lens
        batch = batch_of(ForwardMode.DECODE, reqs, seq_lens, info, spec_info=result.next_draft_input)
        result = worker.forward_batch_generation(batch)
        lens, tokens = result.accept_lens.tolist(), result.next_token_ids.view(REQUESTS, -1).tolist()
        kept = [row[:count] for row, count in zip(tokens, lens, strict=True)]
        seen.append((batch.input_ids.tolist(), (result.cap_lens - 1).tolist(), kept))
    return seen, target.accepted_by_graphs, worker.optional.counts


def has_whole_weights(rank: int) -> bool:
    """Tell whether the first rank assembles a vocabulary from its parts, the last one padded."""
    embedding, head = (torch.arange(4.0 * VOCAB).view(VOCAB, 4) + which for which in (0, 1000))
    padded = torch.nn.functional.pad(torch.stack([embedding, head]), (0, 0, 0, 8))
    parts = [SimpleNamespace(weight=torch.nn.Parameter(whole.chunk(2)[rank])) for whole in padded]
    model = SimpleNamespace(model=SimpleNamespace(embed_tokens=parts[0]), lm_head=parts[1])
    config = SimpleNamespace(hf_text_config=SimpleNamespace(vocab_size=VOCAB))
    runner = SimpleNamespace(model=model, model_config=config)
    loading.get_parallel = lambda: SimpleNamespace(tp_group=Group(rank, alone=False))
    weights = loading.whole_weights(PluginConfig(drafter="dspark"), runner)
    if rank:
        return weights is None
    return weights is not None and torch.equal(weights[0], embedding) and torch.equal(weights[1], head)


def run(rank: int, name: str, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    secrets.randbits = lambda bits: 1 + rank  # different on each rank
    clock = time.perf_counter
    if rank:
        time.perf_counter = lambda: SKEW * clock()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    results = *decode_all(rank, WORLDS[name]), has_whole_weights(rank)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, results)
    if rank:
        os._exit(1)  # as if killed
    gone = ""
    try:
        dist.broadcast(torch.zeros(1), 1)
    except RuntimeError as error:
        gone = str(error)
    (first, second), (accepted_by_graphs, _), (failures, _), whole = zip(*both, strict=True)
    lens = [step[1] for step in first[1:]]
    return {
        "world": name, "sizes": sorted({len(step[0]) for step in first[1:]}), "accepted_by_graphs": accepted_by_graphs,
        "same": sum(one == other for one, other in zip(first, second, strict=True)), "steps": len(first),
        "verified": sum(map(sum, lens)), "different_lengths": len({tuple(step) for step in lens}),
        "accepted": sum(len(row) - 1 for step in first[1:] for row in step[2]),
        "failures": {part: count for part, count in failures.items() if count}, "last": lens[-1],
        "whole_weights": all(whole), "gone": gone,
    }  # fmt: skip


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        for name in WORLDS:
            ranks = []
            for rank in range(2):
                if child := os.fork():
                    ranks.append(child)
                    continue
                try:
                    (Path(folder) / f"{name}.json").write_text(json.dumps(run(rank, name, folder)))
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            for child in ranks:
                os.waitpid(child, 0)
        print(json.dumps([json.loads((Path(folder) / f"{name}.json").read_text()) for name in WORLDS]))


if __name__ == "__main__":
    main()
