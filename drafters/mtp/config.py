"""Shape of a target's MTP layer (multi-token prediction, arXiv 2412.19437), as the target's `config.json` states it.

The architecture decides the names of its weights. What they show by themselves, such as biases or norms of queries and
keys, is taken from them (`checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ..block.config import read_json, rotary
from ..block.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Layout:
    """The MTP layer of some architectures.

    prefix: of its tensors, with the target's number of layers. names: beginnings behind it, and those that they have
    here. repeated: beginnings of tensors that are the target's own again. less_one: norms are stored less 1.
    gated: the attention's output has a gate, beside each head's queries, unless the config says otherwise.
    rotated: share of each head that rotates, unless the config says otherwise. sigmoid: experts are scored by it, and
    chosen from groups; else by softmax. experts: field with their number.
    """

    prefix: str
    names: Mapping[str, str]
    repeated: tuple[str, ...]
    less_one: bool
    gated: bool
    rotated: float
    sigmoid: bool
    experts: str


QWEN = Layout(
    prefix="mtp.",
    names={"pre_fc_norm_embedding.": "embedding_norm.", "pre_fc_norm_hidden.": "hidden_norm."},
    repeated=(),
    less_one=True,
    gated=True,
    rotated=0.25,
    sigmoid=False,
    experts="num_experts",
)
GLM = Layout(
    prefix="model.layers.{layers}.",
    names={
        "eh_proj.": "fc.",
        "enorm.": "embedding_norm.",
        "hnorm.": "hidden_norm.",
        "shared_head.norm.": "norm.",
        "mlp.shared_experts.": "layers.0.mlp.shared_expert.",
        "": "layers.0.",
    },
    repeated=("embed_tokens.", "shared_head.head."),
    less_one=False,
    gated=False,
    rotated=0.5,
    sigmoid=True,
    experts="n_routed_experts",
)
LAYOUTS = {
    "Qwen3NextForCausalLM": QWEN,
    "Qwen3_5ForCausalLM": QWEN,
    "Qwen3_5ForConditionalGeneration": QWEN,
    "Qwen3_5MoeForCausalLM": QWEN,
    "Qwen3_5MoeForConditionalGeneration": QWEN,
    "Glm4MoeForCausalLM": GLM,
}
"""Architectures whose MTP layer is built here."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts.

    count: experts. chosen: of them for a row. size: their inner width. shared_size: that of the shared one.
    normalised: shares of the chosen add up to 1, before they are multiplied by `scale`. sigmoid: scores are; the chosen
    come from `chosen_groups` of `groups` groups of experts.
    """

    count: int
    chosen: int
    size: int
    shared_size: int
    normalised: bool
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Shape of an MTP layer, most of which is the target's.

    architecture: of the target. num_target_layers: its layers. intermediate_size: of an MLP without experts.
    rotary_dim: numbers of a head that rotate. gated: queries have gates beside them. experts: None: the target has
    none. Others as of `EagleConfig`.
    """

    kind: ClassVar[str] = "mtp"

    architecture: str
    vocab_size: int
    hidden_size: int
    num_target_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    gated: bool
    experts: ExpertsConfig | None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope: dict[str, Any] = field(default_factory=dict)
    max_positions: int = 2048
    tied: bool = False
    gamma: int = 1

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.architecture]

    @property
    def prefix(self) -> str:
        """Beginning of its tensors' names."""
        return self.layout.prefix.format(layers=self.num_target_layers)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> MtpConfig:
        """Read a target's `config.json`; raises CheckpointError naming what is missing or unsupported."""
        architecture = next(iter(config.get("architectures") or ()), "")
        layout = LAYOUTS.get(architecture)
        if layout is None:
            raise CheckpointError(
                f"MTP layers of {architecture or 'no architecture named'} are not built here, but those of "
                f"{', '.join(LAYOUTS)}"
            )
        text = {**config, **(config.get("text_config") or {})}

        def integer(key: str, default: int | None = None) -> int:
            value = text.get(key) if text.get(key) is not None else default
            if value is None:
                raise CheckpointError(f"the target's config.json has no {key!r}")
            return int(value)

        if (activation := text.get("hidden_act") or "silu") != "silu":
            raise CheckpointError(f"the MTP layer uses hidden_act {activation!r}, which is not built here")
        heads, hidden = integer("num_attention_heads"), integer("hidden_size")
        head_dim = integer("head_dim", hidden // heads)
        rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
        share = rope.pop("partial_rotary_factor", None) or text.get("partial_rotary_factor") or layout.rotated
        rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}  # a text has one position
        theta, rope = rotary({"rope_theta": text.get("rope_theta") or 1e4, "rope_parameters": rope})
        return cls(
            architecture=architecture,
            vocab_size=integer("vocab_size"),
            hidden_size=hidden,
            num_target_layers=integer("num_hidden_layers"),
            intermediate_size=integer("intermediate_size", 0),
            num_heads=heads,
            num_kv_heads=integer("num_key_value_heads", heads),
            head_dim=head_dim,
            rotary_dim=int(head_dim * float(share)),
            gated=bool(text.get("attn_output_gate", layout.gated)),
            experts=experts_of(text, layout, integer) if text.get(layout.experts) else None,
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            rope_theta=theta,
            rope=rope,
            max_positions=integer("max_position_embeddings", 2048),
        )

    @classmethod
    def read(cls, folder: str | Path) -> MtpConfig:
        """Read `config.json` of a target's folder."""
        return cls.from_json(read_json(folder))


def experts_of(config: Mapping[str, Any], layout: Layout, integer: Callable[..., int]) -> ExpertsConfig:
    """The mixture of experts of a target's config; integer: reads a field of it."""
    size = integer("moe_intermediate_size")
    found = ExpertsConfig(
        count=integer(layout.experts),
        chosen=integer("num_experts_per_tok"),
        size=size,
        shared_size=integer("shared_expert_intermediate_size", size * integer("n_shared_experts", 0)),
        normalised=bool(config.get("norm_topk_prob", True)),
    )
    if not layout.sigmoid:
        return found
    return replace(
        found,
        sigmoid=True,
        scale=float(config.get("routed_scaling_factor") or 1.0),
        groups=integer("n_group", 1),
        chosen_groups=integer("topk_group", 1),
    )


def has_layout(config: Mapping[str, Any]) -> bool:
    """True if a `config.json` is that of a target whose MTP layer is built here."""
    return next(iter(config.get("architectures") or ()), "") in LAYOUTS
