"""The network before its first step: which target can be converted, and the token that becomes the mask."""

from __future__ import annotations

from ..block.config import BlockConfig
from ..training.target import TargetModel
from .layout import Layout
from .model import ConvertedModel


def spare_token(target: TargetModel) -> int:
    """The last special token that neither the chat template nor the tokenizer uses.

    Raises ValueError where there is none.
    """
    tokenizer = target.tokenizer
    template = tokenizer.chat_template or ""
    added = tokenizer.added_tokens_decoder.items()
    spare = [i for i, t in added if t.special and t.content not in template and i not in tokenizer.all_special_ids]
    spare = [i for i in spare if i < target.config.vocab_size and i not in target.stop_ids]
    if not spare:
        raise ValueError("the tokenizer has no special token to spare for the mask; name one with --mask-token")
    return max(spare)


def convert(target: TargetModel, config: BlockConfig, layout: Layout, rank: int) -> ConvertedModel:
    """The target's own network, its deltas still nothing; raises ValueError for a target of another architecture."""
    attention = target.model.model.layers[0].self_attn
    if attention.q_proj.bias is not None or target.config.model_type not in ("llama", "qwen3"):
        raise ValueError(f"a {target.config.model_type} model cannot be converted, only llama and qwen3 without biases")
    model = ConvertedModel(config, layout, rank)
    model.start_from(target)
    return model
