"""The MTP layer of a target's checkpoint folder: its tensors under one set of names, checked against `config.json`.

Names are EAGLE-3's where the tensors are the same: `fc` joins embedding and hidden state, `layers.0.` is the layer. The
rest of the folder is not read. Embedding and head are the target's.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint
from ..chain.network import ATTENTION, LAYER, ChainWeights, layer_shapes, mlp_shapes
from ..checkpoint import Shape, check_shapes, read_tensors
from ..config_file import CheckpointError, check_same, read_json
from .config import ExpertsConfig, MtpConfig

MLP = f"{LAYER}mlp."
EXPERTS = f"{MLP}experts."
JOINED = f"{EXPERTS}gate_up_proj"
"""All experts' gates and inner products in one tensor, for folders that store them together."""
GATE = f"{ATTENTION}gate"
"""The projection of the attention's gates, which the checkpoint stores inside that of queries."""
CORRECTION = f"{MLP}gate.e_score_correction_bias"
"""Numbers added to experts' scores to choose them; they stay in 32 bits."""


def load(
    folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> ChainWeights:
    """Read the layer of a target's folder; norm weights are returned as plain factors. Raises CheckpointError saying
    why the layer cannot be used."""
    config, tensors = check_folder(folder), {}
    for name, value in read_tensors(folder, config.prefix).items():
        known = canonical(name, config)
        if known is not None:
            norm = known.endswith("norm.weight") and config.layout.less_one
            kept = torch.float32 if known == CORRECTION else dtype
            tensors[known] = (value.float() + 1 if norm else value).to(device=device, dtype=kept)
    return ChainWeights(config, tensors | gates(config, tensors))


def gates(config: MtpConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the projections of queries and of gates, which the checkpoint interleaves by head."""
    projections: dict[str, torch.Tensor] = {}
    if config.gated:
        for kind in ("weight", "bias"):
            if (joint := tensors.get(f"{ATTENTION}q_proj.{kind}")) is not None:
                heads = joint.unflatten(0, (config.num_heads, 2, config.head_dim))
                for i, part in enumerate((f"{ATTENTION}q_proj", GATE)):
                    projections[f"{part}.{kind}"] = heads[:, i].flatten(0, 1)
    return projections


def is_carried(folder: str | Path) -> bool:
    """Return True if a target's folder has a supported MTP layer."""
    try:
        return bool(stored_shapes(folder, MtpConfig.from_json(read_json(folder))))
    except CheckpointError:
        return False


def stored_shapes(folder: str | Path, config: MtpConfig) -> dict[str, list[int]]:
    """Return shapes of the layer's tensors by their names here, none where the folder has no such layer. Raises
    CheckpointError."""
    shapes = {canonical(name, config): shape for name, shape in checkpoint.stored_shapes(folder).items()}
    return {name: shape for name, shape in shapes.items() if name is not None}


def canonical(name: str, config: MtpConfig) -> str | None:
    """Return the name here of a tensor of a target's folder; None if it is not the layer's or repeats the target's
    own."""
    if not name.startswith(config.prefix):
        return None
    name = name.removeprefix(config.prefix)
    if name.startswith(config.layout.repeated):
        return None
    for stored, ours in config.layout.names.items():
        if name.startswith(stored):
            return ours + name.removeprefix(stored)
    return name


def check_folder(folder: str | Path) -> MtpConfig:
    """Return the shape of the layer in a target's folder; raises CheckpointError where it is missing or unsupported."""
    config = MtpConfig.from_json(read_json(folder))
    stored = stored_shapes(folder, config)
    if not stored:
        raise CheckpointError(f"{folder} has no MTP layer: no tensors {config.prefix}*")
    check_shapes(stored, shapes(config, stored), layer_shapes(config, config.hidden_size, gated=config.gated)[1])
    return config


def check_target(config: MtpConfig, target: Mapping[str, Any]) -> None:
    """Raise CheckpointError naming how a target's config differs from the one that the layer came with. Fields that the
    config lacks are not compared."""
    wanted = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    wanted["num_hidden_layers"] = config.num_target_layers
    check_same(target, wanted, drafter="this MTP layer", own="its own is")


def shapes(config: MtpConfig, stored: Mapping[str, list[int]]) -> dict[str, Shape]:
    """Return shapes of the tensors that every such layer has; experts joined or apart, as they are stored."""
    size = config.hidden_size
    needed, _ = layer_shapes(config, size, gated=config.gated)
    needed |= {f"{part}norm.weight": (size,) for part in ("embedding_", "hidden_", "")} | {
        "fc.weight": (size, 2 * size)
    }
    if config.experts is None:
        return needed | mlp_shapes(MLP, size, config.intermediate_size)
    return needed | experts_shapes(config.experts, size, JOINED in stored)


def experts_shapes(experts: ExpertsConfig, size: int, joined: bool) -> dict[str, Shape]:
    needed: dict[str, Shape] = {f"{MLP}gate.weight": (experts.count, size)}
    if joined:
        needed |= {
            JOINED: (experts.count, 2 * experts.size, size),
            f"{EXPERTS}down_proj": (experts.count, size, experts.size),
        }
    else:
        for i in range(experts.count):
            needed |= mlp_shapes(f"{EXPERTS}{i}.", size, experts.size)
    if experts.shared_size:
        needed |= mlp_shapes(f"{MLP}shared_expert.", size, experts.shared_size)
    if experts.sigmoid:
        needed[CORRECTION] = (experts.count,)
    elif experts.shared_size:
        needed[f"{MLP}shared_expert_gate.weight"] = (1, size)
    return needed


def memory(folder: str | Path, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a layer in `dtype`: of its weights and a head, and of its state per token of a text."""
    config = MtpConfig.from_json(read_json(folder))
    numbers = config.max_positions * config.rotary_dim + config.vocab_size * config.hidden_size
    numbers += sum(math.prod(shape) for shape in stored_shapes(folder, config).values())
    state = config.hidden_size + 2 * config.num_kv_heads * config.head_dim
    return numbers * dtype.itemsize, state * dtype.itemsize
