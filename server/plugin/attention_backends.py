"""SGLang's attention backends on NVIDIA GPUs: which of them verify requests of different lengths, in windows too.

All the rest compute gamma + 1 rows for every request, and would read and write beyond the batch. In SGLang 0.5.23,
`flashattention_backend.py` and `trtllm_mha_backend.py` follow `RaggedVerifyLayout`, the latter where it runs
its sm_100 kernels and not XQA, and without a cap on scores; `triton_backend.py` computes gamma + 1 rows. `flashinfer`
is ours on top of SGLang's (`cuda/flashinfer.py`), which plans without a model's cap on scores (sglang issue 33915).
`outrider` is all ours (`flat_attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.kernels.attention import MOST_CUDA_HEAD
from outrider.scheduler.buckets import TokenBuckets

if TYPE_CHECKING:
    import torch

OURS = "outrider"
"""The backend that runs our Triton kernels."""
Capability = tuple[int, int]
"""Compute capability of a GPU: (9, 0) is sm_90."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a model and its serving options on attention.

    latent: multi-head latent attention. capped: scores go through tanh. head: size of a head, 0: not known.
    float32: it is computed in 32 bits. narrow: keys and values are cached in 8 bits or fewer.
    chunked: some layers attend within chunks of the text (Llama 4).
    """

    latent: bool = False
    capped: bool = False
    head: int = 0
    float32: bool = False
    narrow: bool = False
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend.

    It leaves rows after the last request alone, so a step's size may be fixed before its lengths are known, and a graph
    of that size can run it.

    majors: of the compute capabilities that it runs on. capped: capped scores are exact.
    latent: majors on which it also computes multi-head latent attention.
    most_head: largest head size; None: as in SGLang. float32: computes in 32 bits, too.
    narrow: reads caches in 8 bits or fewer, as SGLang stores them.
    """

    majors: tuple[int, ...]
    capped: bool
    latent: tuple[int, ...] = ()
    most_head: int | None = None
    float32: bool = False
    narrow: bool = True


BACKENDS = {
    "fa3": BackendEntry(majors=(8, 9), capped=True, latent=(9,)),
    "trtllm_mha": BackendEntry(majors=(10,), capped=False),
    "flashinfer": BackendEntry(majors=(8, 9, 10, 12), capped=False),
    OURS: BackendEntry(majors=(8, 9, 10, 12), capped=True, most_head=MOST_CUDA_HEAD, float32=True, narrow=False),
}
DEFAULTS = {8: ("flashinfer", "fa3"), 9: ("fa3",), 10: ("trtllm_mha",), 12: ("flashinfer",)}
"""Backends by the GPU's major version; the first that fits is taken."""


def unfit(name: str, capability: Capability, needs: Needs) -> str | None:
    """Return the reason why a backend cannot verify here; None: it can."""
    major, minor = capability
    entry = BACKENDS.get(name)
    if entry is None:
        return "it takes every request to verify as many tokens"
    if major not in entry.majors:
        return f"it does not verify requests of different lengths on a GPU of compute capability {major}.{minor}"
    if needs.chunked:
        return "the model attends within chunks, which verification does not"
    if needs.latent and major not in entry.latent:
        return "the model has multi-head latent attention"
    if needs.capped and not entry.capped:
        return "the model caps its attention scores, which it leaves out"
    if entry.most_head is not None and needs.head > entry.most_head:
        return f"it takes heads of {entry.most_head} numbers at most, the model's have {needs.head}"
    if needs.float32 and not entry.float32:
        return "it computes in 16 bits, not in float32"
    if needs.narrow and not entry.narrow:
        return "it reads keys and values in the model's own type, not as --kv-cache-dtype says"
    return None


def fitting(capability: Capability, needs: Needs) -> list[str]:
    """Return backends that can verify here, the best first."""
    known = [*DEFAULTS.get(capability[0], ()), *BACKENDS]
    return [name for name in dict.fromkeys(known) if unfit(name, capability, needs) is None]


def check_taken(runner: Any) -> None:
    """Raise ValueError if SGLang has taken a backend that cannot verify, as it does for some models and caches. runner:
    SGLang's model runner of the target."""
    if str(runner.device).startswith("cpu"):
        return
    for name in (runner.prefill_attention_backend_str, runner.decode_attention_backend_str):
        if name not in BACKENDS:
            raise ValueError(
                f"for this model, or for its --kv-cache-dtype, SGLang takes the attention backend {name}, which cannot "
                f"verify drafts: it takes every request to verify as many tokens; {' and '.join(BACKENDS)} can"
            )


def commit_states(runner: Any, accept_lens: torch.Tensor) -> None:
    """Advance the recurrent states of a model, if it has any, by the first accept_lens [R] tokens just verified.
    runner: SGLang's model runner of the target."""
    commit = getattr(runner.attn_backend, "commit", None)  # only ours has it
    if commit is not None:
        commit(accept_lens)


def buckets_of(runner: Any, width: int) -> TokenBuckets | None:
    """Return the sizes to which steps are padded, and the largest with a graph; width: most tokens of a request.

    Returns None where a step is exactly as large as its drafts, for which the host waits for the GPU.
    runner: SGLang's model runner of the target. All ranks of tensor parallelism have the same.
    """
    if str(runner.device).startswith("cpu"):
        return None
    if runner.server_args.attention_backend not in BACKENDS:
        return None
    return TokenBuckets(runner.req_to_token_pool.size, width, max(captured_sizes(runner, width), default=0))


def captured_sizes(runner: Any, width: int = 1) -> list[int]:
    """Return numbers of requests, ascending, for which SGLang captures graphs of `width` tokens of each. Returns none
    on a CPU and where graphs are switched off."""
    if str(runner.device).startswith("cpu"):
        return []
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.model_executor.runner import get_batch_sizes_to_capture

    if check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
        return []
    return list(get_batch_sizes_to_capture(runner, width)[0])
