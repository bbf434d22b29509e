"""Shape of the parts that DFlash 2 and LiLiCorr add to DFlash, from the `dflash_config` of their folders.

Both draw a block as a path through the likeliest tokens of each position; a token's score depends on the token before.
Both may convolve a block's rows around attention and MLP. Fields have the names that SGLang reads. Each of them changes
the computation, so none has a default, and unknown fields are refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config_file import CheckpointError

PLAIN = {"block_size", "mask_token", "mask_token_id", "target_layer_ids", "num_target_layers"}
"""Fields of `dflash_config` that DFlash has too."""
CONVOLUTION = ("conv_kernel_size", "conv_group_size")
LATTICE = "lilicorr_"
"""Prefix of LiLiCorr's fields."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """Convolution over `taps` rows of a block, the row itself first; a row adds one number per tap and `group` channels
    to the kernel."""

    taps: int
    group: int

    def to_json(self) -> dict[str, Any]:
        return dict(zip(CONVOLUTION, (self.taps, self.group), strict=True))


@dataclass(frozen=True, slots=True)
class CodebookChoosing:
    """DFlash 2's selector: a pair of tokens is scored by its codes of `rank` numbers and the row's hidden state."""

    ARCHITECTURE: ClassVar[str] = "DFlash2DraftModel"

    candidates: int
    rank: int

    def to_json(self) -> dict[str, Any]:
        return {"selector_top_k": self.candidates, "selector_rank": self.rank}


@dataclass(frozen=True, slots=True)
class LatticeChoosing:
    """LiLiCorr's head: attention layers over all candidates of a block give each two vectors of `factors` numbers.
    width: of its layers; 0: the drafter's. eps: least length of a vector. scale: of the vectors' products."""

    ARCHITECTURE: ClassVar[str] = "LiLiCorrDraftModel"

    candidates: int
    width: int
    layers: int
    heads: int
    mlp_ratio: float
    factors: int
    eps: float
    scale: float

    def to_json(self) -> dict[str, Any]:
        return {LATTICE + field: getattr(self, name) for field, (name, _) in LATTICE_FIELDS.items()}


Choosing = CodebookChoosing | LatticeChoosing
LATTICE_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "candidate_topk": ("candidates", int), "hidden_size": ("width", int), "num_layers": ("layers", int),
    "num_heads": ("heads", int), "mlp_ratio": ("mlp_ratio", float), "factor_dim": ("factors", int),
    "vector_eps": ("eps", float), "logit_scale": ("scale", float),
}  # fmt: skip
"""LiLiCorr's fields, with the names and types of `LatticeChoosing`."""


def read(config: dict[str, Any], section: dict[str, Any]) -> tuple[Choosing, Convolution | None]:
    """Read both parts from a `config.json` and its `dflash_config`; raises CheckpointError naming unknown fields."""
    lattice = LatticeChoosing.ARCHITECTURE in (config.get("architectures") or [])
    _check_known(config, section, lattice)
    choosing: Choosing
    if lattice:
        given = {name: _number(section, LATTICE + field, cast) for field, (name, cast) in LATTICE_FIELDS.items()}
        choosing = LatticeChoosing(**given)
    else:
        choosing = CodebookChoosing(_number(section, "selector_top_k", int), _number(section, "selector_rank", int))
    if not any(section.get(name) for name in CONVOLUTION):
        return choosing, None
    return choosing, Convolution(*(_number(section, name, int) for name in CONVOLUTION))


def _check_known(config: dict[str, Any], section: dict[str, Any], lattice: bool) -> None:
    """Raise CheckpointError naming fields that ask for an unsupported computation."""
    selector = {"selector_rank", "selector_top_k", "output_multiplier", "final_logit_softcapping"}
    known = (
        PLAIN | {*CONVOLUTION} | ({LATTICE + name for name in (*LATTICE_FIELDS, "enabled")} if lattice else selector)
    )
    used = [name for name, value in section.items() if name not in known and value not in (None, False)]
    used = [name for name in used if (name, section[name]) != ("projector_type", "lilicorr")]
    used += [name for name in ("attention_bias", "is_causal", "use_gemma_norm") if config.get(name)]
    if (activation := config.get("hidden_act") or "silu") != "silu":
        used.append(f"hidden_act {activation!r}")
    if lattice and section.get(f"{LATTICE}enabled") is False:
        used.append(f"{LATTICE}enabled False")
    if used:
        raise CheckpointError(f"drafter uses {', '.join(used)}, which this loader does not support")


def _number(section: dict[str, Any], name: str, cast: Callable[[Any], Any]) -> Any:
    """Return a positive number (LiLiCorr's width may be 0); raises CheckpointError."""
    value = section.get(name)
    if value is None:
        raise CheckpointError(f"drafter config.json has no {name!r}")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value < 0 or (value == 0 and name != f"{LATTICE}hidden_size"):
        raise CheckpointError(f"drafter config.json: {name} is a positive number, not {value!r}")
    return cast(value)
