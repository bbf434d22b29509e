"""SGLang's configuration and groups of a single rank, without an engine."""

import tempfile
from typing import Any

from sglang.srt.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs


def publish_alone(**arguments: Any) -> ServerArgs:
    """Make this process the only scheduler, on a CPU, of a server with these arguments; returns all of them."""
    made = ServerArgs(**arguments, device="cpu")
    publish(made, role="scheduler", ranks=SpawnRanks(world_rank=0))
    if not model_parallel_is_initialized():
        store = f"file://{tempfile.mkdtemp()}/ranks"
        init_distributed_environment(world_size=1, rank=0, distributed_init_method=store, backend="gloo")
        initialize_model_parallel()
    return made
