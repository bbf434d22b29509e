"""Runs decode steps of the worker on an absent GPU; prints the operations as JSON, for `test_no_host_wait.py`.

The target's forward only returns logits and hidden states of the right shapes. The rest is the worker's own code.
"""

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import absent_gpu
import numpy as np
import torch
from decode_batches import BATCHES, VOCABULARY, batch_of, grammar
from prometheus_client import CollectorRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from tiny_drafters import CONFIGS, DIFFUSIONS, PATHS
from tiny_eagle import AUTHORS, DRAFTED, LAYER_IDS
from tiny_mtp import LAYOUTS as MTP_LAYOUTS
from tiny_mtp import SHAPE

from outrider.drafters import graphs
from outrider.drafters.base import Drafter
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.drafters.chain.drafter import ChainDrafter
from outrider.drafters.chain.network import ChainWeights
from outrider.drafters.diffusion.drafter import DiffusionDrafter
from outrider.drafters.diffusion.model import DiffusionModel
from outrider.drafters.eagle.checkpoint import shapes as eagle_shapes
from outrider.drafters.eagle.config import EagleConfig
from outrider.drafters.eagle.drafter import EagleDrafter
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.mtp.checkpoint import shapes as mtp_shapes
from outrider.drafters.mtp.config import MtpConfig
from outrider.drafters.mtp.drafter import MtpDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.slot_tokens import SlotTokens
from outrider.drafters.wrappers import Initialised
from outrider.kernels.cuda import native as cuda
from outrider.kernels.upload import LastUpload
from outrider.scheduler import registry
from outrider.scheduler.buckets import TokenBuckets
from outrider.scheduler.cost.model import StepCost
from outrider.scheduler.cost.step_times import Point
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.decode import flatten as flattening
from outrider.server.plugin.decode import leader, warm_up
from outrider.server.plugin.decode import worker as worker_module
from outrider.server.plugin.decode.boundary import Boundary
from outrider.server.plugin.decode.flatten import StepBatch
from outrider.server.plugin.decode.follower import FollowerWorker
from outrider.server.plugin.decode.metrics import SpeculationMetrics
from outrider.server.plugin.decode.optional.learning import Exchange
from outrider.server.plugin.decode.optional.part import OptionalParts
from outrider.server.plugin.decode.optional.trace import Tracing
from outrider.server.plugin.decode.plan import StepPlanner
from outrider.server.plugin.decode.ranks import Ranks
from outrider.server.plugin.decode.requests import RequestTable
from outrider.server.plugin.decode.verify import VerifyStage

POOL, CONTEXT, SLOTS, REQUESTS = 80, 128, 600, 3
MANY, ASKING = 80, (2, 3, 16, 33, 65)
"""Requests in the warm-up, and in steps. torch treats arrays of one as constants."""
CHAINED = 2
"""Tokens of a chain's draft: from the second on each is drafted as that one."""
CASES = [
    *((drafter, "asynchronous", kind) for drafter in ("ngram", "dspark") for kind in BATCHES),
    *(("dspark", planner, "greedy") for planner in registry.PLANNERS if planner != "asynchronous"),
    *((drafter, "asynchronous", "mixed") for drafter in ("truncated", "gated", "dflash", "dflash2", "lilicorr")),
    *(("dspark in graphs", "asynchronous", kind) for kind in BATCHES),
    *(("deer", "asynchronous", kind) for kind in ("greedy", "mixed")),
    *((drafter, "asynchronous", "mixed") for drafter in ("wide diffusion", "without confidence")),
    *(("specdiff", "asynchronous", kind) for kind in ("greedy", "mixed")),
    ("deer in graphs", "asynchronous", "greedy"),
    *((drafter, "asynchronous", kind) for drafter in ("eagle3", "mtp") for kind in ("greedy", "mixed")),
    *((f"dspark in graphs, rank {rank} of 2", "asynchronous", kind) for rank in (1, 2) for kind in ("greedy", "mixed")),
]
WARMED = "ngram", "dspark in graphs", "truncated", "dflash", "eagle3", "mtp"
"""Drafters with counted kernels."""
WITHOUT_KERNELS = [
    *(("ngram", "asynchronous", kind) for kind in BATCHES),
    *(
        (drafter, "asynchronous", kind)
        for drafter in ("dspark", "dspark in graphs")
        for kind in ("greedy", "penalized")
    ),
    *((drafter, "asynchronous", "mixed") for drafter in ("truncated", "dflash2", "deer", "specdiff", "eagle3")),
]
"""Cases in which torch computes everything, as without Triton."""
IN_GRAPHS, GRAPHS = " in graphs", (1, 2, 4)
BEGUN = " begun"
"""Drafters that draft only for answers that have begun (`--initial-tokens`)."""
PLANTS = {
    "item": lambda tensor: tensor.sum().item(),
    "cpu": lambda tensor: tensor.cpu(),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "upload": lambda tensor: tensor + torch.ones(len(tensor), dtype=torch.int64).to(tensor.device),
    "number": lambda tensor: tensor.clone().index_put_((tensor,), tensor.new_zeros(())),
    "none": lambda tensor: None,
}
"""Planted operations on a step's anchors; all but the last wait."""


