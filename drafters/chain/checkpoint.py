"""Names and shapes of a chaining drafter's tensors, compared with its config."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..config_file import CheckpointError
from .network import ATTENTION, LAYER

NAMED = 4
"""Tensors that a message names; it counts the rest."""

Shape = tuple[int, ...]


def check_shapes(
    stored: Mapping[str, Sequence[int]], needed: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> None:
    """Raise CheckpointError naming tensors that are missing, unknown or shaped differently from the config. stored:
    shapes of the checkpoint's tensors by name."""
    if missing := needed.keys() - stored.keys():
        raise CheckpointError(f"drafter checkpoint lacks {some(missing)}")
    known = {**needed, **optional}
    if unknown := stored.keys() - known.keys():
        raise CheckpointError(f"drafter checkpoint has tensors this loader does not know: {some(unknown)}")
    for group in ((f"{ATTENTION}q_norm", f"{ATTENTION}k_norm"), ("fc_norm.",)):
        of_group = {name for name in optional if name.startswith(group)}
        if 0 < len(of_group & stored.keys()) < len(of_group):
            raise CheckpointError(f"drafter checkpoint lacks {some(of_group - stored.keys())}")
    for name, shape in stored.items():
        if tuple(shape) != known[name]:
            raise CheckpointError(
                f"{name}: {list(shape)} in the checkpoint, {list(known[name])} by its config.json and the target"
            )


def some(names: Collection[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(sorted(names)[:NAMED]) + (f" and {more} more" if more > 0 else "")


def layer_shapes(config: Any, inputs: int, *, gated: bool = False) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Return shapes of a layer's tensors without its MLP: required ones, and optional ones (biases, norms of q and k).
    inputs: numbers in a row that its attention reads. gated: the projection of queries also has gates."""
    size, width = config.hidden_size, config.head_dim
    rows = {"q": (1 + gated) * config.num_heads * width} | dict.fromkeys("kv", config.num_kv_heads * width)
    needed: dict[str, Shape] = {
        **{f"{LAYER}{norm}_layernorm.weight": (size,) for norm in ("input", "post_attention")},
        **{f"{ATTENTION}{part}_proj.weight": (count, inputs) for part, count in rows.items()},
        f"{ATTENTION}o_proj.weight": (size, config.num_heads * width),
    }
    optional: dict[str, Shape] = {
        **{f"{ATTENTION}{part}_proj.bias": (count,) for part, count in rows.items()},
        f"{ATTENTION}o_proj.bias": (size,),
        **{f"{ATTENTION}{part}_norm.weight": (width,) for part in "qk"},
    }
    return needed, optional


def mlp_shapes(prefix: str, size: int, inner: int) -> dict[str, Shape]:
    """Return shapes of an MLP's tensors with this prefix."""
    rows = {f"{prefix}{part}_proj.weight": (inner, size) for part in ("gate", "up")}
    return {**rows, f"{prefix}down_proj.weight": (size, inner)}
