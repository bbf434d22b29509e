"""Shapes of drafters before their first step, from the flags, the target and the answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from outrider.storage import replacing

from ..block import checkpoint
from ..block.choosing import CodebookChoosing, Convolution
from ..block.config import BlockConfig
from ..eagle.config import EagleConfig
from ..training.store import FeatureStore
from ..training.target import TargetModel

CONVOLUTION = Convolution(taps=2, group=16)
"""DFlash 2's, as published."""


def spread_layers(count: int, kind: str) -> tuple[int, ...]:
    """The target layers that a drafter reads: spread evenly from the second to the second last, three for EAGLE-3 and
    five for others, fewer of a shallow target."""
    last, wanted = max(0, count - 2), 3 if kind == EagleConfig.kind else 5
    wanted, first = min(wanted, max(1, count - 1)), min(1, last)
    return tuple(dict.fromkeys(round(first + (last - first) * i / max(1, wanted - 1)) for i in range(wanted)))


def layer_shape(args: argparse.Namespace, target: TargetModel) -> dict[str, Any]:
    """Fields that the configs of all drafters have: the target's layer shape, our block and vocabulary."""
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
    """Shape of a block or diffusion drafter."""
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


def make_eagle_config(args: argparse.Namespace, target: TargetModel, layers: tuple[int, ...]) -> EagleConfig:
    """Shape of an EAGLE-3 head."""
    return EagleConfig(**layer_shape(args, target), target_hidden_size=target.config.hidden_size, target_layers=layers)


def draft_vocabulary(store: FeatureStore, config: BlockConfig | EagleConfig, path: Path) -> torch.Tensor | None:
    """The most frequent tokens of the answers, ascending; None for the whole vocabulary.

    Kept in `path`, since a run that is resumed with more answers must go on with the tokens it began with.
    """
    if not config.draft_vocab_size:
        return None
    if not path.exists():
        counts = torch.from_numpy(store.token_counts(config.vocab_size))
        likeliest = counts.topk(config.draft_vocab_size).indices.sort().values.tolist()
        replacing.replace({path: json.dumps(likeliest)})
    return torch.tensor(json.loads(path.read_text()))
