"""The `config.json` of a drafter's checkpoint folder, and the layer shape that all kinds of drafters share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROPES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": ("partial_rotary_factor",),
}
"""Scaled rotary embeddings that do not depend on the length, each with the numbers that it needs."""


class CheckpointError(ValueError):
    """A drafter checkpoint that cannot be used; the message names the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of a drafter's layers. vocab_size: of the target. rope: scaling of the rotary embedding: a type of ROPES
    and its numbers; empty: none. max_positions: positions that it was trained for."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope: dict[str, Any] = field(default_factory=dict)
    max_positions: int = 2048

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key heads")

    def layers_json(self) -> dict[str, Any]:
        """Return the fields of `config.json` that all kinds have."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
        }


class Fields:
    """The fields of a `config.json`; `section` takes precedence over the top level. file: its name in messages."""

    def __init__(
        self, config: Mapping[str, Any], section: Mapping[str, Any] | None = None, file: str = "drafter config.json"
    ) -> None:
        self.config, self.section, self.file = config, section or {}, file

    def value(self, key: str, default: Any = None) -> Any:
        return self.section.get(key, self.config.get(key, default))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a required field; raises CheckpointError if it is missing."""
        if (value := self.value(key, default)) is None:
            raise CheckpointError(f"{self.file} has no {key!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.get(key, default))

    def layers(self, *, theta: float, positions: int) -> dict[str, Any]:
        """Return the arguments of a `LayerShape`; theta, positions: defaults for fields that the file lacks."""
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        theta, rope = rotary(self.config, theta)
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.integer("num_key_value_heads", heads),
            "head_dim": self.integer("head_dim", hidden // heads),
            "rms_norm_eps": float(self.get("rms_norm_eps", 1e-6)),
            "rope_theta": theta,
            "rope": rope,
            "max_positions": self.integer("max_position_embeddings", positions),
        }


def read_json(folder: str | Path) -> dict[str, Any]:
    """Read a checkpoint folder's `config.json`; raises CheckpointError."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} is not a drafter checkpoint: it has no config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; copy it here again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object; copy it here again")
    return content


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise CheckpointError unless an engine can pass the outputs of these target layers to a drafter.

    SGLang captures the input of each layer, in the order of the layers, so it never captures the last layer's output.
    count: layers of the target; 0 where unknown.
    """
    rising = all(layer < following for layer, following in pairwise(layers))
    if not layers or not rising or layers[0] < 0 or 0 < count <= layers[-1] + 1:
        within = f" within 0..{count - 2}: of {count} layers all but the last can be read" if count else " from 0"
        raise CheckpointError(f"target_layer_ids {list(layers)} must rise{within}")


def check_same(
    target: Mapping[str, Any], wanted: Mapping[str, Any], *, drafter: str = "this drafter",
    own: str = "the drafter was trained for",
) -> None:  # fmt: skip
    """Raise CheckpointError naming the fields in which a target differs from the drafter's own target. Fields that
    either lacks are not compared."""
    both = [(key, target.get(key), value) for key, value in wanted.items()]
    differ = [f"{key} is {given}, {own} {value}" for key, given, value in both if given and value and given != value]
    if differ:
        raise CheckpointError(f"{drafter} does not fit the target: " + "; ".join(differ))


def rotary(config: Mapping[str, Any], theta: float) -> tuple[float, dict[str, Any]]:
    """Return `LayerShape.rope_theta` (`theta` where the config lacks it) and `LayerShape.rope`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(rope.get("full_attention", rope))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or theta)
    if kind != "proportional" and rope.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(f"drafter rotates a part of each head by rope_type {kind!r}, which is not built here")
    if kind == "default":
        return theta, {}
    lacks = [key for key in ROPES.get(kind, ()) if not isinstance(rope.get(key), int | float)]
    if kind not in ROPES or lacks:
        what = f"lacks {', '.join(lacks)}" if kind in ROPES else f"is none of default, {', '.join(ROPES)}"
        raise CheckpointError(f"drafter uses rope_type {kind!r}, which {what}")
    return theta, {"rope_type": kind, **rope}