class Worker(worker_module.SpeculativeWorker):
    target_worker = property(lambda self: self._target_worker)


class OtherRank(FollowerWorker, Worker):
    has_buckets = True


class TwoRanks(Ranks):
    """Two ranks with broadcasts from device to device, except the bucket, which hosts know."""

    def __init__(self, device: torch.device):
        super().__init__(SimpleNamespace(world_size=2, broadcast=self._seen), device)

    def _seen(self, tensor: torch.Tensor) -> None:
        assert tensor.device == self.device

    def broadcast_bucket(self, bucket: int) -> None:
        assert isinstance(bucket, int)

    def receive_bucket(self) -> int:
        return 8


def make_drafter(name: str, device: torch.device, layers: int | None = None) -> Any:
    name = name.removesuffix(IN_GRAPHS)
    if name == "ngram":
        return NgramDrafter(4, device=device)
    if name in ("eagle3", "mtp"):
        with device:
            return LookupFirst(NgramDrafter(6, device=device), make_chain(name), expected_run_length=1.7)
    begun = name.endswith(BEGUN)
    name = name.removesuffix(BEGUN)
    config = (CONFIGS | PATHS | DIFFUSIONS | dict.fromkeys(("deer", "specdiff"), DIFFUSIONS["diffusion"]))[name]
    config = replace(config, num_layers=layers or config.num_layers)
    drafter: Drafter
    with device:
        vocab = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        rows = torch.zeros(config.vocab_size, config.hidden_size)
        if config.kind == "diffusion":
            steps = 3 if name == "specdiff" else 1
            drafter = DiffusionDrafter(DiffusionModel(config, vocab), embedding=rows, head=rows, denoising_steps=steps)
        else:
            drafter = BlockDrafter(BlockModel(config, vocab), embedding=rows, head=rows)
    drafter = Initialised(drafter, 3) if begun else drafter
    return LookupFirst(NgramDrafter(6, device=device), drafter, expected_run_length=1.7)


def make_chain(name: str) -> ChainDrafter:
    rows = torch.zeros(96, 32)
    if name == "eagle3":
        head = EagleConfig.from_json(AUTHORS)
        shapes = eagle_shapes(head, len(LAYER_IDS)) | {"lm_head.weight": (DRAFTED, 32)}
        tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        weights = ChainWeights(head, tensors, tuple(LAYER_IDS), torch.arange(DRAFTED))
        return EagleDrafter(weights, read=None, embedding=rows, head=rows, gamma=CHAINED)
    architecture, _, fields = MTP_LAYOUTS["glm with groups"]
    layer = MtpConfig.from_json(SHAPE | fields | {"architectures": [architecture], "num_hidden_layers": 6})
    tensors = {name: torch.zeros(shape) for name, shape in mtp_shapes(layer, {}).items()}
    return MtpDrafter(ChainWeights(layer, tensors), read=None, embedding=rows, head=rows, gamma=CHAINED)


def make_worker(
    drafter: str, planner: str, device: torch.device, record: Any = lambda run: (run, run()), layers: int | None = None
) -> Worker:
    """layers: of the drafter, if not its own number."""
    drafter, _, rank = drafter.partition(", rank ")
    worker = Worker.__new__(OtherRank if rank == "2 of 2" else Worker)
    worker.device = device
    worker.config = PluginConfig(drafter=drafter, planner=planner, initial_tokens=3 if BEGUN in drafter else 0)
    worker.ranks = TwoRanks(device) if rank else Ranks(SimpleNamespace(world_size=1), device)
    worker.drafter = make_drafter(drafter, device, layers)
    with absent_gpu.watching():
        worker.drafter.allocate(SLOTS)
    worker.width = worker.drafter.gamma + 1
    worker.requests = RequestTable(POOL, worker.width - 1, device)
    cost = StepCost([Point(1, n, 0, (1e-3 + 1e-5 * n,)) for n in range(1, 9)])
    metrics = SpeculationMetrics(worker.width - 1, drafter, CollectorRegistry())
    made = registry.make(planner, gamma=worker.width - 1, threshold=0.3, cost=cost)
    buckets = TokenBuckets(POOL, worker.width)
    worker.exchange, worker.optional = Exchange(PluginConfig(), worker.drafter), Boundary()
    worker.by_owner = None
    worker.parts = OptionalParts(worker.optional, [metrics, worker.exchange, Tracing(worker.optional)])
    worker.planning = StepPlanner(made, None, worker.requests, metrics, device, buckets, parts=worker.parts)
    worker.page_table = torch.zeros(POOL, CONTEXT, dtype=torch.int32, device=device)
    runner = SimpleNamespace(attn_backend=None, shared_read_done_event=None, capture_tail_hooks=[])
    run = lambda batch, **_: forward(worker, batch)  # noqa: E731
    worker._target_worker = SimpleNamespace(model_runner=runner, forward_batch_generation=run)
    worker.verify = VerifyStage(worker.target_worker, worker.width)
    worker.verify._direct_sought = True
    worker.verify.captures_hidden = bool(worker.drafter.target_layers) or worker.drafter.reads_output
    sizes = GRAPHS if drafter.endswith(IN_GRAPHS) else ()
    with mock.patch.object(leader, "captured_sizes", return_value=list(sizes)):
        worker._set_up_stages(runner, SlotTokens(SLOTS, device))
    if sizes:
        with mock.patch.object(graphs, "GraphRecorder", return_value=record):
            worker.draft.capture(worker.drafter, sizes, worker.page_table)
    else:
        worker.accept.tail = None
    return worker


