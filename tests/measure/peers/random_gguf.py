"""A GGUF file of random weights for comparing speed, in a model's exact shape and Q4_K_M's mix of types; its text is
noise. The tokenizer is the embedded model's, with extra words up to the model's vocabulary.

    python tests/measure/peers/random_gguf.py qwen3-0.6b model.gguf
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from outrider.server.model import bundled_model


@dataclass(frozen=True)
class RandomShape:
    """The sizes of a Qwen3 model with tied embeddings."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 151_936


SHAPES = {
    "qwen3-0.6b": RandomShape(28, 1024, 3072, 16),
    "qwen3-1.7b": RandomShape(28, 2048, 6144, 16),
    "qwen3-4b": RandomShape(36, 2560, 9728, 32),
}
SIZES = {"Q4_K": 144, "Q6_K": 210}
"""Bytes of a block of 256 weights."""
COPIED = ("model", "pre", "merges", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
"""Fields copied from the embedded model's tokenizer."""


def blocks(draw: np.random.Generator, kind: str, rows: int, depth: int) -> np.ndarray:
    """Return random blocks of weights, mean 0 and deviation about 0.02: [rows, bytes of a row]."""
    made = draw.integers(0, 256, (rows, depth // 256, SIZES[kind]), dtype=np.uint8)
    scale = np.array([8e-5], np.float16).view(np.uint8)
    if kind == "Q4_K":
        made[..., 0:2], made[..., 2:4] = scale, np.array([7.5 * 8e-5], np.float16).view(np.uint8)
    else:
        made[..., 192:208] //= 4  # scales of sub-blocks
        made[..., 208:] = scale
    return made.reshape(rows, -1)


def matrices(shape: RandomShape) -> Iterator[tuple[str, str, int, int]]:
    """Yield the name, type, rows and depth of each matrix."""
    yield "token_embd.weight", "Q6_K", shape.vocabulary, shape.width
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    eighth = shape.layers // 8
    for i in range(shape.layers):
        # Layers to which llama.cpp gives more bits.
        more = "Q6_K" if i < eighth or i >= 7 * shape.layers // 8 or (i - eighth) % 3 == 2 else "Q4_K"
        yield f"blk.{i}.attn_q.weight", "Q4_K", queries, shape.width
        yield f"blk.{i}.attn_k.weight", "Q4_K", keys, shape.width
        yield f"blk.{i}.attn_v.weight", more, keys, shape.width
        yield f"blk.{i}.attn_output.weight", "Q4_K", shape.width, queries
        yield f"blk.{i}.ffn_gate.weight", "Q4_K", shape.mlp, shape.width
        yield f"blk.{i}.ffn_up.weight", "Q4_K", shape.mlp, shape.width
        yield f"blk.{i}.ffn_down.weight", more, shape.width, shape.mlp


def write(shape: RandomShape, path: Path) -> None:
    writer, draw = GGUFWriter(path, "qwen3"), np.random.default_rng(0)
    for name, number in {
        "context_length": 8192,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.mlp,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
    }.items():
        writer.add_uint32(f"qwen3.{name}", number)
    writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    add_tokenizer(writer, shape.vocabulary)
    for i in range(shape.layers):
        for name, width in {"attn_norm": shape.width, "ffn_norm": shape.width, "attn_q_norm": shape.head,
                            "attn_k_norm": shape.head}.items():  # fmt: skip
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(shape.width, np.float32))
    for name, kind, rows, depth in matrices(shape):
        writer.add_tensor(name, blocks(draw, kind, rows, depth), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def add_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    """Add the embedded model's tokenizer, extended by words that occur in no text."""
    fields = GGUFReader(bundled_model.find_gguf()).fields
    for name in COPIED:
        if field := fields.get(f"tokenizer.ggml.{name}"):
            value: Any = field.contents()
            add = {str: writer.add_string, list: writer.add_array}.get(type(value), writer.add_uint32)
            add(f"tokenizer.ggml.{name}", value)
    words = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    more = vocabulary - len(words)
    writer.add_token_list([*words, *(f"w{i}" for i in range(more))])
    writer.add_token_types([*kinds, *[1] * more])
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: random_gguf.py {'|'.join(SHAPES)} FILE.gguf")
    write(SHAPES[sys.argv[1]], Path(sys.argv[2]))
