"""GGUF files of small random Llama- and Qwen-shaped models, as llama.cpp's converter writes them, with a tokenizer."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

WIDTH, HEADS, KV_HEADS, HEAD, MLP, LAYERS = 64, 4, 2, 32, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEXT = "hello world 123 <think>"
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def tokens() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tensors(architecture: str, tied: bool = True) -> dict[str, np.ndarray]:
    """Random float32 weights by llama.cpp's names."""
    draw = np.random.default_rng(7)
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens()), WIDTH), "output_norm.weight": (WIDTH,)}
    if not tied:
        shapes["output.weight"] = (len(tokens()), WIDTH)
    for i in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (WIDTH,), "attn_q.weight": (q, WIDTH), "attn_k.weight": (kv, WIDTH),
            "attn_v.weight": (kv, WIDTH), "attn_output.weight": (WIDTH, q), "ffn_norm.weight": (WIDTH,),
            "ffn_gate.weight": (MLP, WIDTH), "ffn_up.weight": (MLP, WIDTH), "ffn_down.weight": (WIDTH, MLP),
        }  # fmt: skip
        if architecture == "qwen2":
            of_layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if architecture == "qwen3":
            of_layer |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_layer.items()}
    return {name: (draw.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    architecture: str = "llama",
    kind: str = "Q4_1",
    *,
    kinds: Mapping[str, str] | None = None,
    split: str = "qwen2",
    more: Mapping[str, np.ndarray] | None = None,
    fields: Mapping[str, Any] | None = None,
    tied: bool = True,
    only: Callable[[str], bool] = lambda name: True,
    tokenizer: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """kind: of all matrices, except names that end as a key of `kinds`. more: further tensors, in float32. fields:
    further metadata. only: tells by name whether a tensor is written. tokenizer: writes another tokenizer."""
    writer = GGUFWriter(path, architecture)
    own = {
        "context_length": 256, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "rope.dimension_count": HEAD, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
    }  # fmt: skip
    add_fields(writer, own, f"{architecture}.")
    (tokenizer or partial(add_tokenizer, split=split))(writer)
    add_fields(writer, fields or {})
    for name, values in (tensors(architecture, tied) | dict(more or {})).items():
        if not only(name):
            continue
        stored = next((k for end, k in (kinds or {}).items() if name.endswith(end)), kind)
        if values.ndim == 1:
            stored = "F32"
        if stored in ("F32", "F16"):
            writer.add_tensor(name, values.astype({"F32": np.float32, "F16": np.float16}[stored]))
        else:
            of_kind = GGMLQuantizationType[stored]
            writer.add_tensor(name, quantize(values, of_kind), raw_dtype=of_kind)
    finish(writer)
    return path


def add_fields(writer: GGUFWriter, fields: Mapping[str, Any], prefix: str = "") -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in fields.items():
        add[type(value)](prefix + name, value)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, split: str, ends: Mapping[str, int] = MappingProxyType({"eos": 2})) -> None:
    """ends: tokens that end an answer, by their name in the file."""
    words = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(words)
    writer.add_token_types([4 if word == "<think>" else 3 if word in SPECIAL else 1 for word in words])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    for name, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
