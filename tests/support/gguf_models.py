"""Tiny random models of transformers, and GGUF files of them as llama.cpp's converter writes them.

The converter's order of query and key rows, and its factors of rotary positions, are repeated here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny_gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS, CONTEXT, EXPERTS = 64, 4, 2, 32, 96, 4, 512, 8
PROMPT = [9, 100, 33, 41, 7, 200, 66, 54, 120, 13, 250, 31, 77, 18, 93, 205, 140, 36, 8, 111, 64, 222, 19, 85]
"""Longer than the sliding windows."""


@dataclass(frozen=True)
class Model:
    """config: fields of transformers' configuration besides the common ones. fields: the file's metadata, likewise,
    without the architecture before their names. permuted: query and key rows lie in pairs. norms_from_one: the file's
    norms are 1 larger. tensors: further ones."""

    config_class: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    norms_from_one: bool = False

    def build(self) -> PreTrainedModel:
        """The model with the same random weights every time, in float32."""
        config = getattr(transformers, self.config_class)(**self.shape())
        return drawn(AutoModelForCausalLM.from_config(config, dtype=torch.float32), not self.norms_from_one)

    def shape(self) -> dict[str, Any]:
        shape = {
            "vocab_size": len(tiny_gguf.tokens()), "hidden_size": WIDTH, "intermediate_size": MLP,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "bos_token_id": 0,
            "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "attn_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        }  # fmt: skip
        return shape | dict(self.config)


def drawn(model: PreTrainedModel, norms_of_one: bool = True) -> PreTrainedModel:
    """Give the model random weights, norms around one or zero, each a value of bfloat16."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = float(name.endswith("norm.weight") and norms_of_one)
            parameter.normal_(plain, 0.12).copy_(parameter.bfloat16())
    return model.eval()


def _llama_3() -> tuple[dict[str, Any], np.ndarray]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(head_dim=HEAD, rope_parameters=rope)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5000.0 ** -(np.arange(0, HEAD, 2, dtype=np.float32) / HEAD)
    return rope, (plain / inverse.numpy()).astype(np.float32)


LLAMA_3, LLAMA_3_FACTORS = _llama_3()


WINDOW = 12
GEMMA_3 = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": HEAD, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"],
    "num_hidden_layers": 7, "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    },
}  # fmt: skip


