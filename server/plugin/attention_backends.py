"""SGLang's attention backends on NVIDIA GPUs: which of them verify requests of different lengths as they are.

The others take every request to have gamma + 1 rows, whatever is said, and would read and write beyond the batch. By
reading of SGLang 0.5.21: `flashattention_backend.py` and `trtllm_mha_backend.py` follow `RaggedVerifyLayout`, the
latter where it runs its sm_100 kernels and not XQA; `flashinfer_backend.py` asks the spec input for its index arrays,
outside graphs, and leaves the window out of them; `triton_backend.py` computes gamma + 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.scheduler.planners.tiers import Tiers

Capability = tuple[int, int]
"""Of a GPU: (9, 0) is sm_90."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One backend.

    majors: of the compute capabilities that it runs on. padded: rows behind the last request are left alone, so that a
    step may have a size that is decided before its lengths are known; otherwise it waits for them.
    windows: sliding windows are exact. latent: also for multi-head latent attention, on these majors.
    """

    majors: tuple[int, ...]
    padded: bool
    windows: bool
    latent: tuple[int, ...] = ()


BACKENDS = {
    "fa3": Entry(majors=(8, 9), padded=True, windows=True, latent=(9,)),
    "trtllm_mha": Entry(majors=(10,), padded=True, windows=True),
    "flashinfer": Entry(majors=(8, 9, 10, 12), padded=False, windows=False),
}
DEFAULTS = {8: ("flashinfer", "fa3"), 9: ("fa3",), 10: ("trtllm_mha",), 12: ("flashinfer",)}
"""By major, the first that fits is taken."""


def unfit(name: str, capability: Capability, *, windowed: bool, latent: bool) -> str | None:
    """Why a backend cannot verify here; None: it can.

    windowed: some layers of the model see a window only. latent: it has multi-head latent attention.
    """
    major, minor = capability
    entry = BACKENDS.get(name)
    if entry is None:
        return "it takes every request to verify as many tokens"
    if major not in entry.majors:
        return f"it does not verify requests of different lengths on a GPU of compute capability {major}.{minor}"
    if latent and major not in entry.latent:
        return "the model has multi-head latent attention"
    if windowed and not entry.windows:
        return "the model has sliding windows, which it leaves out of verification"
    return None


def fitting(capability: Capability, *, windowed: bool, latent: bool) -> list[str]:
    """Backends that can verify here, the best first."""
    known = [*DEFAULTS.get(capability[0], ()), *BACKENDS]
    return [name for name in dict.fromkeys(known) if unfit(name, capability, windowed=windowed, latent=latent) is None]


def tiers_of(runner: Any, requests: int, width: int) -> Tiers | None:
    """Sizes of which a step has one; None where a step is exactly as large as its drafts, which a GPU is waited for.

    runner: SGLang's model runner of the target. Ranks of tensor parallelism besides the first learn a step's lengths,
    not its size.
    """
    if str(runner.device).startswith("cpu") or runner.tp_group.world_size > 1:
        return None
    entry = BACKENDS.get(runner.server_args.attention_backend)
    return Tiers(requests, width) if entry is not None and entry.padded else None
