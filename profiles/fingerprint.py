"""Fingerprints: the machine, models and versions of a measurement. A profile with another fingerprint is refused."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
"""Weights of a model that is a folder with config.json."""
SAMPLE_BYTES = 1 << 20
STEP_REVISION = {"cpu": 4, "cuda": 7}
"""Raise a device's number when a change to kernels or worker changes its step times: older profiles are then refused
and measured anew. Keep it otherwise, so that users keep their profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Two engines with equal fingerprints have the same step costs and confidences.

    device: its name, see `cpu_name`; for a GPU the driver's name. target: the served model, see `folder_digest`.
    cores: the process may run on; threads: torch computes with (both 0 on a GPU, where they hardly matter).
    drafter: its name; drafter_checkpoint: digest of its folder, "" without one. step_revision: see `STEP_REVISION`.
    instruction_set: of the compiled CPU kernels, "none" without them, "" on a GPU.
    """

    device: str
    cores: int
    threads: int
    target: str
    drafter: str
    gamma: int
    drafter_checkpoint: str
    dtype: str
    attention_backend: str
    instruction_set: str
    sglang: str
    step_revision: int

    def differences(self, here: Fingerprint) -> list[str]:
        """Return "field: its value, here another" for each field that differs."""
        stored, present = asdict(self), asdict(here)
        return [f"{name}: {stored[name]!r}, here {present[name]!r}" for name in stored if stored[name] != present[name]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cpu_name() -> str:
    """Return the CPU's name with family, model and stepping: virtual machines often omit the name's number."""
    wanted = ("model name", "cpu family", "model", "stepping")
    fields: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in wanted:
            fields.setdefault(key.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {fields[key]}" for key in wanted[1:] if key in fields]
    return f"{fields['model name']} ({', '.join(numbers)})" if numbers else fields["model name"]


def core_count() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def package_version(name: str) -> str:
    """Return the version of an installed package, "" without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def folder_digest(folder: str | Path) -> str:
    """Return 16 hex digits that identify a checkpoint folder.

    Hashes config.json and the size, the beginning (where safetensors describes its tensors) and the end of each file
    with weights: at most 2 MiB of a file. Raises FileNotFoundError if the folder has neither.
    """
    folder = Path(folder)
    patterns = (*WEIGHT_FILES, "*.gguf")
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    config = folder / "config.json"
    if not config.is_file() and not files:
        raise FileNotFoundError(f"{folder} has neither config.json nor weights")
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
