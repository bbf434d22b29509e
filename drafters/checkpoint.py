"""The tensors of a drafter's checkpoint folder of any kind: read, compared with its config, and written."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.storage.replacing import replace, replacing

from .config_file import CheckpointError

T = TypeVar("T")
Shape = tuple[int, ...]
WEIGHTS = "model.safetensors"
NAMED = 4
"""Tensors that a message names; it counts the rest."""
TOGETHER = (("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"), ("fc_norm.",))
"""Groups of prefixes of optional tensors; a folder has all tensors of a group or none."""


def write_folder(folder: str | Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS) as temporary:
        save_file({n: v.contiguous() for n, v in tensors.items()}, temporary, metadata={"format": "pt"})
    replace({folder / "config.json": json.dumps(config, indent=2) + "\n"})


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
    for group in TOGETHER:
        of_group = {name for name in optional if name.startswith(group)}
        if 0 < len(of_group & stored.keys()) < len(of_group):
            raise CheckpointError(f"drafter checkpoint lacks {some(of_group - stored.keys())}")
    for name, shape in known.items():
        if tuple(has := stored.get(name, shape)) != shape:
            raise CheckpointError(
                f"{name}: {list(has)} in the checkpoint, {list(shape)} by its config.json and the target"
            )


def some(names: Collection[str]) -> str:
    """Return the first of these names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(sorted(names)[:NAMED]) + (f" and {more} more" if more > 0 else "")


def drafted_tokens(offsets: torch.Tensor | None, size: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors [V'] int64: the drafted tokens, sorted, and their places in `offsets`, the folder's `d2t`.
    size: V'. Raises CheckpointError."""
    if offsets is None or offsets.shape != (size,):
        has = "lacks it" if offsets is None else f"has {list(offsets.shape)}"
        raise CheckpointError(f"draft_vocab_size is {size}, so d2t must be [{size}]; the drafter checkpoint {has}")
    vocab = offsets.long() + torch.arange(len(offsets))
    if int(vocab.min()) < 0 or int(vocab.max()) >= vocab_size or len(vocab.unique()) < len(vocab):
        raise CheckpointError(f"d2t must name {size} different tokens of the target's {vocab_size}")
    return vocab.sort()


def _read_each(folder: str | Path, read: Callable[[Any, str], T], prefix: str = "") -> dict[str, T]:
    """Return `read(file, name)` for each tensor of a checkpoint folder with this prefix; `file` is its open file."""
    results: dict[str, T] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        pickled = "; weights in *.bin are not read, since they may run code" if any(Path(folder).glob("*.bin")) else ""
        raise CheckpointError(f"{folder} has no {WEIGHTS}{pickled}")
    for file in files:
        try:
            with safe_open(file, "pt") as stored:
                names = stored.keys()
                results |= {name: read(stored, name) for name in names if name.startswith(prefix)}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is damaged: {error}; copy it here again") from None
    return results


def stored_shapes(folder: str | Path) -> dict[str, list[int]]:
    """Return the shapes of a checkpoint folder's tensors without reading them; raises CheckpointError."""
    return _read_each(folder, lambda file, name: file.get_slice(name).get_shape())


def read_tensors(folder: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint folder with this prefix; raises CheckpointError where files are missing or
    damaged."""
    tensors: dict[str, torch.Tensor] = _read_each(folder, lambda file, name: file.get_tensor(name), prefix)
    if unreal := [name for name, value in tensors.items() if not torch.isfinite(value).all()]:
        raise CheckpointError(f"{folder} is damaged: {unreal[0]} has values that are not finite; copy it here again")
    return tensors
