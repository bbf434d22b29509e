"""Names and shapes of a chaining drafter's tensors, compared with what its config asks for."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..config_file import CheckpointError
from .network import ATTENTION, LAYER

NAMED = 4
"""Tensors that a message names; of others it has the number."""

Shape = tuple[int, ...]


def check_shapes(
    stored: Mapping[str, Sequence[int]], needed: Mapping[str, Shape], optional: Mapping[str, Shape]
) -> None:
    """Raise CheckpointError naming tensors that lack, are not known or have another shape than the config says.

    stored: shapes of the checkpoint's tensors by name.
    """
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
    """The first of these names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(sorted(names)[:NAMED]) + (f" and {more} more" if more > 0 else "")


def layer_shapes(config: Any, inputs: int, *, gated: bool = False) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Tensors of a layer without its MLP, whose attention reads rows of `inputs` numbers: those that every layer has,
    and those that some have, biases and norms of queries and keys. gated: queries have gates beside them."""
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
    """Tensors of an MLP whose names begin so."""
    rows = {f"{prefix}{part}_proj.weight": (inner, size) for part in ("gate", "up")}
    return {**rows, f"{prefix}down_proj.weight": (size, inner)}
