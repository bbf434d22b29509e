"""The attention backend of a GPU: chosen by its compute capability and the model, or refused with an alternative."""

import re
from typing import Any

from ..errors import UserError
from ..model.target import Model
from ..plugin.attention_backends import OURS, Capability, Needs, fitting, unfit

PREFILLS = (*(4, 8, 16, 32, 64, 128, 192, 256, 384), *range(512, 1024, 128), *range(1024, 2049, 256))
"""Tokens of prefills for which graphs are captured: half of SGLang's list, because each graph takes time at start. From
512 tokens on padding takes time: it is less than a fifth."""
PREFILL_FLAGS = ("cuda_graph_bs_prefill", "cuda_graph_max_bs_prefill", "cuda_graph_config")
"""SGLang's flags that say which prefills are captured."""
SCATTERING = ("moe_a2a_backend", "moe_dense_tp_size")
"""SGLang's flags that divide a step's tokens among ranks; its graphs then take multiples of the ranks alone."""
FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""SGLang's flags of backends; verification may run by any of them."""


def choose(capability: Capability, model: Model, given: dict[str, Any], dtype: str = "auto") -> dict[str, Any]:
    """Choose SGLang's arguments. given: the command line's, by the names of their fields. dtype: of `--dtype`.

    Raises UserError for a backend that cannot verify requests of different lengths here, naming backends that can.
    """
    needs = needs_of(model.config, dtype, given.get("kv_cache_dtype"))
    usable = fitting(capability, needs)
    if not usable:
        elsewhere = "; one of 9.0 has one" if fitting((9, 0), needs) else ""
        raise UserError(
            f"no attention backend verifies drafts of a model{_said(needs)} on a "
            f"GPU of compute capability {'.'.join(map(str, capability))}{elsewhere}"
        )
    for flag in FLAGS:
        name = given.get(flag)
        if name is not None and (reason := unfit(name, capability, needs)) is not None:
            raise UserError(
                f"--{flag.replace('_', '-')} {name} cannot verify drafts here: {reason}; use {' or '.join(usable)}"
            )
    chosen: dict[str, Any] = {} if given.get("attention_backend") else {"attention_backend": usable[0]}
    if OURS in {usable[0] if chosen else None, *(given.get(flag) for flag in FLAGS)}:
        # Our backend has one KV slot a token for all layers, and no metadata for SGLang's graphs of prefills.
        chosen |= {"disable_hybrid_swa_memory": True, "disable_prefill_cuda_graph": True}
    return chosen


def graphs(backend: str | None, given: dict[str, Any], *, ranks: int, adapters: bool = False) -> dict[str, Any]:
    """Return SGLang's arguments of CUDA graphs: of prefills, and of verifications if their steps have buckets.

    backend: None without verification. given: as for `choose`. ranks: of tensor parallelism. adapters: some are served;
    SGLang then starts no graphs of verifications.
    """
    if backend is None or adapters or (ranks > 1 and any(given.get(flag) for flag in SCATTERING)):
        return {"disable_cuda_graph": True}
    return {} if any(given.get(flag) for flag in PREFILL_FLAGS) else {"cuda_graph_bs_prefill": list(PREFILLS)}


def needs_of(config: dict[str, Any], dtype: str = "auto", cache: str | None = None) -> Needs:
    """Return a model's needs of attention, by its config.json. cache: SGLang's --kv-cache-dtype."""
    heads = config.get("num_attention_heads") or 0
    return Needs(
        latent=bool(config.get("kv_lora_rank")),
        capped=bool(config.get("attn_logit_softcapping")),
        head=config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0),
        float32=dtype == "float32",
        chunked=bool(config.get("attention_chunk_size")),
        narrow=bool(re.match("(fp|nvfp|mxfp|int)[48]", cache or "")),
    )


def _said(needs: Needs) -> str:
    special = ["multi-head latent attention"] * needs.latent + ["capped attention scores"] * needs.capped
    special += ["attention within chunks"] * needs.chunked
    special += ["float32 weights"] * needs.float32 + ["a cache in 8 bits or fewer"] * needs.narrow
    return f" with {' and '.join(special)}" if special else ""
