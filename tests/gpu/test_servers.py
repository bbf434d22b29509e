"""Servers on a GPU with each attention backend under mixed load: no failures, flat memory, graphs.

`make test-gpu` also compares answers, by tests/lossless.
"""

import re
import subprocess
from pathlib import Path

import httpx
import pytest
import torch
from running import OUTRIDER, Server

from outrider.server.model import target
from outrider.server.plugin.attention_backends import fitting
from outrider.server.settings import gpu_attention

pytestmark = pytest.mark.server

PASSES = re.compile(r'^sglang:cuda_graph_passes_total\{[^}]*mode="([a-z_]+)"[^}]*\} (\S+)', re.MULTILINE)
OVERLAP = re.compile(r"disable_overlap_schedule'?(=|: )False")
MOST_GROWTH = 64 << 20
"""Bytes: SGLang takes its memory at the start, and torch keeps its peak."""


def soak(server: Server, minutes: float) -> None:
    """Mixed load, with aborted requests; fails if a request fails or a process grows."""
    command = [OUTRIDER, "bench", "soak", "--url", server.url, "--minutes", str(minutes), "--no-compare"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def used() -> int:
    """Bytes of the GPU's memory held by any process."""
    free, whole = torch.cuda.mem_get_info()
    return whole - free


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "trtllm_mha", "outrider"])
def test_mixed_load(backend: str, tmp_path: Path) -> None:
    if backend not in fitting(torch.cuda.get_device_capability(), gpu_attention.needs_of(target.find(None).config)):
        pytest.skip(f"{backend} does not run on this GPU")
    server = Server(tmp_path / "log", "--log-level", "info", "--", "--attention-backend", backend)
    try:
        server.wait_until_ready()
        soak(server, 0.4)
        before = used()
        soak(server, 0.8)
        assert used() - before <= MOST_GROWTH
        passes = PASSES.findall(httpx.get(f"{server.url}/metrics", timeout=30).text)
    finally:
        server.stop()
    assert sum(float(count) for mode, count in passes if mode == "decode_cuda_graph") > 0
    assert OVERLAP.search(server.output())
