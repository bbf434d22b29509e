"""The attention backend chosen for a compute capability."""

from types import SimpleNamespace

import pytest
from refusals import refuses

from outrider.server.errors import UserError
from outrider.server.model.target import Model
from outrider.server.plugin.attention_backends import check_taken
from outrider.server.settings.gpu_attention import choose

PLAIN = {"num_hidden_layers": 2}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
LATENT = {"kv_lora_rank": 512}
CAPPED = {"attn_logit_softcapping": 50.0, "head_dim": 128}
WIDE = {"hidden_size": 5120, "num_attention_heads": 8}
FLOAT32, SMALL_CACHES = {"dtype": "float32"}, ("fp8_e4m3", "fp8_e5m2", "nvfp4")


def arguments(capability, config=PLAIN, dtype="auto", **given):
    return choose(capability, Model("here", "here", config, None), given, dtype)


def chosen(capability, config=PLAIN, dtype="auto", **given):
    return arguments(capability, config, dtype, **given).get("attention_backend")


@pytest.mark.parametrize(
    ("capability", "config", "backend"),
    [
        ((8, 0), PLAIN, "flashinfer"),
        ((8, 9), PLAIN, "flashinfer"),
        ((8, 0), WINDOWED, "flashinfer"),
        ((8, 0), CAPPED, "fa3"),
        ((9, 0), PLAIN, "fa3"),
        ((9, 0), WINDOWED, "fa3"),
        ((9, 0), LATENT, "fa3"),
        ((10, 0), PLAIN, "trtllm_mha"),
        ((10, 3), WINDOWED, "trtllm_mha"),
        ((10, 0), CAPPED, "outrider"),
        ((12, 0), PLAIN, "flashinfer"),
        ((12, 0), WINDOWED, "flashinfer"),
        ((12, 0), CAPPED, "outrider"),
        ((12, 0), CAPPED | {"head_dim": 256}, "outrider"),
    ],
)
def test_every_gpu_gets_a_backend_that_verifies_correctly(capability, config, backend):
    assert chosen(capability, config) == backend


@pytest.mark.parametrize(
    ("capability", "config", "backend", "says"),
    [
        ((9, 0), PLAIN, "triton", "use fa3 or flashinfer or outrider"),
        ((9, 0), PLAIN, "trtllm_mha", "compute capability 9.0; use fa3 or flashinfer or outrider"),
        ((9, 0), PLAIN, "torch_native", "use fa3 or flashinfer or outrider"),
        ((9, 0), CAPPED, "flashinfer", "caps its attention scores, which it leaves out; use fa3 or outrider"),
        ((9, 0), WIDE, "outrider", "heads of 512 numbers at most, the model's have 640; use fa3 or flashinfer"),
        ((10, 0), PLAIN, "fa3", "compute capability 10.0; use trtllm_mha or flashinfer or outrider"),
        ((12, 0), PLAIN, "trtllm_mha", "compute capability 12.0; use flashinfer or outrider"),
    ],
)
@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_other_backends_are_refused_with_an_alternative(capability, config, backend, says, flag):
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} {backend} cannot verify drafts here: .*{says}$"):
        chosen(capability, config, **{flag: backend})


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_float32_is_for_our_own(major):
    assert arguments((major, 0), dtype="float32") == {
        "attention_backend": "outrider", "disable_hybrid_swa_memory": True, "disable_prefill_cuda_graph": True
    }  # fmt: skip
    theirs = {"dtype": "float32", "attention_backend": "flashinfer"}
    refuses("it computes in 16 bits, not in float32; use outrider", chosen, (major, 0), **theirs)


@pytest.mark.parametrize("cache", SMALL_CACHES)
def test_our_own_reads_caches_of_the_models_type_alone(cache):
    assert chosen((9, 0), kv_cache_dtype=cache) == "fa3"
    assert chosen((9, 0), attention_backend="outrider", kv_cache_dtype="bf16") is None
    ours = {"attention_backend": "outrider", "kv_cache_dtype": cache}
    refuses("not as --kv-cache-dtype says; use fa3 or flashinfer", chosen, (9, 0), **ours)


def test_a_backend_that_sglang_would_replace_is_refused():
    def runner(device, prefill, decode):
        names = {"prefill_attention_backend_str": prefill, "decode_attention_backend_str": decode}
        return SimpleNamespace(device=device, **names)

    check_taken(runner("cuda", "fa3", "flashinfer"))
    check_taken(runner("cpu", "torch_native", "torch_native"))
    for taken in (("triton", "fa3"), ("fa3", "triton")):
        with pytest.raises(
            ValueError, match=r"SGLang takes the attention backend triton, which .*; fa3 and trtllm_mha"
        ):
            check_taken(runner("cuda", *taken))


def test_a_requested_backend_that_fits_stays():
    assert chosen((9, 0), attention_backend="flashinfer") is None
    assert chosen((8, 0), attention_backend="fa3") is None
    assert chosen((9, 0), decode_attention_backend="flashinfer") == "fa3"
    assert arguments((9, 0), attention_backend="outrider").keys() == {
        "disable_hybrid_swa_memory", "disable_prefill_cuda_graph"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "config", "given", "says"),
    [
        ((7, 5), PLAIN, {}, "of a model on a GPU of compute capability 7.5; one of 9.0 has one$"),
        ((12, 0), CAPPED | {"head_dim": 640}, {}, "with capped attention scores on a GPU .* 12.0; one of 9.0 has"),
        ((8, 0), LATENT, {}, "of a model with multi-head latent attention on"),
        ((9, 0), {"attention_chunk_size": 8192}, {}, "of a model with attention within chunks on a GPU .* 9.0$"),
        ((9, 0), LATENT, FLOAT32, r"with multi-head latent attention and float32 weights on a GPU .* 9\.0$"),
        *(((9, 0), PLAIN, FLOAT32 | {"kv_cache_dtype": cache}, "float32 weights and a cache in 8 bits or fewer on")
          for cache in SMALL_CACHES),
    ],
)  # fmt: skip
def test_the_error_says_that_no_backend_fits(capability, config, given, says):
    refuses(says, chosen, capability, config, **given)
