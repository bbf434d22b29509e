"""Verifies tiny models of served families in SGLang's own classes, alone and in batches: walked_families.py FOLDER
TASK…

A task is ARCHITECTURE:DTYPE, or ARCHITECTURE:DTYPE:planted with a layer that depends on the number of rows. Prints
JSON: where rows' bits differ, and the torch operations that could make rows depend on each other.
"""

import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tiny_families
import torch
from small_target import tokenizer_files
from tiny_diffusion import TinyDiffusion
from torch.utils._python_dispatch import TorchDispatchMode

PROCESSES = 2
DIFFUSION = ("LLaDA2MoeModelLM", "SDARForCausalLM", "SDARMoeForCausalLM")
"""Families served by block diffusion only."""
REQUESTS, MOST, LONG = 65, 32, 40
"""Requests of the largest batch of short ones, tokens of a long one, and long ones in a batch: torch then splits even a
narrow layer's row among three threads."""
BATCHES = (3, 18, 34, 65)
PROBES, LONG_PROBES = (0, 1, 2, 5, 9, 15, 16, 17, 24, 31, 33, 40, 47, 48, 56, 62, 63, 64), (0, 17, 39)
"""Requests that are also verified alone."""
CONTEXT = 40
PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "mv", "dot")
Rows = dict[str, torch.Tensor]
"""[tokens, numbers] by source."""


class Family:
    """A loaded model of SGLang's, with random keys, values and states before the tokens."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.runner = runner = load(folder, dtype)
        torch.manual_seed(0)
        self.table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
        slots = CONTEXT + MOST
        for request in range(REQUESTS):
            self.table[request + 1, :slots] = 1 + slots * request + torch.arange(slots)
        pool = getattr(pool, "full_kv_pool", pool)
        self.cache = [*pool.k_buffer, *pool.v_buffer]
        self._fill_states()
        for buffer in self.cache:
            buffer.normal_()
        self.lens = torch.randint(1, CONTEXT, (REQUESTS,))
        self.anchors, self.drafts = torch.randint(3, 100, (REQUESTS,)), torch.randint(3, 100, (REQUESTS, MOST - 1))
        self.shown: Rows = {}
        self.layers = layers_of(runner.model)
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(partial(self._note, f"layer {number}"))

    def _fill_states(self) -> None:
        requests = self.runner.req_to_token_pool
        if (places := getattr(requests, "req_index_to_mamba_index_mapping", None)) is not None:
            places[1 : REQUESTS + 1] = torch.arange(1, REQUESTS + 1)
            states = requests.mamba_pool.mamba_cache
            for state in (*states.conv, states.temporal):
                state.normal_()

    def _note(self, name: str, _: Any, __: Any, outputs: Any) -> None:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        for place, x in enumerate(tensors):
            if isinstance(x, torch.Tensor):  # [..., tokens, numbers]
                self.shown[f"{name}.{place}"] = x.movedim(-2, 0).flatten(1).clone()

    def verify(self, requests: Sequence[int], verify_lens: torch.Tensor) -> list[Rows]:
        """Each request's rows, with `verify_lens` tokens each after the anchor."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        from outrider.server.plugin.decode.flatten import flatten
        from outrider.server.plugin.spec_inputs import ragged_layout, verify_input

        who = torch.tensor(requests)
        given, lens, rows = verify_lens[who], self.lens[who], who + 1
        flat = flatten(self.anchors[who], self.drafts[who], given, lens, self.table, rows)
        layout = ragged_layout(flat.qo_indptr, len(flat.positions))
        spec = verify_input(flat.positions, layout, MOST, False)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=len(who), input_ids=flat.input_ids,
            req_pool_indices=rows, seq_lens=lens, out_cache_loc=flat.slots, seq_lens_sum=None, seq_lens_cpu=None,
            positions=flat.positions, spec_info=spec, capture_hidden_mode=spec.capture_hidden_mode, orig_seq_lens=lens,
        )  # fmt: skip
        self.shown.clear()
        with torch.inference_mode():
            logits = self.runner.forward(batch).logits_output.next_token_logits
        cached = {f"cache {i}": buffer[flat.slots].flatten(1) for i, buffer in enumerate(self.cache)}
        parts = {name: x.split((given + 1).tolist()) for name, x in (self.shown | cached | {"logits": logits}).items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(requests))]


