"""SGLang's runner of prefill graphs on a CPU, with functions as graphs: checks the hidden states of replays.

The model's body is captured and its tail is not, as in SGLang. Prints JSON.
"""

import json
import os
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from outrider.server.plugin import activate

os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
activate()
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402  after the plugin
from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: E402
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as sglang_runner  # noqa: E402
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (  # noqa: E402
    BreakableCudaGraphBackend,
)
from sglang.srt.runtime_context import SpawnRanks, get_exec, get_parallel, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from outrider.server.plugin.config import PluginConfig  # noqa: E402
from outrider.server.plugin.cuda import prefill_graphs  # noqa: E402
from outrider.server.plugin.hooks.algorithm import OutriderAlgorithm  # noqa: E402

REQUESTS, CONTEXT, VOCAB, SIZE, TOKENS = 5, 64, 40, 16, [4, 8, 16]
ARGUMENTS = ServerArgs(model_path="dummy", device="cpu")


class Attention(AttentionBackend):
    """Layers of a model without attention."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        pass


class Body(torch.nn.Module):
    """Two layers with returned outputs; SGLang finds a model's body in `layers`."""

    layers = ()

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, SIZE, generator=draw)
        self.places = torch.randn(CONTEXT, SIZE, generator=draw)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        first = self.embedding[input_ids] + self.places[positions]
        return torch.tanh(first), [first, first.square()]


class Model(torch.nn.Module):
    shared_experts_config = None

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> LogitsProcessorOutput:
        hidden, shown = self.model.forward(input_ids, positions, batch)
        last = hidden[batch.extend_seq_lens.cumsum(0) - 1]
        full = batch.capture_hidden_mode.is_full()
        return LogitsProcessorOutput(last @ self.model.embedding.T, hidden_states=torch.cat(shown, 1) if full else None)


class Graphs(BreakableCudaGraphBackend):
    """Keeps the function to be captured, in place of a graph."""

    def __init__(self, runner: Any, fails: bool) -> None:
        self.runner, self.fails, self.captured, self.replays = runner, fails, dict[Any, Any](), 0

    @contextmanager
    def capture_session(self, stream: Any) -> Any:
        yield

    def capture_one(self, key: Any, forward: Any, **_: Any) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")
        self.captured[key] = forward
        forward()

    @contextmanager
    def replay_session(self) -> Any:
        yield

    def replay(self, key: Any, batch: Any, **_: Any) -> Any:
        self.replays += 1
        body = self.runner.layer_model
        with mock.patch.object(body, "forward", partial(Body.forward, body)):  # SGLang's version calls this replay
            return self.captured[key]()


def model_runner() -> Any:
    return SimpleNamespace(
        device="cpu", attn_backend=Attention(), model=Model(), is_draft_worker=False, lora_manager=None,
        spec_algorithm=OutriderAlgorithm("OUTRIDER", lambda _: None, supports_overlap=True), is_generation=True,
        ngram_embedding_manager=SimpleNamespace(enabled=False), server_args=ARGUMENTS, dtype=torch.float32,
        model_config=SimpleNamespace(
            hidden_size=SIZE, vocab_size=VOCAB, context_len=CONTEXT, is_multimodal=False, hc_hidden_size=None,
            hf_config=SimpleNamespace(model_type="tiny", architectures=["Tiny"]),
        ),
        req_to_token_pool=SimpleNamespace(size=REQUESTS, req_to_token=torch.zeros(REQUESTS + 1, CONTEXT)),
        attn_tp_sequence_sharded=lambda tokens: False, graph_shared_output=None, gpu_id=0, dsa_indexers=None,
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True), attention_layers=[], moe_layers=[],
        moe_fusions=[], mha_companion_layers=[], get_pp_proxy_topk_size=lambda: None,
        get_pp_proxy_residual_num_blocks=lambda: None, get_pp_proxy_dspark_hidden_size=lambda: 0,
        kv_index_translator=SimpleNamespace(bind_runner_slots=lambda _: None), shared_read_done_event=None,
        prepare_dummy_forward_batch=lambda batch: batch, hisparse_coordinator=None, canary_manager=None,
    )  # fmt: skip


def make(drafter: str, *, fails: bool = False) -> Any:
    PluginConfig(drafter=drafter).to_env()
    sglang_runner.resolve_prefill_backend = lambda runner: Graphs(runner, fails)
    return sglang_runner.PrefillCudaGraphRunner(model_runner())


def prefill(lens: list[int], mode: CaptureHiddenMode) -> ForwardBatch:
    tokens, counts = sum(lens), torch.tensor(lens)
    positions = torch.cat([torch.arange(n) for n in lens])
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=len(lens), input_ids=torch.randint(VOCAB, (tokens,)),
        req_pool_indices=torch.arange(len(lens)), seq_lens=counts, seq_lens_cpu=counts, orig_seq_lens=counts,
        out_cache_loc=torch.arange(tokens), seq_lens_sum=tokens, positions=positions, extend_num_tokens=tokens,
        extend_seq_lens=counts, extend_prefix_lens=torch.zeros_like(counts), extend_start_loc=counts.cumsum(0) - counts,
        extend_prefix_lens_cpu=[0] * len(lens), extend_seq_lens_cpu=lens, extend_logprob_start_lens_cpu=lens,
        global_forward_mode=ForwardMode.EXTEND, capture_hidden_mode=mode,
    )  # fmt: skip
    batch.kv_loc_plan = SimpleNamespace(bind_replay=lambda *_, **__: None)
    return batch


def replay_all(runner: Any) -> dict[str, int]:
    """Raises if a replay's hidden states differ from the model's."""
    torch.manual_seed(1)
    replayed = eager = 0
    for lens in ([1], [4], [5], [3, 2], [1, 6, 4], [16], [2, 9, 5], [17]):
        batch = prefill(lens, CaptureHiddenMode.FULL)
        if not runner.can_run_graph(batch):
            eager += 1
            continue
        wanted = runner.model_runner.model(batch.input_ids, batch.positions, batch)
        made = runner.execute(batch)
        torch.testing.assert_close(made.hidden_states, wanted.hidden_states)
        torch.testing.assert_close(made.next_token_logits[: len(lens)], wanted.next_token_logits)
        replayed += 1
    assert runner.backend.replays == replayed
    return {"replayed": replayed, "eager": eager, "captured": len(runner.backend.captured)}


def main() -> None:
    publish(ARGUMENTS, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    graphs = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.BREAKABLE, bs=TOKENS))
    sglang_runner.graph_capture = lambda **_: nullcontext(SimpleNamespace(stream=None))
    sglang_runner.get_or_create_global_graph_capture_stream = lambda: None
    sglang_runner.PrefillCudaGraphRunner.warmup = lambda self: None
    stock = sglang_runner.PrefillCudaGraphRunner.capture
    with (
        get_parallel().override(tp_group=SimpleNamespace(world_size=1, barrier=lambda: None)),
        get_exec().graph.override(cuda_graph_config=graphs),
    ):
        results = {"SGLang's own": replay_all(make("dspark"))}
        sglang_runner.PrefillCudaGraphRunner.capture = lambda self: prefill_graphs.capture(stock, self)
        results |= {drafter: replay_all(make(drafter)) for drafter in ("dspark", "ngram")}
        results["failing"] = replay_all(make("dspark", fails=True))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
