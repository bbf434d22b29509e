"""The frozen target model as the trainer sees it: chat template, hidden states, batched decoding."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "outrider_grouped"


def keep_freed_memory() -> None:
    """Stop glibc from handing large buffers back to the kernel after every operation.

    The page faults of fresh activations cost as much as the matrix products themselves on a CPU.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 64 << 20)  # M_TOP_PAD


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of [B, Hq, L, D] queries over [B, Hkv, S, D] keys without repeating keys for each query head.

    In decoding (L = 1) the query heads that share a key head become that head's queries: seven times faster
    than repeating on a CPU.
    """
    batch, heads, length, dim = query.shape
    groups = key.shape[1]
    if length == 1:
        mask = None if attention_mask is None else attention_mask.expand(batch, 1, heads // groups, key.shape[2])
        grouped = query.reshape(batch, groups, heads // groups, dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(batch, 1, heads, dim), None
    causal = attention_mask is None and length > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling, enable_gqa=heads != groups
    )
    return out.transpose(1, 2).contiguous(), None


class RoomyLayer(DynamicLayer):
    """A cache layer that grows by half, so that a decode step writes one token instead of copying all."""

    def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Append [B, H, L, D] keys and values; returns views of everything stored."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = (key_states.new_empty(0), value_states.new_empty(0))
        if self.room[0].numel() == 0 or self.room[0].shape[-2] < end or self.room[0].shape[0] != key_states.shape[0]:
            shape = (*key_states.shape[:2], end + end // 2 + 16, key_states.shape[-1])
            room = (key_states.new_empty(shape), value_states.new_empty(shape))
            if start:
                room[0][:, :, :start] = self.keys
                room[1][:, :, :start] = self.values
            self.room = room
        self.room[0][:, :, start:end] = key_states
        self.room[1][:, :, start:end] = value_states
        self.keys = self.room[0][:, :, :end]
        self.values = self.room[1][:, :, :end]
        return self.keys, self.values


@dataclass
class Target:
    """A causal language model with its tokenizer; never trained."""

    model: Any
    tokenizer: Any
    path: str

    @classmethod
    def load(cls, path: str, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Target:
        """Load from a Hugging Face folder or name."""
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        if not Path(path).exists() and Path(path).is_absolute():
            raise FileNotFoundError(f"target {path} does not exist; give a Hugging Face folder or name")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        model = model.to(device).eval()
        model.set_attn_implementation(ATTENTION)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return cls(model=model, tokenizer=AutoTokenizer.from_pretrained(path), path=path)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def embedding(self) -> torch.Tensor:
        """[V, d]"""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        """[V, d]"""
        return self.model.get_output_embeddings().weight

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end an answer."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = ids if isinstance(ids, list) else [ids]
        return {int(i) for i in ids if i is not None} | {int(self.tokenizer.eos_token_id)}

    def chat_ids(self, turns: list[str]) -> list[int]:
        """Token ids of user turns (one, or alternating user/assistant) up to where the answer begins."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        out = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(out["input_ids"])

    def user_turn_ids(self, opening: str) -> list[int]:
        """Token ids of the template up to an unfinished user turn that begins with `opening`."""
        marker = "\u241e"
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
        return list(self.tokenizer(text.split(marker)[0] + opening, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def decode(
    target: Target,
    prompts: list[list[int]],
    temperatures: list[float],
    *,
    max_new_tokens: int,
    stop_ids: set[int],
    seed: int,
) -> Iterator[tuple[int, list[int], str]]:
    """Continue a batch of prompts together; yields (index, new ids, "eos" or "limit") as each one ends.

    Rows that have ended leave the batch once a quarter of it is idle.
    """
    device = target.device
    generator = torch.Generator(device=device).manual_seed(seed)
    width = max(map(len, prompts))
    pad = target.tokenizer.pad_token_id or 0
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    rows = list(range(len(prompts)))
    heat = torch.tensor(temperatures, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    done: set[int] = set()
    cache = Cache(layer_class_to_replicate=RoomyLayer)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    while True:
        hidden = target.model.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).last_hidden_state[:, -1]
        # Contiguous rows: over strided ones torch runs the head once per row.
        logits = F.linear(hidden.contiguous(), target.head)
        chosen = logits.argmax(-1)
        if bool((heat > 0).any()):
            drawn = (heat > 0).nonzero()[:, 0]
            chances = torch.softmax(logits[drawn].float() / heat[drawn, None], -1).cumsum(-1)
            points = torch.rand(len(drawn), 1, generator=generator, device=device) * chances[:, -1:]
            chosen[drawn] = torch.searchsorted(chances, points, right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            if row in done:
                continue
            answers[row].append(token)
            if token in stop_ids or len(answers[row]) >= max_new_tokens:
                done.add(row)
                yield row, answers[row], "eos" if token in stop_ids else "limit"
        if len(done) == len(prompts):
            return
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        positions = positions[:, -1:] + 1
        live = [i for i, row in enumerate(rows) if row not in done]
        if len(live) <= 0.75 * len(rows):
            keep = torch.tensor(live, device=device)
            cache.batch_select_indices(keep)
            mask, positions, heat, chosen = mask[keep], positions[keep], heat[keep], chosen[keep]
            rows = [rows[i] for i in live]
        ids = chosen[:, None]
