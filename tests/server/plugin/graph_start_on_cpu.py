"""The start of SGLang's verification graphs on a CPU: the dummy forward, with which FlashInfer chooses kernels, through
our attention; and the refusal of adapters.

Prints as JSON where requests begin in that forward, with SGLang's batch and with ours, and the refusal.
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import verify_graphs_on_cpu as graphs
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish

from outrider.kernels.attention import flat_attention
from outrider.server.plugin.cuda import tuning
from outrider.server.plugin.flat_attention import FlatAttentionBackend


class Attention(FlatAttentionBackend):
    """Our attention, as the model calls it."""

    def attend(self, x: torch.Tensor, batch: Any) -> torch.Tensor:
        cache = torch.zeros(self.page_table.numel() + 1, 1, x.shape[1])
        return flat_attention(x[:, None], cache, cache, self.batch, scale=0.3)[:, 0]


def run(prepare: Any) -> list[int] | str:
    runner = graphs.make("dspark")
    model_runner = runner.model_runner
    model_runner.token_to_kv_pool, model_runner.is_generation, model_runner.canary_manager = None, True, None
    attention = model_runner.attn_backend = model_runner.model.attention = Attention(model_runner)
    model_runner.prepare_dummy_forward_batch = partial(prepare, model_runner)
    buffers, count = runner._autotune_buffers()
    try:
        runner._dummy_run(count, buffers=buffers)
    except AttributeError as error:
        return str(error)
    return attention.batch.host_indptr


def refusal() -> str:
    """SGLang's reason for capturing no graph for a model with adapters."""
    with_adapters = graphs.model_runner()
    with_adapters.lora_manager = SimpleNamespace(lora_backend=SimpleNamespace(skip_inactive_dense_lora=False))
    try:
        graphs.verify_graphs.VerifyGraphRunner(with_adapters)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    publish(graphs.ARGUMENTS, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    original = ModelRunner.prepare_dummy_forward_batch
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1, barrier=lambda: None)):
        tuned = {"without": run(original), "ours": run(partial(tuning.with_lengths, original))}
        print(json.dumps(tuned | {"adapters": refusal()}))


if __name__ == "__main__":
    main()
