"""Launches of a decode step on a GPU that is not there; prints their numbers as JSON. A program of its own for the
reason of `decode_on_absent_gpu.py`, of which it runs the steps.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import absent_gpu
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
import decode_on_absent_gpu as steps
from decode_batches import BATCHES, batch_of
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

REQUESTS = 1, 8, 32
DRAFTERS = "dspark", "dspark in graphs", "dspark begun in graphs"
SIZES = 1, 2, 4, 8, 32


def launches(drafter: str, kind: str, requests: int, device: torch.device, *, drafts: bool = True) -> int:
    """Launches of a step by a GPU's kernels; a graph is one, and the target's forward without one is not counted.
    drafts: False: speculation is off for all."""
    rows, lengths, replays = np.arange(1, requests + 1), [20] * requests, steps.Replays()
    at = SimpleNamespace(numpy=lambda: rows)
    with absent_gpu.running(), steps.kernels(device), mock.patch.object(steps, "GRAPHS", SIZES):
        worker = steps.make_worker(drafter, "asynchronous", device, replays.record)
        worker._target_worker.forward_batch_generation = lambda batch, **_: replays.forward(worker, batch)
        worker.requests.longest *= drafts
        batch = batch_of(kind, lengths, at, device)
        worker.requests.admit(batch.reqs, batch.req_pool_indices, rows)
        info = batch.sampling_info
        for _ in range(3):  # the first takes what stays the same while its requests run
            replays.count = 0
            batch = batch_of(kind, lengths, at, device)
            batch.sampling_info = info
            with absent_gpu.watching() as watched:
                worker._decode(batch, lambda _: None, None)
    return watched.launches + replays.count


def main() -> None:
    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    device = absent_gpu.install()
    drafted = {
        f"{drafter}, {kind}, {requests}": launches(drafter, kind, requests, device)
        for drafter in DRAFTERS
        for kind in BATCHES
        for requests in (REQUESTS if drafter == "dspark in graphs" else REQUESTS[1:2])
    }
    undrafted = {
        f"{kind}, {requests}": launches("dspark in graphs", kind, requests, device, drafts=False)
        for kind in BATCHES
        for requests in REQUESTS
    }
    print(json.dumps({"drafted": drafted, "undrafted": undrafted}))


if __name__ == "__main__":
    main()
