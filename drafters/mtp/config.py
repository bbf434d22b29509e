"""Shape of a target's MTP layer (multi-token prediction, arXiv 2412.19437), as the target's `config.json` states it.

The architecture decides the names of its weights. Biases and norms of queries and keys are recognised from the weights
(`checkpoint.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..config_file import CheckpointError, Fields, LayerShape


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The MTP layer of some architectures.

    prefix: of its tensors, with the target's number of layers.
    names: prefixes of the remaining names, and their replacements here.
    repeated: prefixes of tensors that repeat the target's own. less_one: norms are stored less 1.
    gated: the attention's output has a gate, stored with each head's queries, unless the config says otherwise.
    rotated: share of each head that rotates, unless the config says otherwise.
    sigmoid: experts are scored by a sigmoid and chosen from groups; else by softmax.
    experts: config field with their number.
    """

    prefix: str
    names: Mapping[str, str]
    repeated: tuple[str, ...]
    less_one: bool
    gated: bool
    rotated: float
    sigmoid: bool
    experts: str


QWEN = MtpLayout(
    prefix="mtp.",
    names={"pre_fc_norm_embedding.": "embedding_norm.", "pre_fc_norm_hidden.": "hidden_norm."},
    repeated=(),
    less_one=True,
    gated=True,
    rotated=0.25,
    sigmoid=False,
    experts="num_experts",
)
GLM = MtpLayout(
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
"""Architectures with a supported MTP layer."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts.

    count: number of experts. chosen: experts per row. size: their inner width.
    shared_size: inner width of the shared expert.
    normalised: shares of the chosen add up to 1, before they are multiplied by `scale`. sigmoid: scores are sigmoids.
    groups, chosen_groups: the chosen come from `chosen_groups` of `groups` groups of experts.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(LayerShape):
    """Shape of an MTP layer, most of which is the target's.

    architecture: of the target. num_target_layers: its layers. intermediate_size: of an MLP without experts.
    rotary_dim: numbers of a head that rotate. gated: the projection of queries also has gates.
    experts: None: the target has none. tied, gamma: as in `EagleConfig`.
    """

    kind: ClassVar[str] = "mtp"

    architecture: str
    num_target_layers: int
    rotary_dim: int
    gated: bool
    experts: ExpertsConfig | None
    tied: bool = False
    gamma: int = 1

    @property
    def layout(self) -> MtpLayout:
        return LAYOUTS[self.architecture]

    @property
    def prefix(self) -> str:
        """Prefix of its tensors' names."""
        return self.layout.prefix.format(layers=self.num_target_layers)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Self:
        """Read a target's `config.json`; raises CheckpointError naming missing or unsupported fields."""
        architecture = next(iter(config.get("architectures") or ()), "")
        layout = LAYOUTS.get(architecture)
        if layout is None:
            raise CheckpointError(
                f"MTP layers of {architecture or 'no architecture named'} are not supported; supported are "
                f"{', '.join(LAYOUTS)}"
            )
        text = {**config, **(config.get("text_config") or {})}
        if (activation := text.get("hidden_act") or "silu") != "silu":
            raise CheckpointError(f"the MTP layer uses hidden_act {activation!r}, which is not built here")
        rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
        share = rope.pop("partial_rotary_factor", None) or text.get("partial_rotary_factor") or layout.rotated
        rope = {name: value for name, value in rope.items() if not name.startswith("mrope")}  # a text has one position
        text |= {"rope_parameters": rope, "rope_scaling": None}
        text = {"intermediate_size": 0} | {key: value for key, value in text.items() if value is not None}
        fields = Fields(text, file="the target's config.json")
        layers = fields.layers(theta=1e4, positions=2048)
        return cls(
            **layers,
            architecture=architecture,
            num_target_layers=fields.integer("num_hidden_layers"),
            rotary_dim=int(layers["head_dim"] * float(share)),
            gated=bool(text.get("attn_output_gate", layout.gated)),
            experts=experts_of(fields, layout) if text.get(layout.experts) else None,
        )


def experts_of(fields: Fields, layout: MtpLayout) -> ExpertsConfig:
    size = fields.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        count=fields.integer(layout.experts),
        chosen=fields.integer("num_experts_per_tok"),
        size=size,
        shared_size=fields.integer("shared_expert_intermediate_size", size * fields.integer("n_shared_experts", 0)),
        normalised=bool(fields.value("norm_topk_prob", True)),
    )
    if not layout.sigmoid:
        return experts
    return replace(
        experts,
        sigmoid=True,
        scale=float(fields.value("routed_scaling_factor") or 1.0),
        groups=fields.integer("n_group", 1),
        chosen_groups=fields.integer("topk_group", 1),
    )


def has_layout(config: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` names an architecture with a supported MTP layer."""
    return next(iter(config.get("architectures") or ()), "") in LAYOUTS