def outputs(worker: Worker, tokens: int) -> Any:
    """The part of SGLang's `LogitsProcessorOutput` that the worker reads."""
    hidden = None
    if worker.verify.captures_hidden:
        hidden = torch.empty(tokens, 32 * max(len(worker.drafter.target_layers), 1), device=worker.device)
    return SimpleNamespace(
        next_token_logits=torch.empty(tokens, VOCABULARY, device=worker.device), hidden_states=hidden
    )


def capture(worker: Worker, output: Any, input_ids: Any, slots: Any, positions: Any) -> None:
    count = worker.planning.buckets.slots(len(input_ids))
    seq_lens = torch.zeros(count, dtype=torch.int64, device=worker.device)
    padded = SimpleNamespace(
        batch_size=count, seq_lens=seq_lens, input_ids=input_ids, out_cache_loc=slots, positions=positions
    )
    worker.accept.tail.capture(None, output, padded, len(input_ids))


def forward(worker: Worker, batch: Any) -> Any:
    tokens = len(batch.input_ids)
    assert batch.spec_info.ragged_verify_layout.graph_num_tokens == tokens
    output = outputs(worker, tokens)
    if worker.accept.tail is not None:
        capture(worker, output, batch.input_ids, batch.out_cache_loc, batch.spec_info.positions)
        worker.target_worker.model_runner.shared_read_done_event = absent_gpu.Event()  # as in SGLang's graphs
    return SimpleNamespace(logits_output=output, can_run_cuda_graph=worker.accept.tail is not None)


def steps(worker: Worker, kind: str, lengths: list[int], rows: torch.Tensor) -> list[list[Any]]:
    operations = []
    worker.requests.sent_limits, worker.requests.sent_rows = LastUpload(), LastUpload()  # so that both are sent again
    batch = batch_of(kind, lengths, rows, worker.device)
    worker.requests.admit(batch.reqs, batch.req_pool_indices, rows.numpy())
    for _ in range(2):
        batch, published = batch_of(kind, lengths, rows, worker.device), list[torch.Tensor]()
        with absent_gpu.watching() as watched:
            worker._decode(batch, published.append, None)
        assert published[0].device == worker.device
        read_late = kind == "penalized"  # rules read the page table after the verification
        assert (worker.target_worker.model_runner.shared_read_done_event is None) == (
            read_late or not worker.accept.tail
        )
        operations.append(watched.operations)
    return operations