def _phi3(original: int, share: float = 1.0) -> Model:
    """LongRoPE of a model trained on `original` tokens that rotates a share of each head."""
    rotated = int(HEAD * share)
    factors = {"long": [1 + 0.4 * i for i in range(rotated // 2)], "short": [1 + 0.05 * i for i in range(rotated // 2)]}
    rope = {"rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": share}
    rope |= {"original_max_position_embeddings": original} | {f"{name}_factor": factors[name] for name in factors}
    config = {"rope_parameters": rope, "original_max_position_embeddings": original, "tie_word_embeddings": True}
    config |= {"num_attention_heads": WIDTH // HEAD, "num_key_value_heads": 1, "sliding_window": None}
    attention = float(np.sqrt(1 + np.log(CONTEXT / original) / np.log(original)))
    fields = {"rope.dimension_count": rotated, "rope.scaling.original_context_length": original}
    tensors = {f"rope_factors_{name}.weight": np.array(factors[name], np.float32) for name in factors}
    return Model("Phi3Config", "phi3", config, fields | {"rope.scaling.attn_factor": attention}, tensors=tensors)


TIED, EVEN, ONE_KV_HEAD = {"tie_word_embeddings": True}, {"head_dim": WIDTH // HEADS}, {"num_key_value_heads": 1}
UNBIASED = {"attention_bias": False}
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
GRANITE = {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
LINEAR_FIELDS = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
WINDOWED = {"attention.sliding_window": WINDOW}
MODELS = {
    "llama": Model("LlamaConfig", "llama", permuted=True),
    "llama3": Model(
        "LlamaConfig", "llama", {"rope_parameters": LLAMA_3} | TIED, permuted=True,
        tensors={"rope_freqs.weight": LLAMA_3_FACTORS},
    ),
    "mistral": Model("MistralConfig", "llama", {"sliding_window": None}, permuted=True),
    "qwen2": Model("Qwen2Config", "qwen2", {"num_attention_heads": 2} | ONE_KV_HEAD | TIED),
    "qwen3": Model("Qwen3Config", "qwen3", UNBIASED),
    "qwen3moe": Model(
        "Qwen3MoeConfig", "qwen3moe", MOE | UNBIASED | {"decoder_sparse_step": 1},
        {"expert_count": EXPERTS, "expert_used_count": 3, "expert_feed_forward_length": 32},
    ),
    "smollm3": Model("SmolLM3Config", "smollm3", EVEN | TIED, permuted=True),
    "granite": Model(
        "GraniteConfig", "granite", GRANITE | EVEN | TIED,
        {"attention.scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}, permuted=True,
    ),
    "gemma3": Model(
        "Gemma3TextConfig", "gemma3", GEMMA_3, LINEAR_FIELDS | WINDOWED | {"rope.freq_base_swa": 500.0},
        norms_from_one=True,
    ),
    "phi3": Model("Phi3Config", "phi3", {"sliding_window": WINDOW} | EVEN, WINDOWED),
    "phi3-long": _phi3(16),
    "phi3-partial": _phi3(CONTEXT // 2, 0.5),
    "olmo2": Model("Olmo2Config", "olmo2", EVEN),
    "yarn": Model(
        "Qwen3Config", "qwen3", UNBIASED | {"rope_parameters": YARN},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "linear": Model("LlamaConfig", "llama", {"rope_parameters": LINEAR}, LINEAR_FIELDS, permuted=True),
}  # fmt: skip


def write(name: str, path: Path, kind: str = "F32", turn_end: int | None = None) -> PreTrainedModel:
    """Write the file, its matrices in blocks of a kind. Returns the model with the dequantised weights, rounded to
    bfloat16.

    turn_end: the one token that ends an answer.
    """
    plan = MODELS[name]
    model = plan.build()
    config = model.config
    head = getattr(config, "head_dim", None) or WIDTH // config.num_attention_heads
    fields = {
        "context_length": CONTEXT, "embedding_length": WIDTH, "block_count": config.num_hidden_layers,
        "feed_forward_length": MLP, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    }  # fmt: skip
    if head != WIDTH // config.num_attention_heads:
        fields |= {"attention.key_length": HEAD, "attention.value_length": HEAD}
        fields |= {"rope.dimension_count": HEAD} if plan.architecture == "llama" else {}
    writer = gguf.GGUFWriter(path, plan.architecture)
    tiny_gguf.add_fields(writer, {**fields, **plan.fields}, f"{plan.architecture}.")
    tiny_gguf.add_tokenizer(writer, "qwen2", {"eos": 2} if turn_end is None else {"eot": turn_end})
    for tensor, values in plan.tensors.items():
        writer.add_tensor(tensor, values)
    with torch.no_grad():
        for tensor, parameter in _tensors(plan, model):
            of_kind = gguf.GGMLQuantizationType[kind if parameter.ndim > 1 and "ffn_gate_inp" not in tensor else "F32"]
            stored = gguf.quants.quantize(_as_converted(plan, tensor, parameter).float().numpy(), of_kind)
            writer.add_tensor(tensor, stored, raw_dtype=of_kind)
            if parameter.ndim > 1:
                quantised = gguf.quants.quantize(parameter.numpy(), of_kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(quantised, of_kind)).bfloat16())
    tiny_gguf.finish(writer)
    return model


def _tensors(plan: Model, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names in the file, with the model's parameters or views of them."""
    (arch,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == plan.architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = parameter.data.chunk(2, 1)
            yield f"blk.{layer}.ffn_gate_exps.weight", gate
            yield f"blk.{layer}.ffn_up_exps.weight", up
        elif name.endswith("mlp.experts.down_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_down_exps.weight", parameter.data
        else:
            name_in_file = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert name_in_file is not None, name
            yield name_in_file, parameter.data


def _as_converted(plan: Model, name: str, parameter: torch.Tensor) -> torch.Tensor:
    part = name.split(".")[-2]
    if plan.permuted and part in ("attn_q", "attn_k"):
        heads = HEADS if part == "attn_q" else KV_HEADS
        return parameter.view(heads, 2, -1, parameter.shape[1]).transpose(1, 2).reshape(parameter.shape)
    return parameter + 1 if plan.norms_from_one and name.endswith("norm.weight") else parameter


@torch.inference_mode()
def logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probabilities of the next token after each."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, count: int, bias: Mapping[int, float] | None = None
) -> tuple[list[int], list[float]]:
    """Transformers' greedy answer of `count` tokens to PROMPT, and its log-probabilities without the bias."""
    ids, chances = list(PROMPT), []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        biased = logits.clone()
        for token, value in (bias or {}).items():
            biased[token] += value
        ids.append(int(biased.argmax()))
        chances.append(float(torch.log_softmax(logits, -1)[ids[-1]]))
    return ids[len(PROMPT) :], chances
