"""`outrider export`: a drafter in another storage or format, the mean of several, or a delta merged into its target."""

import argparse
from pathlib import Path

import torch

from ..block import checkpoint
from ..block.model import DraftModel
from ..config_file import read_json
from ..conversion import delta
from ..eagle import checkpoint as eagle
from ..eagle.config import is_eagle
from ..eagle.speculators import save_speculators
from ..networks import load_any
from ..training.loop import checkpoint_model
from ..training.target import TargetModel


def mean_drafter(paths: list[Path]) -> DraftModel:
    """Return the float32 drafter in a folder or a run's checkpoint; of several, the mean of their weights.

    Runs from the same weights end in one basin of the loss, and their mean often has a lower loss than each (Wortsman
    et al., "Model soups", 2022). Raises ValueError where shapes or vocabularies differ.
    """
    first, *further = (
        checkpoint_model(path) if path.is_file() else load_any(path, dtype=torch.float32) for path in paths
    )
    for path, drafter in zip(paths[1:], further, strict=True):
        if drafter.config != first.config or not torch.equal(drafter.vocab, first.vocab):
            raise ValueError(f"{path} is not of the same shape and draft vocabulary as {paths[0]}")
    with torch.no_grad():
        for weight, *more in zip(first.parameters(), *(drafter.parameters() for drafter in further), strict=True):
            weight.copy_(torch.stack([weight, *more]).mean(0))
    return first


def export_head(head: Path, target: Path, folder: Path) -> None:
    """Write an EAGLE-3 head in the format of vLLM's `speculators`; raises CheckpointError where it does not fit."""
    model = TargetModel.load(str(target))
    weights = eagle.load(head, model.config.num_hidden_layers)
    eagle.check_target(weights.config, weights.tensors, *model.embedding.shape)
    verifier = {"name_or_path": str(target), "architectures": model.model.config.architectures or []}
    save_speculators(weights, model.embedding, model.head, verifier, folder)


def export(args: argparse.Namespace) -> int:
    """Write a drafter in another storage, or a delta merged into its target; return the exit status."""
    heads = [path for path in args.drafter if path.is_dir() and is_eagle(read_json(path))]
    if args.storage == "speculators":
        if not args.target or len(args.drafter) > 1 or not heads:
            raise ValueError("--storage speculators takes one EAGLE-3 folder, and --target, the model that it is for")
        export_head(heads[0], args.target, args.out)
    elif heads:
        raise ValueError(f"{heads[0]}: stock SGLang loads an EAGLE-3 folder as it is; for vLLM --storage speculators")
    elif args.target:
        if len(args.drafter) > 1:
            raise ValueError("--target takes one delta")
        delta.write_merged(args.target, args.drafter[0], args.out)
    elif args.storage == "int8":
        checkpoint.save_compact(mean_drafter(args.drafter), args.out)
    else:
        checkpoint.save_plain(mean_drafter(args.drafter), args.out)
    print(f"wrote {args.out} ({(args.out / checkpoint.WEIGHTS).stat().st_size / 1e6:.1f} MB)")
    return 0
