"""Serve a GGUF file: make a folder with config.json and tokenizer for SGLang and transformers, and a link to the file.

Names and shapes follow llama.cpp's converter and its documentation of the format. The weights stay in the file, where
`plugin/loading/gguf_weights.py` reads them. `unpack` makes an ordinary folder.
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
from . import gguf_rope, gguf_tokenizer
from .cached_folder import cached
from .gguf_architectures import SUPPORTED, Architecture
from .gguf_file import GgufFile, parts_of

if TYPE_CHECKING:
    from ..plugin.loading.gguf_weights import Stored

# Part of a folder's name. Raise it when the folder's content changes: old folders are then no longer used.
FORMAT = 7
TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
"""Types of tensors: floats, and the blocks that the kernels know."""
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Tensors outside the layers."""
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Sampling that the authors recommend: fields of generation_config.json, and of `general.sampling` in the file."""
ROOM = 64 * 2**20
"""Bytes that a folder takes without weights, at most."""


def folder(file: Path, name: str) -> Path:
    """Return the path of the folder for a file; a changed file gets another folder."""
    key = hashlib.sha256()
    for part in parts_of(file):
        status = part.stat()
        key.update(f"{part.resolve()} {status.st_size} {status.st_mtime_ns}".encode())
    return cache_root() / "models" / f"{name}-{key.hexdigest()[:8]}-gguf{FORMAT}"


def prepare(file: Path, name: str, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Return a GGUF file's folder, made where needed. Raises UserError, in one line, if the file cannot be served.

    sampling: recommended for the model (keys of `SAMPLING`); the file's own replaces it.
    """
    return cached(folder(file, name), lambda into: _write(file, into, sampling), what=f"the model {name}", needs=ROOM)


def unpack(prepared: Path) -> Path:
    """Make an ordinary Hugging Face folder from a prepared one, with the weights in bfloat16."""
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
    from ..plugin.loading.gguf_weights import link_name, write_index

    file = GgufFile(path)
    architecture = SUPPORTED.get(file.architecture)
    if architecture is None:
        raise UserError(
            f"{path}: the architecture {file.architecture!r} is not supported from GGUF files, only "
            f"{', '.join(SUPPORTED)}; give --model a folder with config.json and safetensors"
        )
    config = _config(file, architecture)
    stored = _index(file, architecture, config)
    (into / "config.json").write_text(json.dumps(config, indent=1))
    stops = {name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None}
    recommended = dict(sampling) | _sampling(file)
    if recommended:
        recommended["do_sample"] = True  # otherwise transformers warns that the other fields have no effect
    (into / "generation_config.json").write_text(json.dumps(stops | recommended))
    gguf_tokenizer.write(file, into, config["max_position_embeddings"])
    write_index(into, stored)
    for number, part in enumerate(file.parts):
        (into / link_name(number)).symlink_to(part.resolve())


def _sampling(file: GgufFile) -> dict[str, float]:
    """Return the recommended sampling of the file, by the fields of generation_config.json."""
    values = {name: file.value(f"general.sampling.{gguf_name}") for name, gguf_name in SAMPLING.items()}
    return {name: round(value, 6) for name, value in values.items() if isinstance(value, (int, float))}  # from float32


def _config(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Return config.json. Transformers' own reading lacks Qwen3's width of heads and the scaling of positions."""
    heads, hidden = file.hyper("attention.head_count"), file.hyper("embedding_length")
    width = file.hyper("attention.key_length", hidden // heads)
    if file.hyper("attention.value_length", width) != width:
        raise UserError(f"{file.path}: keys and values must have one width")
    if file.hyper("expert_count", 0) and not architecture.experts:
        raise UserError(f"{file.path}: mixtures of experts are only supported from GGUF files of qwen3moe")
    config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": file.hyper("feed_forward_length", 0),
        "num_hidden_layers": file.hyper("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.hyper("attention.head_count_kv", heads),
        "head_dim": width,
        "hidden_act": "silu",
        "max_position_embeddings": file.hyper("context_length"),
        "rms_norm_eps": file.hyper("attention.layer_norm_rms_epsilon"),
        "rope_parameters": gguf_rope.parameters(file, width),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": file.tensor("token_embd.weight").shape[0],
    }
    ends = gguf_tokenizer.end_tokens(file)
    for name, gguf_name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token = file.number(f"tokenizer.ggml.{gguf_name}_token_id", -1)
        config[name] = token if token >= 0 else None  # transformers' defaults belong to one vocabulary
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)  # same place: the order is hashed
    return config | architecture.config(file, config)


def _index(file: GgufFile, architecture: Architecture, config: dict[str, Any]) -> dict[str, Stored]:
    """Return the places of the model's tensors. Raises UserError for a missing or unknown tensor or type."""
    from ..plugin.loading.gguf_weights import Stored

    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    known, stored = set(gguf_rope.TENSORS), {}

    def place(gguf_name: str, name: str, rotary_heads: int = 0, experts: int = 1) -> None:
        tensor = file.tensor(gguf_name)
        known.add(gguf_name)
        if tensor.kind not in TYPES:
            raise UserError(f"{file.path}: {gguf_name} is of type {tensor.kind}, only {', '.join(TYPES)} are supported")
        shape, size = tensor.shape[-2:], tensor.size // experts
        if tensor.shape != ([experts, *shape] if name.count("{}") else shape):
            raise UserError(f"{file.path}: {gguf_name} has the shape {tensor.shape}")
        for i in range(experts):
            place = tensor.offset + i * size
            added = float(architecture.norms_from_one and gguf_name.endswith("norm.weight"))
            stored[name.format(i)] = Stored(tensor.kind, shape, place, size, tensor.part, rotary_heads, added)

    for gguf_name, name in OUTSIDE.items():
        if gguf_name != "output.weight" or not config["tie_word_embeddings"]:
            place(gguf_name, name)
    for i in range(config["num_hidden_layers"]):
        for gguf_name, name in architecture.layer.items():
            rotary = heads.get(gguf_name, 0) if architecture.permuted else 0
            place(f"blk.{i}.{gguf_name}", f"model.layers.{i}.{name}", rotary)
        for gguf_name, name in architecture.experts.items():
            place(f"blk.{i}.{gguf_name}", f"model.layers.{i}.{name}", experts=config["num_experts"])
    if unknown := sorted(file.tensors.keys() - known):
        raise UserError(f"{file.path}: a {file.architecture} model has no {', '.join(unknown[:3])}")
    return stored
