"""Timers of the proof's steps, and the file that each step writes."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = os.environ.get("PROOF_TINY") == "1"
"""A rehearsal: tiny sizes with meaningless numbers."""
PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "transformers")


def wait() -> None:
    """Wait until the device has finished all its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], repetitions: int = 300, rounds: int = 5) -> dict[str, float]:
    """Return microseconds of one call, medians of rounds: `host` until it returns, `whole` until the device is done,
    too."""
    repetitions, rounds = (3, 1) if TINY else (repetitions, rounds)
    for _ in range(min(5, repetitions)):
        run()
    host, whole = [], []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        host.append((time.perf_counter() - start) / repetitions * 1e6)
        wait()
        whole.append((time.perf_counter() - start) / repetitions * 1e6)
    return {"host": round(statistics.median(host), 2), "whole": round(statistics.median(whole), 2)}


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return `run` as a CUDA graph; without CUDA `run` itself."""
    if DEVICE != "cuda":
        return run
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def machine() -> dict[str, Any]:
    """Return the name of the device, its memory and driver, and the processor's cores."""
    facts: dict[str, Any] = {"device": "cpu", "cores": os.cpu_count()}
    if DEVICE == "cuda":
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
        queried = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        memory = properties.total_memory >> 20
        facts |= {"device": properties.name, "memory_mb": memory, "driver_and_clocks": queried}
    return facts


def write(name: str, results: Any, **more: Any) -> None:
    """Write the record of a step, in the form of profiles/results, and print it. It is written anew as results come."""
    record = {
        "question": f"gpu {name}",
        "command": f"python proof.py, step {name}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES},
        "commit": os.environ.get("PROOF_COMMIT", ""),
        "machine": machine(),
        "weights": {},
        **more,
        "results": results,
    }
    folder = Path(os.environ.get("PROOF_RECORDS", "."))
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    (folder / f"gpu-{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
