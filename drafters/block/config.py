"""Shape of a drafter model, as its checkpoint folder's `config.json` states it.

Public DeepSpec and DFlash folders have the same keys, and SGLang reads them, too. `block_size` is gamma for DSpark and
gamma + 1 for DFlash, which counts the anchor's row, although that row predicts no token. A DSpark block with
`sample_from_anchor: false` has such a row too, which its `block_size` does not count. The key `outrider` holds fields
that only Outrider reads: the size of a truncated draft vocabulary and the identity of the target. `speculators.py`
translates another format. Diffusion drafters (`diffusion/`) have the same shape without target layers; their gamma is
`block_size`.
"""

from dataclasses import dataclass, field
from typing import Any, Self

from ..config_file import CheckpointError, Fields, LayerShape, check_layers
from . import choosing as choose
from . import speculators
from .choosing import Choosing, Convolution, LatticeChoosing

ARCHITECTURES = {
    "dspark": "Qwen3DSparkModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "diffusion": "OutriderDiffusionModel",
}
GEMMA = "Gemma4DSparkModel"
BLOCK_KINDS = ("dspark", "dflash")
"""Kinds that serve several weight sets."""
READING_KINDS = (*BLOCK_KINDS, "dflash2")
"""All kinds that draft from the target's hidden states."""
ANCHORED = ("dflash", "dflash2")
"""Kinds with a `block_size` that counts the anchor."""
MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(LayerShape):
    """Shape of a DSpark, DFlash or diffusion drafter.

    gamma: tokens drafted in one block. num_target_layers: of the target; 0 where the checkpoint does not say.
    target_layers: target layers that give the context features, ascending; 0 is the first decoder layer. Empty for
        diffusion, which embeds the tokens.
    windows: of each layer, as in `flat_attention`: a layer with a window sees the `window` positions before a token and
        none after it; -1: all positions and the whole block. Empty: -1 for every layer.
    open_windows: layers with windows see the whole block as well.
    gemma: layers are Gemma 4's (`gemma.py`), and embeddings are multiplied by √hidden_size. shared_kv: values are keys.
    logit_scale: a factor of the logits.
    logit_cap: c; scaled logits x become c tanh(x / c) before tokens are drawn. 0: no cap.
    qk_norm: whether queries and keys are normed, as in Qwen3 and not in Llama.
    markov_rank: r of the sequential head; 0 for DFlash.
    sample_from_anchor: whether the anchor's own row predicts the first token; never for DFlash.
    draft_vocab_size: V', tokens the drafter can propose; None for the target's whole vocabulary.
    convolution: of the layers' rows; None: there is none.
    choosing: how the path through the likeliest tokens of each position is drawn; only in DFlash 2.
    target: identity of the target it was trained for (`checkpoint.target_identity`), empty when unknown.
    """

    kind: str
    gamma: int
    num_layers: int
    num_target_layers: int
    target_layers: tuple[int, ...]
    mask_token_id: int
    rope_theta: float = 1e6
    max_positions: int = 32768
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    sample_from_anchor: bool = True
    qk_norm: bool = True
    draft_vocab_size: int | None = None
    windows: tuple[int, ...] = ()
    gemma: bool = False
    shared_kv: bool = False
    logit_cap: float = 0.0
    logit_scale: float = 1.0
    open_windows: bool = False
    convolution: Convolution | None = None
    choosing: Choosing | None = None
    target: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LayerShape.__post_init__(self)
        if self.kind not in ARCHITECTURES:
            raise CheckpointError(f"unknown drafter kind {self.kind!r}; known: {', '.join(ARCHITECTURES)}")
        if self.gamma < 1:
            raise CheckpointError(f"gamma must be at least 1, got {self.gamma}")
        if self.markov_rank and self.markov_head not in MARKOV_HEADS:
            raise CheckpointError(f"unknown markov_head_type {self.markov_head!r}; known: {', '.join(MARKOV_HEADS)}")
        if self.kind == "dspark" and self.markov_rank < 1:
            raise CheckpointError(f"DSpark needs markov_rank of at least 1, got {self.markov_rank}")
        if self.kind == "diffusion":
            if self.target_layers or self.markov_rank or (self.confidence_head and self.confidence_with_markov):
                raise CheckpointError("a diffusion drafter reads no target layers and has no sequential head")
        else:
            check_layers(self.target_layers, self.num_target_layers)
        if (self.choosing is None) == (self.kind == "dflash2"):
            raise CheckpointError("DFlash 2 draws paths through candidates, and no other drafter does")
        if self.choosing is not None and (self.draft_vocab_size or self.choosing.candidates > self.vocab_size):
            raise CheckpointError("DFlash 2 drafts from the whole vocabulary, of which its candidates are a part")
        if (
            isinstance(self.choosing, LatticeChoosing)
            and (self.choosing.width or self.hidden_size) % self.choosing.heads
        ):
            raise CheckpointError(f"lilicorr_num_heads {self.choosing.heads} does not divide its width")
        if self.convolution is not None and self.hidden_size % self.convolution.group:
            raise CheckpointError(f"conv_group_size {self.convolution.group} does not divide {self.hidden_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise CheckpointError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")

    def window(self, layer: int) -> int:
        """Return the sliding window of one layer; -1: none."""
        return self.windows[layer] if self.windows else -1

    @property
    def queries(self) -> int:
        """Block inputs of one request."""
        return self.gamma + self.first_row

    @property
    def first_row(self) -> int:
        """Block row of the first prediction: the anchor itself, or the first mask."""
        return 0 if self.kind == "diffusion" or (self.kind == "dspark" and self.sample_from_anchor) else 1

    @property
    def logit_size(self) -> int:
        """V', columns of the draft distribution."""
        return self.draft_vocab_size or self.vocab_size

    def to_json(self) -> dict[str, Any]:
        config: dict[str, Any] = self.layers_json() | {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": "qwen3",
            "block_size": self.queries if self.kind in ANCHORED else self.gamma,
            "num_hidden_layers": self.num_layers,
            "attention_bias": False,
            **({"rope_parameters": self.rope | {"rope_theta": self.rope_theta}} if self.rope else {}),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "num_target_layers": self.num_target_layers,
        }
        if self.kind == "diffusion":
            config |= {"qk_norm": self.qk_norm, "enable_confidence_head": self.confidence_head}
        else:
            config |= {"target_layer_ids": list(self.target_layers), "mask_token_id": self.mask_token_id}
        if self.kind == "dspark":
            config |= {
                "markov_rank": self.markov_rank,
                "markov_head_type": self.markov_head,
                "enable_confidence_head": self.confidence_head,
                "confidence_head_with_markov": self.confidence_with_markov,
                "sample_from_anchor": self.sample_from_anchor,
            }
        elif self.kind in ANCHORED:
            config["dflash_config"] = {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layers),
            }
        if self.choosing is not None:
            config["architectures"] = [self.choosing.ARCHITECTURE]
            config["dflash_config"] |= self.choosing.to_json()
            config["dflash_config"] |= self.convolution.to_json() if self.convolution else {}
            if (self.logit_scale, self.logit_cap) != (1.0, 0.0):
                caps = {"output_multiplier": self.logit_scale, "final_logit_softcapping": self.logit_cap or None}
                config["dflash_config"] |= caps
        if self.gemma:
            config |= {
                "architectures": [GEMMA], "model_type": "gemma4_text", "global_head_dim": self.head_dim,
                "num_global_key_value_heads": self.num_kv_heads, "attention_k_eq_v": self.shared_kv,
                "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": self.logit_cap or None,
            }  # fmt: skip
        if self.windows:
            kinds = ["full_attention" if window < 0 else "sliding_attention" for window in self.windows]
            config |= {"layer_types": kinds, "sliding_window": max(self.windows) + 1}
            config |= {"is_causal": False} if self.open_windows else {}
        config["outrider"] = {"draft_vocab_size": self.draft_vocab_size, "target": self.target}
        return config

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> Self:
        """Read a checkpoint's `config.json`; raises CheckpointError naming missing or unsupported fields."""
        if config.get(speculators.TYPE):
            config = speculators.plain_config(config)
        kind, gemma = kind_of(config), GEMMA in (config.get("architectures") or [])
        config = gemma_shape(config) if gemma else config
        section = {**(config.get("dflash_config") or {}), **(config.get("dspark_config") or {})}
        choosing, convolution = None, None
        if kind == "dflash2":
            choosing, convolution = choose.read(config, section)
        else:
            check_supported(config, section)
        fields = Fields(config, section)
        layers, block = fields.integer("num_hidden_layers"), fields.integer("block_size")
        extra, rank = config.get("outrider") or {}, int(fields.value("markov_rank") or 0)
        reads_target = kind in READING_KINDS
        return cls(
            **fields.layers(theta=1e6, positions=32768),
            kind=kind,
            gamma=block - 1 if kind in ANCHORED else block,
            num_layers=layers,
            num_target_layers=fields.integer("num_target_layers", 0),
            target_layers=tuple(int(i) for i in fields.get("target_layer_ids")) if reads_target else (),
            mask_token_id=fields.integer("mask_token_id") if reads_target else 0,
            markov_rank=rank,
            markov_head=str(fields.value("markov_head_type", "vanilla")).lower(),
            confidence_head=kind not in ANCHORED and bool(config.get("enable_confidence_head", True)),
            confidence_with_markov=bool(config.get("confidence_head_with_markov", rank > 0)),
            sample_from_anchor=bool(config.get("sample_from_anchor", True)),
            qk_norm=bool(config.get("qk_norm", True)) or kind != "diffusion",
            draft_vocab_size=extra.get("draft_vocab_size"),
            windows=() if gemma else windows(config, layers),
            gemma=gemma,
            shared_kv=gemma and bool(config.get("attention_k_eq_v")),
            logit_cap=float(fields.value("final_logit_softcapping") or 0.0) if gemma or choosing else 0.0,
            logit_scale=float(fields.value("output_multiplier", 1.0)) if choosing else 1.0,
            open_windows="sliding_attention" in (config.get("layer_types") or []) and config.get("is_causal") is False,
            convolution=convolution,
            choosing=choosing,
            target=extra.get("target") or {},
        )


