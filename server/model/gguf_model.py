"""A GGUF file as a model: what SGLang and transformers need beside the weights, in a folder that links to the file.

Names and shapes follow llama.cpp's converter and its documentation of the format. The weights stay where they are;
`plugin/loading/gguf_weights.py` reads them. Whoever needs an ordinary folder gets one from `unpack`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outrider.kernels.cache import cache_root

from ..errors import UserError
from . import gguf_tokenizer
from .cached_folder import cached
from .gguf_file import GgufFile

if TYPE_CHECKING:
    from ..plugin.loading.gguf_weights import Stored

# Part of a folder's name: raise it when what is written there changes, and old folders are no longer used.
FORMAT = 2
SUPPORTED = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Architectures, and their classes in transformers and SGLang."""
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors; those that the kernels do not know in their blocks are expanded."""
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ONLY_IN = {
    "llama": {},
    "qwen2": {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    "qwen3": {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"},
}
"""Tensors of a layer that only one architecture has."""
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Sampling that the authors recommend: fields of generation_config.json, and of `general.sampling` in the file."""
ROPE_FACTORS = "rope_freqs.weight"
ROOM = 64 * 2**20
"""Bytes that a folder takes without weights, at most."""


def folder(file: Path, name: str) -> Path:
    """Path of the folder for a file; a changed file gets another folder."""
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:8]
    return cache_root() / "models" / f"{name}-{key}-gguf{FORMAT}"


def prepare(file: Path, name: str, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """The folder of a GGUF file, made if need be; raises UserError, in one line, where the file cannot be served.

    sampling: recommended for the model (keys of `SAMPLING`), where the file does not say it itself.
    """
    return cached(folder(file, name), lambda into: _write(file, into, sampling), what=f"the model {name}", needs=ROOM)


def unpack(prepared: Path) -> Path:
    """An ordinary Hugging Face folder with the weights of a prepared one in bfloat16, for those who need one."""
    from ..plugin.loading.gguf_weights import GgufWeights

    weights = GgufWeights(prepared)

    def write(into: Path) -> None:
        from safetensors.torch import save_file

        for path in prepared.iterdir():
            if path.suffix in (".json", ".jinja") and not path.name.startswith("outrider-"):
                (into / path.name).write_bytes(path.read_bytes())
        tensors = {name: tensor.bfloat16().contiguous() for name, tensor in weights.everything()}
        save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})

    plain = prepared.with_name(f"{prepared.name}-bf16")
    return cached(plain, write, what=f"{prepared.name} in bfloat16", needs=weights.bytes_loaded(2, False) + ROOM)


def _write(path: Path, into: Path, sampling: Mapping[str, float]) -> None:
    from ..plugin.loading.gguf_weights import LINK, write_index

    file = GgufFile(path)
    architecture = file.text("general.architecture")
    if architecture not in SUPPORTED:
        raise UserError(
            f"{path}: the architecture {architecture!r} is not supported from GGUF files, only {', '.join(SUPPORTED)}; "
            "give --model a folder with config.json and safetensors"
        )
    config = _config(file, architecture)
    stored = _index(file, architecture, config)
    (into / "config.json").write_text(json.dumps(config, indent=1))
    stops = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    recommended = dict(sampling) | _sampling(file)
    if recommended:
        recommended["do_sample"] = True  # without it transformers warns that nothing of the rest has an effect
    (into / "generation_config.json").write_text(json.dumps(stops | recommended))
    gguf_tokenizer.write(file, into, config["max_position_embeddings"])
    write_index(into, stored)
    (into / LINK).symlink_to(path.resolve())


def _sampling(file: GgufFile) -> dict[str, float]:
    """Recommended sampling of the file, by the fields of generation_config.json."""
    values = {name: file.value(f"general.sampling.{gguf_name}") for name, gguf_name in SAMPLING.items()}
    return {name: round(value, 6) for name, value in values.items() if isinstance(value, (int, float))}  # from float32


def _config(file: GgufFile, architecture: str) -> dict[str, Any]:
    """config.json; transformers' own reading of it knows no width of heads in Qwen3 and no scaling of positions."""

    def number(name: str, default: float | None = None) -> Any:
        return file.number(f"{architecture}.{name}", default)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    width = number("attention.key_length", number("rope.dimension_count", hidden // heads))
    if number("rope.dimension_count", width) != width or number("attention.value_length", width) != width:
        raise UserError(f"{file.path}: keys, values and rotated dimensions must have one width")
    if number("expert_count", 0):
        raise UserError(f"{file.path}: mixtures of experts are not supported from a GGUF file")
    config = {
        "architectures": [SUPPORTED[architecture]],
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": width,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, architecture, width),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensor("token_embd.weight").shape[0],
    }
    for name, gguf_name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        if (token := file.number(f"tokenizer.ggml.{gguf_name}_token_id", -1)) >= 0:
            config[name] = token
    return config


def _rope(file: GgufFile, architecture: str, width: int) -> dict[str, Any]:
    """Rotary positions. Llama 3's scaling is in the file as one factor for each frequency."""
    theta = file.number(f"{architecture}.rope.freq_base", 10000.0)
    scaling = file.text(f"{architecture}.rope.scaling.type", "none")
    if scaling not in ("none", ""):
        raise UserError(f"{file.path}: positions scaled by {scaling!r} are not supported from a GGUF file")
    plain = {"rope_type": "default", "rope_theta": theta}
    if ROPE_FACTORS not in file.tensors:
        return plain
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = torch.from_numpy(file.tensor(ROPE_FACTORS).read().copy())
    scaled = plain | {
        "rope_type": "llama3",
        "factor": factors.max().item(),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=width, hidden_size=width, num_attention_heads=1, rope_parameters=scaled)
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    frequencies = theta ** (-torch.arange(0, width, 2).float() / width)
    if not torch.allclose(frequencies / factors, inverse, rtol=1e-3):
        raise UserError(f"{file.path}: its factors of positions are not Llama 3's, and no others are supported")
    return scaled


def _index(file: GgufFile, architecture: str, config: dict[str, Any]) -> dict[str, Stored]:
    """Place of each of the model's tensors; raises UserError where one is missing, unknown or of an unknown type."""
    from ..plugin.loading.gguf_weights import Stored

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {f"{gguf_name}.weight": (f"{name}.weight", 0) for gguf_name, name in OUTSIDE.items()}
    if config["tie_word_embeddings"]:
        del names["output.weight"]
    for i in range(config["num_hidden_layers"]):
        for gguf_name, name in LAYER.items():
            rotary = heads.get(gguf_name, 0) if architecture == "llama" else 0
            names[f"blk.{i}.{gguf_name}.weight"] = f"model.layers.{i}.{name}.weight", rotary
        for gguf_name, name in ONLY_IN[architecture].items():
            names[f"blk.{i}.{gguf_name}"] = f"model.layers.{i}.{name}", 0
    unknown = sorted(file.tensors.keys() - names.keys() - {ROPE_FACTORS})
    if unknown:
        raise UserError(f"{file.path}: a {architecture} model has no {', '.join(unknown[:3])}")
    stored = {}
    for gguf_name, (name, rotary) in names.items():
        tensor = file.tensor(gguf_name)
        if tensor.kind not in TYPES:
            raise UserError(f"{file.path}: {gguf_name} is of type {tensor.kind}, only {', '.join(TYPES)} are supported")
        stored[name] = Stored(tensor.kind, tensor.shape, tensor.offset, tensor.size, rotary)
    return stored