class Replays:
    """Graphs that are recorded once and then counted."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, run: Any) -> Any:
        with absent_gpu.watching():
            return self.replay, run()

    def replay(self) -> None:
        self.count += 1

    def forward(self, worker: Worker, batch: Any) -> Any:
        if worker.accept.tail is None:
            return forward(worker, batch)
        self.count += 1
        tokens = len(batch.input_ids)
        if tokens not in worker.accept.tail._results:
            forward(worker, batch)
        return SimpleNamespace(logits_output=outputs(worker, tokens), can_run_cuda_graph=True)


@contextmanager
def kernels(device: torch.device) -> Iterator[None]:
    """Our kernels run for this device's tensors, as for CUDA's."""
    on_cuda = lambda *tensors: all(x.device == device for x in tensors) and cuda.available()  # noqa: E731
    with mock.patch.object(cuda, "fits", on_cuda):
        yield


def late(drafter: str, device: torch.device, *, without: Any = None) -> tuple[int, list[str]]:
    """Numbers of kernels compiled at the start, and by later steps. without: "greedy" or "sampled" draws to omit from
    the warm-up."""
    leave = {"greedy": slice(1, None), "sampled": slice(1)}.get(without, slice(None))
    samplings, before = warm_up.samplings, len(absent_gpu.KERNELS.compiled)
    absent_gpu.KERNELS.forget()
    with (
        absent_gpu.running(),
        kernels(device),
        mock.patch.object(warm_up, "samplings", lambda *given: [*samplings(*given)][leave]),
    ):
        replays = Replays()
        worker = make_worker(drafter, "asynchronous", device, replays.record, layers=1)
        worker._target_worker.forward_batch_generation = lambda batch, **_: replays.forward(worker, batch)
        for tokens in worker.planning.buckets.graphs[1:] if worker.accept.tail else ():
            numbers = torch.zeros(tokens, dtype=torch.int64, device=device)
            with absent_gpu.watching():
                capture(worker, outputs(worker, tokens), numbers, numbers, numbers)
        with absent_gpu.watching():
            warm_up.run_all(MANY, worker.page_table, VOCABULARY, worker.width - 1, worker.drafter, by_block=True)
        compiled, missed = len(absent_gpu.KERNELS.compiled) - before, list[str]()
        for count in ASKING:
            rows = np.arange(count)
            at = SimpleNamespace(numpy=lambda rows=rows: rows)
            for kind in BATCHES:
                batch = batch_of(kind, [20] * count, at, device)
                with absent_gpu.watching() as watched:
                    worker.requests.admit(batch.reqs, batch.req_pool_indices, rows)
                    worker._decode(batch, lambda _: None, None)
                missed += watched.compiled
    return compiled, missed


def run(drafter: str, planner: str, kind: str, device: torch.device, *, with_kernels: bool = True) -> dict[str, Any]:
    """Compare the operations of batches with different lengths; or return the error."""
    rows = np.arange(1, REQUESTS + 1)
    at = SimpleNamespace(numpy=lambda: rows)  # a host tensor, which the fake mode lacks
    with absent_gpu.running(), kernels(device) if with_kernels else nullcontext():
        worker = make_worker(drafter, planner, device, layers=1)
        try:
            short, long = (steps(worker, kind, lengths, at) for lengths in ([20, 30, 25], [24, 18, 29]))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)
            ours = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in place]
            return {"error": f"{type(error).__name__}: {str(error)[:200]} at {' '.join(ours[-4:])}"}
    return {"same": short == long, "operations": len(short[1])}


def forced(device: torch.device) -> dict[str, Any]:
    """Draft for requests of which the first has a grammar, up to their admission; or return the error. Verification
    waits for the grammar's masks."""
    rows, first = np.arange(1, REQUESTS + 1), grammar()
    at = SimpleNamespace(numpy=lambda: rows)
    with absent_gpu.running(), kernels(device):
        worker = make_worker("dspark in graphs", "verify-all", device, layers=1)
        batch = batch_of("mixed", [20] * REQUESTS, at, device)
        worker.requests.admit(batch.reqs, batch.req_pool_indices, rows)
        for req in batch.reqs:
            req.output_ids = [ord("f") - 32]
        batch.reqs[0].grammar = first
        step = StepBatch.of(batch, worker.page_table)
        try:
            with absent_gpu.watching():
                step.sampling, classes = worker.sampling.of(batch, step.rows)
                begun = worker.planning.begin(rows, np.full(REQUESTS, 20), classes)
                draft, _ = worker.draft(worker.drafter, step, begun)
                worker.planning.admit(begun, draft, None)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"forced": draft.by_grammar is not None}


def propose_on_host(drafter: DiffusionDrafter, batch: Any) -> Any:
    """Drafting as on a CPU, where the host checks encoded texts."""
    drafter.on_host = True
    return drafter.propose(batch)


def main() -> None:
    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    device, results = absent_gpu.install(), {}
    for case in CASES:
        results[", ".join(case)] = run(*case, device)
    for case in WITHOUT_KERNELS:
        results[f"{', '.join(case)}, without kernels"] = run(*case, device, with_kernels=False)
    results["forced"] = forced(device)
    results["late"] = {drafter: late(drafter, device) for drafter in WARMED}
    results["planted late"] = {left: late("dspark", device, without=left) for left in ("greedy", "sampled")}
    original = flattening.flatten
    for name, plant in PLANTS.items():
        flattening.flatten = lambda anchors, *rest, plant=plant: (plant(anchors), original(anchors, *rest))[1]
        results[f"planted {name}"] = run("ngram", "verify-all", "greedy", device)
    DiffusionDrafter._propose_each = propose_on_host
    results["planted host"] = run("deer", "verify-all", "greedy", device)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
