"""Drafter checkpoint folders: read public ones and our own, check that they fit the target, write both storages.

Plain storage is the format that DeepSpec trains and SGLang loads: one bfloat16 tensor per projection. Compact storage
is the format that the project ships: int8 with one scale per output channel, the sequential head cut to the draft
vocabulary.
"""

import hashlib
import math
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..base import Rows
from ..checkpoint import WEIGHTS as WEIGHTS
from ..checkpoint import check_shapes as check_tensors
from ..checkpoint import drafted_tokens, read_tensors, stored_shapes, write_folder
from ..config_file import CheckpointError, check_layers, check_same, read_json
from .choosing import LatticeChoosing
from .config import BlockConfig
from .model import BlockModel, DraftModel

Model = TypeVar("Model", bound=DraftModel)
SHARED = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.", "t2d")
"""Prefixes of tensors that belong to the target or are recomputed."""
SELECTORS = ("candidate_selector.", "lilicorr.")
"""Prefixes of tensors that keep their published names."""
HEADS = {f"markov_head.{w}.weight": f"markov_head.markov_{w}.weight" for w in ("w1", "w2")}


def target_identity(config: Any, embedding: Rows) -> dict[str, Any]:
    """Return a drafter's record of the target it was trained for.

    config: the target's (text) config.
    embedding: [V, d] its input embedding. The digest reads 64 rows in bfloat16, so it distinguishes models of one
        architecture and does not depend on the dtype a server runs them in.
    """
    rows = torch.linspace(0, embedding.shape[0] - 1, 64).long()
    sample = embedding[rows.to(embedding.device)].detach().to("cpu", torch.bfloat16).contiguous()
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "embedding": hashlib.sha256(sample.view(torch.int16).numpy().tobytes()).hexdigest()[:16],
    }


def check_target(config: BlockConfig, target: dict[str, Any]) -> None:
    """Raise CheckpointError naming every difference from the target that the drafter was trained for."""
    shape = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_target_layers,
        "vocab_size": config.vocab_size,
    }
    check_same(target, shape | config.target)
    if config.target_layers:
        check_layers(config.target_layers, int(target.get("num_hidden_layers") or 0))


def check_shapes(config: BlockConfig, embedding: Rows, head: Rows, gamma: int | None) -> None:
    """Raise CheckpointError unless embedding and head [V, d] of the target, and gamma, fit the drafter."""
    if tuple(embedding.shape) != (config.vocab_size, config.hidden_size) or head.shape[1] != config.hidden_size:
        raise CheckpointError(
            f"the drafter needs a target with embedding [{config.vocab_size}, {config.hidden_size}]; "
            f"this one has embedding {list(embedding.shape)} and head {list(head.shape)}"
        )
    if gamma is not None and not 1 <= gamma <= config.gamma:
        raise CheckpointError(f"gamma must lie in 1..{config.gamma}, by the drafter's training; got {gamma}")


