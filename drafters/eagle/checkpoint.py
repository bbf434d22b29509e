"""Checkpoint folders of EAGLE-3 heads: their tensors under one set of names, checked against `config.json`.

Names are as in SpecForge and by the EAGLE authors, without `model.` and with `layers.0.` for `midlayer.`, as
speculators writes it. `d2t` holds the offset from each draft token to the target's; `t2d` repeats it the other way
round.
"""

import math
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import torch

from .. import checkpoint
from ..chain.drafter import SHARED
from ..chain.network import ATTENTION, LAYER, ChainWeights, layer_shapes, mlp_shapes
from ..checkpoint import Shape, check_shapes, drafted_tokens, read_tensors, write_folder
from ..config_file import CheckpointError, check_same, read_json
from .config import EagleConfig

ALIASES = {
    "midlayer.": LAYER,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
REPEATED = ("t2d", "rotary_emb.", f"{ATTENTION}rotary_emb.")
"""Prefixes of tensors that are computed from the rest."""


def load(
    folder: str | Path, target_layers: int, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> ChainWeights:
    """Read a folder for a target with `target_layers` layers; raises CheckpointError saying why it cannot be used."""
    config = EagleConfig.from_json(read_json(folder))
    tensors = {canonical(name): value for name, value in read_tensors(folder).items()}
    tensors = {name: value for name, value in tensors.items() if not name.startswith(REPEATED)}
    layers, offsets = config.layers_of(target_layers), tensors.pop("d2t", None)
    stored = {name: list(value.shape) for name, value in tensors.items()}
    check_shapes(stored, shapes(config, len(layers)), optional_shapes(config, len(layers)))
    vocab = None
    if config.draft_vocab_size is not None:
        vocab, order = drafted_tokens(offsets, config.draft_vocab_size, config.vocab_size)
        vocab = vocab.to(device)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    made = {name: value.to(device=device, dtype=dtype) for name, value in tensors.items()}
    return ChainWeights(replace(config, target_layers=layers), made, layers, vocab)


def save(weights: ChainWeights, head: torch.Tensor, folder: str | Path) -> None:
    """Write a folder as the authors and SpecForge do, in bfloat16. head: [V', d], written where V' is less than the
    target's vocabulary: otherwise SGLang uses the target's head."""
    tensors = {name.replace(LAYER, "midlayer."): x.cpu().bfloat16() for name, x in weights.tensors.items()}
    if weights.vocab is not None:
        tensors |= {"lm_head.weight": head.detach().cpu().bfloat16()} | vocabulary_tensors(weights)
    norms = {"fc_norm": "fc_norm.0.weight" in tensors, "norm_before_fc": "input_norm.weight" in tensors}  # for SGLang
    write_folder(folder, tensors, weights.config.to_json() | norms)


def vocabulary_tensors(weights: ChainWeights) -> dict[str, torch.Tensor]:
    """Return the tensors that say which tokens a head drafts; none where it drafts all."""
    if weights.vocab is None:
        return {}
    vocab = weights.vocab.cpu()
    drafted = torch.zeros(weights.config.vocab_size, dtype=torch.bool).index_fill_(0, vocab, True)
    return {"d2t": vocab - torch.arange(len(vocab)), "t2d": drafted}


def canonical(name: str) -> str:
    """Return the one name used here for a tensor that has several."""
    name = name.removeprefix("model.")
    for alias, known in ALIASES.items():
        if name.startswith(alias):
            return known + name.removeprefix(alias)
    return name


def shapes(config: EagleConfig, layers: int) -> dict[str, Shape]:
    """Return shapes of the tensors that every head has, in the order in which a run keeps them."""
    size = config.hidden_size
    return {
        "fc.weight": (size, layers * config.target_hidden_size),
        f"{LAYER}hidden_norm.weight": (size,),
        **layer_shapes(config, 2 * size)[0],
        **mlp_shapes(f"{LAYER}mlp.", size, config.intermediate_size),
        "norm.weight": (size,),
    }


def optional_shapes(config: EagleConfig, layers: int) -> dict[str, Shape]:
    """Return shapes of tensors that some heads have: of `layer_shapes`, feature norms, and an own embedding and
    head."""
    _, optional = layer_shapes(config, 2 * config.hidden_size)
    return optional | {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.logit_size, config.hidden_size),
        "fc.bias": (config.hidden_size,),
        "input_norm.weight": (layers * config.target_hidden_size,),
        **{f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(layers)},
    }


def check_target(config: EagleConfig, names: Container[str], vocab_size: int | None, hidden_size: int | None) -> None:
    """Raise CheckpointError naming how a target with these sizes differs from the head's; None: not known. names: of
    the head's tensors."""
    target = {"vocab_size": vocab_size, "hidden_size": hidden_size}
    check_same(target, {"vocab_size": config.vocab_size, "hidden_size": config.target_hidden_size})
    borrows = [name for name in SHARED if name not in names]
    if hidden_size and config.hidden_size != hidden_size and borrows:
        raise CheckpointError(
            "this drafter does not fit the target: "
            f"hidden_size is {hidden_size}, the drafter's own {config.hidden_size}, and it has no {borrows[0]}"
        )


def stored_shapes(folder: str | Path) -> dict[str, list[int]]:
    """Return the shapes of a folder's tensors by their canonical names; raises CheckpointError."""
    return {canonical(name): shape for name, shape in checkpoint.stored_shapes(folder).items()}


def memory(folder: str | Path, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a head in `dtype`: of its weights, and of its state per token of a text."""
    config, stored = EagleConfig.from_json(read_json(folder)), stored_shapes(folder)
    numbers = config.max_positions * config.head_dim
    numbers += sum(math.prod(shape) for name, shape in stored.items() if not name.startswith(("d2t", *REPEATED)))
    if "lm_head.weight" not in stored:
        numbers += config.logit_size * config.hidden_size
    numbers += 2 * config.num_kv_heads * config.head_dim * 2 * config.hidden_size  # keys and values are kept apart too
    state = config.hidden_size + 2 * config.num_kv_heads * config.head_dim
    return numbers * dtype.itemsize, state * dtype.itemsize