def load(folder: str, dtype: str) -> Any:
    """SGLang's model runner with a server's settings."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import SpawnRanks, publish

    from outrider.server.plugin.diffusion import models
    from outrider.server.processes import engine, sglang_args
    from outrider.server.settings.resolve import resolve
    from outrider.server.settings.settings import Settings

    resolved = resolve(Settings(model=folder, dtype=dtype, context_length=256))
    engine._set_environment(resolved.settings, Path(tempfile.mkdtemp(dir=folder)))
    if resolved.settings.diffusion:
        models.register(resolved.settings.diffusion)
    arguments = sglang_args.build(resolved.settings, resolved.model, resolved.memory, 1)
    arguments.max_total_tokens, arguments.max_running_requests = 8192, REQUESTS + 1
    arguments.max_mamba_cache_size = 4 * REQUESTS
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=0)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(arguments))
    worker = TpModelWorker(arguments, 0, 0)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    return worker.model_runner


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The longest list of layers with attention."""
    from sglang.srt.layers.radix_attention import RadixAttention

    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    attending = [each for each in lists if any(isinstance(part, RadixAttention) for part in each.modules())]
    return max(attending or lists, key=len)


def walk(folder: str, task: str) -> dict[str, Any]:
    """The number of compared layers, the differences by batch, and torch's operations."""
    architecture, dtype, *planted = task.split(":")
    made = Path(folder) / task
    if architecture in DIFFUSION:
        TinyDiffusion(architecture=architecture).write(made)
    else:
        tiny_families.write(architecture, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"dtype": dtype}))
    family = Family(str(made), dtype)
    if planted:
        family.layers[1].register_forward_hook(plant)
    short = torch.where(torch.arange(REQUESTS) % 3 == 1, torch.randint(1, 4, (REQUESTS,)), 0)
    long = torch.full((REQUESTS,), MOST - 1)
    torch.set_num_threads(1)
    expected = {i: family.verify([i], short)[0] for i in PROBES}
    expected_long = {i: family.verify([i], long)[0] for i in LONG_PROBES}
    differing: dict[str, str] = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        cases = [(range(count), short, expected) for count in BATCHES] + [((i,), short, expected) for i in PROBES[:3]]
        cases.append((range(LONG), long, expected_long))
        for requests, lens, known in cases:
            rows = family.verify(requests, lens)
            for i in known.keys() & {*requests}:
                for name, x in rows[i - requests[0]].items():
                    if not torch.equal(x, known[i][name]):
                        differing.setdefault(name, f"request {i} of {len(requests)}, {threads} threads")
    with Operations() as operations:
        family.verify(range(3), short)
    return {
        "layers": len({name.split(".")[0] for name in family.shown}),
        "differing": differing,
        "operations": sorted(operations.seen),
    }


class Operations(TorchDispatchMode):
    """Products and functions of single numbers that torch runs, each with its number type."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), more: Any = None) -> Any:
        name = operation.overloadpacket.__name__.removesuffix("_")
        numbers = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if numbers and (torch.Tag.pointwise in operation.tags or name in PRODUCTS):
            self.seen.add(f"{name} {numbers[0].dtype}".replace("torch.", ""))
        return operation(*args, **(more or {}))


def attempt(folder: str, task: str) -> dict[str, Any]:
    try:
        return walk(folder, task)
    except Exception as error:
        return {"error": repr(error)}


def plant(_: Any, __: Any, outputs: Any) -> None:
    """Make a layer's outputs depend on the number of rows."""
    outputs[0].add_(len(outputs[0]) * 1e-4)


def main(folder: str, *tasks: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("SGLANG_PLUGINS", "outrider")
    from outrider.server.processes import engine

    engine.load_plugin()
    tokenizer_files()
    from sglang.srt.dllm import algorithm  # noqa: F401
    from sglang.srt.managers import tp_worker  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401

    gc.freeze()
    running = 0
    for task in tasks:
        if running == PROCESSES:
            os.wait()
            running -= 1
        if os.fork() == 0:
            (Path(folder) / f"{task}.json").write_text(json.dumps(attempt(folder, task)))
            os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()
    print(json.dumps({task: json.loads((Path(folder) / f"{task}.json").read_text()) for task in tasks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