def fused_names(config: BlockConfig) -> dict[str, tuple[list[str], list[int]]]:
    """Map our fused parameters to the names and row counts of the tensors they hold in a plain checkpoint."""
    kv, inner = config.num_kv_heads * config.head_dim, config.intermediate_size
    out: dict[str, tuple[list[str], list[int]]] = {}
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        parts = "qk" if config.shared_kv else "qkv"
        attention = [f"{prefix}self_attn.{p}_proj.weight" for p in parts]
        out[f"{prefix}qkv.weight"] = (attention, [config.num_heads * config.head_dim, kv, kv][: len(parts)])
        out[f"{prefix}gate_up.weight"] = ([f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up")], [inner, inner])
    return out


def plain_name(name: str) -> str:
    """Return a parameter's name in a plain checkpoint, for parameters that are not fused."""
    if name.startswith(SELECTORS):
        return name
    for part in ("q_norm", "k_norm", "o_proj"):
        name = name.replace(f".{part}.", f".self_attn.{part}.")
    return HEADS.get(name, name.replace(".down_proj.", ".mlp.down_proj."))


def to_plain(model: DraftModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a plain checkpoint; a truncated W2 is filled up with zero rows."""
    config, fused = model.config, fused_names(model.config)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if name in fused:
            names, sizes = fused[name]
            tensors |= dict(zip(names, value.split(sizes), strict=True))
        elif name == "markov_head.w2.weight" and config.draft_vocab_size:
            whole = value.new_zeros(config.vocab_size, config.markov_rank)
            whole[model.vocab.cpu()] = value
            tensors[plain_name(name)] = whole
        else:
            tensors[plain_name(name)] = value
    return {name: value.contiguous().clone() for name, value in tensors.items()}


def load_plain(model: DraftModel, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `model` from the tensors of a plain checkpoint; raises CheckpointError if any is missing or differs."""
    tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    tensors = {n: v for n, v in tensors.items() if not n.startswith(SHARED)}
    if not model.config.confidence_head:
        tensors = {n: v for n, v in tensors.items() if not n.startswith("confidence_head.")}
    own, fused, w2 = model.state_dict(), fused_names(model.config), HEADS["markov_head.w2.weight"]
    if w2 in tensors and len(tensors[w2]) == model.config.vocab_size:
        tensors[w2] = tensors[w2][model.vocab]
    parts = {name: fused.get(name, ([plain_name(name)], [len(value)])) for name, value in own.items()}
    needed = {
        part: (rows, *own[name].shape[1:]) for name, made in parts.items() for part, rows in zip(*made, strict=True)
    }
    check_tensors({name: value.shape for name, value in tensors.items()}, needed, {})
    model.load_state_dict({name: torch.cat([tensors[part] for part in names]) for name, (names, _) in parts.items()})


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values and float32 scales [rows, 1] of a matrix, one scale per output channel."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
    return (weight.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def save_plain(model: DraftModel, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a folder that stock SGLang loads; there it drafts from the whole vocabulary."""
    tensors = to_plain(model)
    tensors = {n: v.to(torch.float32 if n.startswith("confidence_head.") else dtype) for n, v in tensors.items()}
    config = model.config.to_json()
    config["outrider"]["draft_vocab_size"] = None
    write_folder(folder, tensors, config)


def save_compact(model: DraftModel, folder: str | Path) -> None:
    """Write the shipped storage: int8 matrices with scales, everything else bfloat16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if value.ndim == 2 and value.shape[0] > 1:
            tensors[name], tensors[f"{name}.scale"] = quantise(value)
        else:
            tensors[name] = value.float() if name.startswith("confidence_head.") else value.bfloat16()
    if model.config.draft_vocab_size:
        tensors["vocab"] = model.vocab.cpu().to(torch.int32)
    write_folder(folder, tensors, {**model.config.to_json(), "outrider_storage": "int8"})


def load(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu") -> BlockModel:
    """Read the DSpark or DFlash drafter of a folder, as `load_as`."""
    return load_as(BlockModel, folder, dtype=dtype, device=device)


def load_as(
    make: type[Model], folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> Model:
    """Read a drafter folder in either storage as a `make`; raises CheckpointError where it cannot be used."""
    folder = Path(folder)
    stated = read_json(folder)
    config = BlockConfig.from_json(stated)
    if config.kind not in make.kinds:
        raise CheckpointError(f"{folder} holds a {config.kind} drafter, not {' or '.join(make.kinds)}")
    compact, tensors = stated.get("outrider_storage") == "int8", read_tensors(folder)
    vocab, offsets = tensors.pop("vocab", None), tensors.pop("d2t", None)
    if config.draft_vocab_size and vocab is None and offsets is not None:
        vocab, order = drafted_tokens(offsets, config.draft_vocab_size, config.vocab_size)
        if (bias := tensors.get(HEADS["markov_head.w2.weight"])) is not None and len(bias) == len(order):
            tensors[HEADS["markov_head.w2.weight"]] = bias[order]
    if config.draft_vocab_size and (vocab is None or len(vocab) != config.draft_vocab_size):
        raise CheckpointError(f"{folder}: draft_vocab_size is {config.draft_vocab_size} but the tokens are not stored")
    model = make(config, vocab).requires_grad_(False)
    if compact:
        scales = {n: tensors.pop(f"{n}.scale") for n in list(tensors) if f"{n}.scale" in tensors}
        state = {n: v.float() * scales[n] if n in scales else v for n, v in tensors.items()}
        unfit = model.load_state_dict(state, strict=False)
        if unfit.missing_keys or unfit.unexpected_keys:
            raise CheckpointError(f"{folder}: lacks {unfit.missing_keys}, has unknown {unfit.unexpected_keys}")
    else:
        load_plain(model, tensors)
    return model.to(device=device, dtype=dtype).eval()


def memory(folder: str | Path, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a drafter folder's model in `dtype`: of its weights, and of one token's keys and values."""
    config = BlockConfig.from_json(read_json(folder))
    numbers = config.max_positions * 2 * config.head_dim  # the rotary table
    if config.draft_vocab_size:  # the target's head, cut to it
        numbers += config.draft_vocab_size * config.hidden_size
    for name, shape in stored_shapes(folder).items():
        if not name.removeprefix("model.").startswith(SHARED):
            numbers += math.prod(shape)
    state = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    state += config.hidden_size if isinstance(config.choosing, LatticeChoosing) else 0
    return numbers * dtype.itemsize, state * dtype.itemsize
