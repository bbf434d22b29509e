"""Check that all nodes of one engine were started alike, before they load a model.

Settings that decide a batch's number of tokens must be the same everywhere: otherwise ranks wait for each other for
ever. Decisions of the first rank alone (drafts, plans, seeds) may differ: they are broadcast.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outrider.profiles.fingerprint import folder_digest

from .config import PluginConfig

PACKAGES = ("outrider", "sglang", "torch")
FLAGS = {
    "dtype": "--dtype",
    "context_length": "--context-length",
    "max_total_tokens": "--max-total-tokens",
    "max_running_requests": "--max-running-requests",
    "chunked_prefill_size": "--chunked-prefill-size",
    "disable_radix_cache": "--disable-radix-cache",
}
"""Settings of SGLang's that decide batches, and their flags here."""
SGLANGS = (
    "attention_backend", "page_size", "kv_cache_dtype", "schedule_policy", "schedule_conservativeness",
    "mem_fraction_static", "quantization",
)  # fmt: skip
"""More settings, which are flags of SGLang's."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.distributed.bootstrap.init_parallel_runtime", _meet, HookType.AROUND)


def _meet(original: Any, *, server_args: Any, **others: Any) -> Any:
    """Compare settings after SGLang's ranks have met."""
    returned = original(server_args=server_args, **others)
    from sglang.srt.runtime_context import get_parallel

    if server_args.nnodes > 1:
        world = get_parallel().world_group
        nodes: list[Any] = [None] * world.world_size
        here = server_args.node_rank, settings(server_args, PluginConfig.from_env())
        torch.distributed.all_gather_object(nodes, here, world.cpu_group)
        if difference := first_difference(nodes):
            raise ValueError(difference)
    return returned


def settings(server_args: Any, config: PluginConfig) -> dict[str, Any]:
    """Return the settings that must be the same on every node, by their names for users."""
    values: dict[str, Any] = {f"{package}'s version": version(package) for package in PACKAGES}
    values |= {name: getattr(server_args, field) for field, name in FLAGS.items()}
    values |= {"SGLang's --" + field.replace("_", "-"): getattr(server_args, field) for field in SGLANGS}
    values |= {
        "the model": digest(server_args.model_path),
        "SGLang's --cuda-graph-max-bs-decode": most_in_graphs(server_args.cuda_graph_config),
        "--drafter": config.drafter,
        "--gamma": config.gamma,
        "--quantization": config.quantization,
        "--activations": config.activations,
        "--max-pause": config.max_pause,
    }
    return values


def most_in_graphs(graphs: Any) -> int:
    """Return the most requests with captured graphs. graphs: SGLang's CudaGraphConfig; on a CPU it may be None."""
    return 0 if graphs is None or graphs.decode.backend == "disabled" else graphs.decode.max_bs


def digest(model: str) -> str:
    """Return the digest of a model's folder; the name of a model of the hub."""
    return folder_digest(model) if Path(model).is_dir() else model


def first_difference(nodes: list[tuple[int, dict[str, Any]]]) -> str | None:
    """Return a line about the first setting that differs from node 0. nodes: of each rank its node's number, and its
    `settings`."""
    (_, first), *further = nodes
    for node, node_has in further:
        for name, value in first.items():
            if node_has[name] != value:
                return f"node {node} has {node_has[name]!r} for {name}, node 0 {value!r}; start all nodes with the same"
    return None