def check_supported(config: dict[str, Any], section: dict[str, Any]) -> None:
    """Raise CheckpointError naming fields that the loader does not support."""
    used = [k for k in ("conv_kernel_size", "selector_rank", "projector_type") if section.get(k)]
    used = used or [k for k in ("attention_bias", "is_causal") if config.get(k)]
    if used:
        raise CheckpointError(f"drafter uses {', '.join(used)}, which this loader does not support")


def kind_of(config: dict[str, Any]) -> str:
    """Return a name of `ARCHITECTURES` for the architecture that the checkpoint names."""
    names = config.get("architectures") or []
    for kind, architecture in ARCHITECTURES.items():
        if architecture in names:
            return kind
    if "DSparkDraftModel" in names or GEMMA in names:
        return "dspark"
    if LatticeChoosing.ARCHITECTURE in names:
        return "dflash2"
    known = ", ".join((*ARCHITECTURES.values(), LatticeChoosing.ARCHITECTURE))
    raise CheckpointError(f"drafter architecture {names or 'none'} is unknown; expected one of {known}")


def gemma_shape(config: dict[str, Any]) -> dict[str, Any]:
    """Return a Gemma drafter's config with the usual names for the shape of its layers, which all see the whole
    context."""
    unsupported = [
        key for key in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers") if config.get(key)
    ]
    if config.get("hidden_activation") != "gelu_pytorch_tanh":
        unsupported.append(f"hidden_activation {config.get('hidden_activation')!r}")
    if unsupported:
        raise CheckpointError(f"Gemma drafter uses {', '.join(unsupported)}, which this loader does not support")
    shared = bool(config.get("attention_k_eq_v"))
    heads = config.get("num_global_key_value_heads" if shared else "num_key_value_heads")
    return config | {
        "head_dim": config.get("global_head_dim"), "num_key_value_heads": heads, "attention_k_eq_v": shared
    }  # fmt: skip


def windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Return `BlockConfig.windows` from the kinds of the layers. The config's window counts the token itself."""
    kinds = config.get("layer_types") or ["full_attention"] * layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise CheckpointError(
            f"drafter layer_types {unknown or kinds}: expected full_attention or sliding_attention "
            f"for each of {layers} layers"
        )
    if "sliding_attention" not in kinds:
        return ()
    size = config.get("sliding_window")
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(f"drafter layers slide over a sliding_window of at least 1, not {size!r}")
    return tuple(size - 1 if kind == "sliding_attention" else -1 for kind in kinds)
