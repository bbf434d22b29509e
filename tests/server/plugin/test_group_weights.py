"""AWQ and GPTQ folders, loaded by SGLang with our plugin: products equal the expanded weights', bit for bit."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loads_groups
import pytest
import torch
from loads_groups import digest, rows_for
from own_process import found_by_fork
from safetensors.torch import save_file

from outrider.kernels.linear import pack, packed_linear
from outrider.server.errors import UserError
from outrider.server.model.target import Model
from outrider.server.settings import model_kinds
from outrider.server.settings.settings import Settings

HIDDEN, MLP, HEADS, KV_HEADS, WIDTH, VOCAB, LAYERS = 128, 256, 4, 2, 32, 96, 2
PRODUCTS = {
    "self_attn.q_proj": (HEADS * WIDTH, HIDDEN), "self_attn.k_proj": (KV_HEADS * WIDTH, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * WIDTH, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * WIDTH),
    "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP),
}  # fmt: skip
JOINED = {
    "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
"""SGLang's layers -> the checkpoint's."""


@dataclass(frozen=True)
class Kind:
    config: dict[str, Any]
    group: int
    scales: torch.dtype


KINDS = {
    "awq": Kind({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, 64, torch.float16),
    "gptq": Kind({"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}, 32, torch.float16),
    "gptq_sym": Kind({"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}, 128, torch.bfloat16),
    "gptq_v2": Kind(
        {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"},
        32,
        torch.float16,
    ),
}


def words(numbers: torch.Tensor, order: list[int]) -> torch.Tensor:
    """numbers [rows, 8 n] as int32 [rows, n]: a word's lowest four bits hold number order[0] of its eight."""
    eights = numbers.long().unflatten(-1, (-1, 8))[..., order]
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)


def random_weight(kind: Kind, outputs: int, depth: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The checkpoint's tensors of one product, and their weight."""
    generator = torch.Generator().manual_seed(seed)
    groups, method = depth // kind.group, kind.config["quant_method"]
    codes = torch.randint(0, 16, (depth, outputs), generator=generator)
    zeros = torch.randint(1, 16, (groups, outputs), generator=generator)
    if kind.config.get("sym"):
        zeros[:] = 8
    scales = (torch.rand(groups, outputs, generator=generator) / 100 + 0.001).to(kind.scales)
    if method == "awq":  # github.com/mit-han-lab/llm-awq, qmodule.py: pack order 0 2 4 6 1 3 5 7, along the outputs
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {"qweight": words(codes, order), "qzeros": words(zeros, order)}
    else:  # github.com/AutoGPTQ, qlinear_cuda.py: in order, codes along the depth, zeros - 1 along the outputs
        stored = zeros if kind.config.get("checkpoint_format") == "gptq_v2" else zeros - 1
        tensors = {"qweight": words(codes.T, list(range(8))).T.contiguous(), "qzeros": words(stored, list(range(8)))}
        tensors["g_idx"] = (torch.arange(depth) // kind.group).int()
    tensors["scales"] = scales
    exact = (codes.view(groups, -1, outputs) - zeros[:, None]) * scales.double()[:, None]
    return tensors, exact.view(depth, outputs).T.bfloat16()


def write_folder(kind: Kind, folder: Path) -> dict[str, str]:
    """Write a random model; returns its products' digests, by SGLang's layer names."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "rms_norm_eps": 1e-5,
        "num_key_value_heads": KV_HEADS, "hidden_act": "silu", "max_position_embeddings": 128,
        "tie_word_embeddings": False, "torch_dtype": "float16",
        "quantization_config": kind.config | {"group_size": kind.group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    norms = [
        "model.norm",
        *(f"model.layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention")),
    ]
    tensors = {f"{name}.weight": torch.ones(HIDDEN).half() for name in norms}
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(VOCAB, HIDDEN).half()
    meant = {}
    for i in range(LAYERS):
        for j, (name, shape) in enumerate(PRODUCTS.items()):
            stored, meant[f"model.layers.{i}.{name}"] = random_weight(kind, *shape, seed=100 * i + j)
            tensors |= {f"model.layers.{i}.{name}.{part}": value for part, value in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    products = {}
    for i in range(LAYERS):
        for layer, parts in JOINED.items():
            weight = torch.cat([meant[f"model.layers.{i}.{part}"] for part in parts])
            products[f"model.layers.{i}.{layer}"] = digest(packed_linear(rows_for(weight.shape[1]), pack(weight)))
    return products


@pytest.mark.slow
def test_products_of_loaded_checkpoints(tmp_path: Path) -> None:
    expected = [write_folder(kind, tmp_path / name) for name, kind in KINDS.items()]
    program = Path(loads_groups.__file__)
    folders = [str(tmp_path / name) for name in KINDS]
    for name, products, loaded in zip(KINDS, expected, found_by_fork(program, *folders), strict=True):
        assert loaded == products, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "fp8"}, "it is fp8"),
        ({"bits": 8}, "8 bits"),
        ({"group_size": -1}, "groups of -1"),
        ({"desc_act": True}, "desc_act"),
        ({"checkpoint_format": "marlin"}, "format marlin"),
        ({"lm_head": True}, "quantised head"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "rules of their own"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ version gemv"),
        ({"quant_method": "awq", "zero_point": False}, "without zero points"),
    ],
)
def test_unsupported_checkpoints_are_refused_before_the_start(changes: dict[str, Any], message: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    model_kinds.check_quantized(Settings(device="cpu"), Model("", "m", {"quantization_config": config}, None))
    with pytest.raises(UserError, match=message):
        model_kinds.check_quantized(
            Settings(device="cpu"), Model("", "m", {"quantization_config": config | changes}, None)
        )
