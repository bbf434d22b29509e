"""Which attention backend a GPU gets, without one: its compute capability is handed in."""

from __future__ import annotations

import pytest

from outrider.server.engine.gpu_attention import choose, has_windows
from outrider.server.engine.target import Model
from outrider.server.errors import UserError

PLAIN = {"num_hidden_layers": 2}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
LATENT = {"kv_lora_rank": 512}


def chosen(capability, config=PLAIN, **given):
    return choose(capability, Model("here", "here", config, None), given).get("attention_backend")


@pytest.mark.parametrize(
    ("capability", "config", "backend"),
    [
        ((8, 0), PLAIN, "flashinfer"),
        ((8, 9), PLAIN, "flashinfer"),
        ((8, 0), WINDOWED, "fa3"),
        ((9, 0), PLAIN, "fa3"),
        ((9, 0), WINDOWED, "fa3"),
        ((9, 0), LATENT, "fa3"),
        ((10, 0), PLAIN, "trtllm_mha"),
        ((10, 3), WINDOWED, "trtllm_mha"),
        ((12, 0), PLAIN, "flashinfer"),
    ],
)
def test_every_gpu_gets_one_that_verifies_as_it_should(capability, config, backend):
    assert chosen(capability, config) == backend


@pytest.mark.parametrize(
    ("capability", "config", "backend", "says"),
    [
        ((9, 0), PLAIN, "triton", "use fa3 or flashinfer"),
        ((9, 0), PLAIN, "trtllm_mha", "compute capability 9.0; use fa3 or flashinfer"),
        ((9, 0), PLAIN, "torch_native", "use fa3 or flashinfer"),
        ((9, 0), WINDOWED, "flashinfer", "sliding windows, which it leaves out of verification; use fa3"),
        ((10, 0), PLAIN, "fa3", "compute capability 10.0; use trtllm_mha or flashinfer"),
        ((12, 0), PLAIN, "trtllm_mha", "compute capability 12.0; use flashinfer"),
    ],
)
@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_others_are_refused_by_name_with_what_to_use(capability, config, backend, says, flag):
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')} {backend} cannot verify drafts here: .*{says}$"):
        chosen(capability, config, **{flag: backend})


def test_one_that_was_asked_for_and_fits_stays():
    assert chosen((9, 0), attention_backend="flashinfer") is None
    assert chosen((8, 0), attention_backend="fa3") is None
    assert chosen((9, 0), decode_attention_backend="flashinfer") == "fa3"


@pytest.mark.parametrize(
    ("capability", "config", "says"),
    [
        ((7, 5), PLAIN, "of a model on a GPU of compute capability 7.5"),
        ((12, 0), WINDOWED, "of a model with sliding windows on a GPU of compute capability 12.0"),
        ((8, 0), LATENT, "of a model with multi-head latent attention on"),
    ],
)
def test_where_none_fits_that_is_said(capability, config, says):
    with pytest.raises(UserError, match=says):
        chosen(capability, config)


def test_windows_are_read_from_the_config():
    assert has_windows({"sliding_window": 4096})
    assert not has_windows({"sliding_window": 4096, "use_sliding_window": False})
    assert not has_windows({"sliding_window": None})
    assert not has_windows({"sliding_window": 512, "layer_types": ["full_attention"]})
