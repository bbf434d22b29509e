"""The delta on disk: low-rank factors in int8 and the mask's embedding, and how they merge into a target's weights.

A factor has one scale for each of its r rows (b is kept transposed). A target and its delta make an ordinary folder of
the target's architecture, with a config.json that also states the block-diffusion fields.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..block.checkpoint import quantise, target_identity
from ..checkpoint import WEIGHTS, read_tensors, write_folder
from ..config_file import CheckpointError, check_same, read_json
from .model import ConvertedModel

FIELDS = ("block_size", "mask_token_id", "shift", "context_mask")
"""The block-diffusion fields of config.json."""
TARGETS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""The target's projections, stacked by rows, that share a delta."""


def save(model: ConvertedModel, folder: Path) -> None:
    """Write the delta of the model's present weights."""
    tensors = {"mask": model.mask.detach().cpu().bfloat16()}
    for name, factor in model.deltas().items():
        rows = factor.detach().cpu()
        tensors[name], tensors[f"{name}.scale"] = quantise(rows.T if name.endswith(".b") else rows)
    layout = model.layout
    config = {name: getattr(layout, name) for name in FIELDS} | {"rank": model.rank, "target": model.config.target}
    write_folder(folder, tensors, config)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a delta's config. Raises CheckpointError where the folder holds none."""
    config = read_json(folder)
    if not {*FIELDS, "rank", "target"} <= config.keys():
        raise CheckpointError(f"{folder / 'config.json'} is not that of a block-diffusion delta")
    return config


def merge(folder: Path, weights: dict[str, torch.Tensor], layers: int) -> None:
    """Add a delta to a target's weights, by their Hugging Face names, in place; each keeps its dtype."""
    tensors = read_tensors(folder)
    try:
        for layer in range(layers):
            for name_of_ours, names in TARGETS.items():
                a, b = (_factor(tensors, f"layers.{layer}.{name_of_ours}.{part}") for part in "ab")
                delta = (b.T @ a).split([weights[f"model.layers.{layer}.{n}.weight"].shape[0] for n in names])
                for name, change in zip(names, delta, strict=True):
                    weight = weights[f"model.layers.{layer}.{name}.weight"]
                    weight.copy_(weight.float() + change)
        weights["model.embed_tokens.weight"][read_config(folder)["mask_token_id"]].copy_(tensors["mask"])
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder} does not fit the target: {error}") from None


def _factor(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[name].float() * tensors[f"{name}.scale"]


def write_merged(target: Path, folder: Path, into: Path) -> None:
    """Write a folder of the target with the delta in its weights; raises CheckpointError where they do not fit. target:
    a Hugging Face folder with safetensors."""
    from transformers import AutoConfig

    delta, shape = read_config(folder), AutoConfig.from_pretrained(target).get_text_config()
    weights = read_tensors(target)
    identity = target_identity(shape, weights["model.embed_tokens.weight"])
    check_same(identity, delta["target"], drafter=str(folder), own="the delta is for")
    merge(folder, weights, shape.num_hidden_layers)
    into.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        ours = path.name.startswith("outrider-") or "safetensors" in path.name
        if path.suffix in (".json", ".jinja", ".model", ".txt") and not ours:
            (into / path.name).write_bytes(path.read_bytes())
    config = read_json(target) | {name: delta[name] for name in FIELDS}
    (into / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(weights, into / WEIGHTS, metadata={"format": "pt"})
