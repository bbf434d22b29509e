"""Shape and first weights of a drafter to train, from the flags, the target and the answers."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.storage import replacing

from .. import registry
from ..block import checkpoint
from ..block.choosing import CodebookChoosing, Convolution
from ..block.config import BlockConfig
from ..block.model import BlockModel, TrainedModel
from ..diffusion.model import DiffusionModel
from ..eagle.config import EagleConfig
from ..eagle.model import EagleModel
from ..training.start import start_diffusion, start_eagle, start_from_target
from ..training.store import FeatureStore
from ..training.target import TargetModel
from .arguments import CONVERSION, DIFFUSION_STAGES

CONVOLUTION = Convolution(taps=2, group=16)
"""DFlash 2's, as published."""


def spread_layers(count: int, kind: str) -> tuple[int, ...]:
    """Return the target layers that a drafter reads, spread evenly from the second to the second last. EAGLE-3 reads
    three, the rest five; fewer of a shallow target."""
    last, wanted = max(0, count - 2), 3 if kind == EagleConfig.kind else 5
    wanted, first = min(wanted, max(1, count - 1)), min(1, last)
    return tuple(dict.fromkeys(round(first + (last - first) * i / max(1, wanted - 1)) for i in range(wanted)))


def target_layers(kind: str, target: TargetModel, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the target layers that a fresh drafter reads: the `wanted` ones, if it reads any."""
    if kind in (*DIFFUSION_STAGES, CONVERSION):
        return ()
    return tuple(wanted or spread_layers(target.config.num_hidden_layers, kind))


def layer_shape(args: argparse.Namespace, target: TargetModel) -> dict[str, Any]:
    """Return fields of all drafters' configs: the target's layer shape, gamma and the draft vocabulary's size."""
    shape = target.config
    rope = getattr(shape, "rope_parameters", None) or {}
    return {
        "gamma": args.gamma,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_heads": shape.num_attention_heads,
        "num_kv_heads": shape.num_key_value_heads,
        "head_dim": getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta", getattr(shape, "rope_theta", 1e4))),
        "max_positions": shape.max_position_embeddings,
        "draft_vocab_size": args.draft_vocab if 0 < args.draft_vocab < shape.vocab_size else None,
    }


def make_config(args: argparse.Namespace, kind: str, target: TargetModel, layers: tuple[int, ...]) -> BlockConfig:
    shape, tokenizer = target.config, target.tokenizer
    mask = args.mask_token
    if mask is None:
        mask = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else tokenizer.pad_token_id
    dspark, dflash2, diffusion = (kind == name for name in ("dspark", "dflash2", "diffusion"))
    fields = layer_shape(args, target)
    if dflash2:
        choosing = CodebookChoosing(args.candidates, args.rank)
        fields |= {"draft_vocab_size": None, "choosing": choosing, "convolution": CONVOLUTION}
    return BlockConfig(
        **fields,
        kind=kind,
        num_layers=args.draft_layers or (3 if diffusion else 2),
        num_target_layers=shape.num_hidden_layers,
        target_layers=layers,
        mask_token_id=0 if diffusion else int(mask or 0),
        markov_rank=args.rank if dspark else 0,
        markov_head=args.markov_head,
        confidence_head=dspark or diffusion,
        confidence_with_markov=dspark,
        qk_norm=not diffusion or hasattr(target.model.model.layers[0].self_attn, "q_norm"),
        target=checkpoint.target_identity(shape, target.embedding),
    )


def drafter_config(
    args: argparse.Namespace, kind: str, target: TargetModel, layers: tuple[int, ...]
) -> BlockConfig | EagleConfig:
    """Return the shape of a drafter that reads these layers of the target."""
    if kind == EagleConfig.kind:
        size = target.config.hidden_size
        return EagleConfig(**layer_shape(args, target), target_hidden_size=size, target_layers=layers)
    return make_config(args, registry.find(kind).kind or kind, target, layers)


def fresh_drafter(
    args: argparse.Namespace, config: BlockConfig | EagleConfig, target: TargetModel, vocab: torch.Tensor | None,
    tokens: torch.Tensor,
) -> TrainedModel:  # fmt: skip
    """Create a float32 drafter from the target's layers, or from random weights if --start says so.

    Raises ValueError where their shapes do not match.
    vocab: [V'] int64, the tokens it drafts. tokens: [S] a text on which the sizes of queries and keys are measured.
    """
    torch.manual_seed(args.seed)
    from_target = args.start == "target"
    if isinstance(config, EagleConfig):
        head = EagleModel.fresh(config, vocab)
        if from_target:
            start_eagle(head, target)
        return head
    if config.kind == "diffusion":
        denoiser = DiffusionModel(config, vocab)
        start_diffusion(denoiser, target, start_layers(args, config, target) if from_target else None)
        return denoiser
    model = BlockModel(config, vocab)
    if from_target:
        start_from_target(model, target, tokens)
    return model


def start_layers(args: argparse.Namespace, config: BlockConfig, target: TargetModel) -> list[int]:
    """Return the target layers from which a diffusion drafter's layers start; raises ValueError for numbers that do not
    fit."""
    last = target.config.num_hidden_layers - 1
    layers = args.start_layers or [*range(config.num_layers - 1), last]
    if len(layers) != config.num_layers or not all(0 <= i <= last for i in layers):
        raise ValueError(f"--start-layers {layers}: expected {config.num_layers} numbers in 0..{last}")
    return layers


def draft_vocabulary(store: FeatureStore, config: BlockConfig | EagleConfig, path: Path) -> torch.Tensor | None:
    """Return the most frequent tokens of the answers, ascending; None for the whole vocabulary. Kept in `path`, since a
    run that is resumed with more answers must keep its tokens."""
    if not config.draft_vocab_size:
        return None
    if not path.exists():
        counts = store.token_counts(config.vocab_size)
        likeliest = counts.topk(config.draft_vocab_size).indices.sort().values.tolist()
        replacing.replace({path: json.dumps(likeliest)})
    return torch.tensor(json.loads(path.read_text()))
