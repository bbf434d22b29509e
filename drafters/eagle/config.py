"""Shape of an EAGLE-3 head (arXiv 2503.01840), as its checkpoint folder's `config.json` states it.

Three families of folders are read. SGLang loads the folders of the EAGLE authors and SpecForge. ModelOpt's have a
section `eagle_config`; speculators', which vLLM loads, a section `transformer_layer_config`. All share the names of a
Llama's config. Biases and an own head are recognised from the weights (`checkpoint.py`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..config_file import CheckpointError, Fields, LayerShape, check_layers

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SECTION = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
"""Fields of `eagle_config` with the value that each must have, if present."""
UNSUPPORTED = {
    "kv_lora_rank": "latent attention (MLA)",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "use_sliding_window": "a sliding window",
    "parallel_drafting": "parallel drafting",
    "swap_h_and_emb": "swapped inputs",
}
"""Fields of heads that compute something else, each with a name for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LayerShape):
    """Shape of an EAGLE-3 head.

    target_hidden_size: of the target. draft_vocab_size: V', tokens that it can draft; None: all.
    target_layers: target layers that it reads, ascending; 0 is the first decoder layer. Empty: `layers_of` decides.
    norm_before_residual: the residual is the normed state. norm_output: the next step reads the normed state.
    tied: the head is the embedding. gamma: tokens of a chain in training; a longer one can be drafted.
    Texts longer than max_positions are drafted for as well.
    """

    kind: ClassVar[str] = "eagle3"

    target_hidden_size: int
    draft_vocab_size: int | None = None
    target_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    tied: bool = False
    gamma: int = 7

    def __post_init__(self) -> None:
        LayerShape.__post_init__(self)
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}")
        if self.target_layers:
            check_layers(self.target_layers, 0)

    @property
    def logit_size(self) -> int:
        """V', columns of the draft distribution."""
        return self.draft_vocab_size or self.vocab_size

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Return the layers that it reads of a target with `count` layers; raises CheckpointError."""
        layers = self.target_layers or (1, count // 2 - 1, count - 4)
        check_layers(layers, count)
        return layers

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """Read a checkpoint's `config.json`; raises CheckpointError naming missing or unsupported fields."""
        flat = {**(config.get("transformer_layer_config") or {}), **config}
        flat = {key: value for key, value in flat.items() if value is not None}
        check_supported(flat)
        fields, drafted, section = Fields(flat), flat.get("draft_vocab_size"), flat.get("eagle_config") or {}
        layers = fields.layers(theta=1e4, positions=2048)
        return cls(
            **layers,
            target_hidden_size=fields.integer("target_hidden_size", layers["hidden_size"]),
            draft_vocab_size=None if drafted is None or drafted == flat["vocab_size"] else int(drafted),
            target_layers=target_layers(flat),
            norm_before_residual=bool(flat.get("norm_before_residual")),
            norm_output=bool(flat.get("norm_output", section.get("norm_output"))),
            tied=bool(flat.get("tie_word_embeddings")),
            gamma=int((flat.get("outrider") or {}).get("gamma", 7)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of `config.json`, which SGLang reads too."""
        return self.layers_json() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "num_hidden_layers": 1,
            "rope_scaling": self.rope or None,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "tie_word_embeddings": self.tied,
            "eagle_config": {LAYER_IDS: list(self.target_layers)},
            "outrider": {"gamma": self.gamma},
        }


def is_eagle(config: dict[str, Any]) -> bool:
    """Return True if a `config.json` is that of an EAGLE-3 head. The authors' first ones call themselves a Llama."""
    names = config.get("architectures") or []
    named = any("eagle3" in name.lower() for name in names)
    return named or config.get("speculators_model_type") == "eagle3" or (
        "draft_vocab_size" in config and "LlamaForCausalLM" in names
    )  # fmt: skip


def target_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the target layers that are read; empty where the config leaves it to the target's number of layers.

    In `eagle_config` the ids number the layers (SGLang, SpecForge, ModelOpt); outside it they count the inputs of
    layers (vLLM, speculators).
    """
    if ids := (config.get("eagle_config") or {}).get(LAYER_IDS):
        return tuple(int(i) for i in ids)
    return tuple(int(i) - 1 for i in config.get(LAYER_IDS) or ())


def check_supported(config: dict[str, Any]) -> None:
    """Raise CheckpointError naming unsupported fields of the head."""
    used = [f"{key} ({what})" for key, what in UNSUPPORTED.items() if config.get(key)]
    if (activation := config.get("hidden_act") or "silu") != "silu":
        used.append(f"hidden_act {activation!r}")
    if (scale := config.get("logit_scale") or 1) != 1:
        used.append(f"logit_scale {scale}")
    if "sliding_attention" in (config.get("layer_types") or []):
        used.append("layer_types (a sliding window)")
    known = {LAYER_IDS, "norm_output", "norm_before_fc"}
    for key, value in (config.get("eagle_config") or {}).items():
        if key not in known and value is not None and (key not in SECTION or value != SECTION[key]):
            used.append(f"eagle_config.{key} {value!r}")
    if used:
        raise CheckpointError(f"the EAGLE-3 drafter uses {', '.join(used)}, which is not built here")
