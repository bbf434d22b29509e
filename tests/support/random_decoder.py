"""A whole decode step on the kernels.

Drafter, planning and acceptance are the server's. The target is one layer of attention between an embedding and its
head, so drafts depend on all earlier tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu_device import INTERPRETED, ON

from outrider.drafters.base import Draft, DraftBatch, Features
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.kernels.acceptance import Verification, accept_logits
from outrider.kernels.attention import flat_attention
from outrider.kernels.drafts import admit, weigh_drafts
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.noise import Purpose, streams, substreams, uniforms
from outrider.kernels.ragged import FlatVerify, commit, flatten_verify
from outrider.kernels.sampling import Rules

LARGE = BlockConfig(
    kind="dspark", gamma=7, vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=5,
    num_heads=32, num_kv_heads=8, head_dim=128, num_target_layers=36, target_layers=(1, 9, 17, 25, 33),
    mask_token_id=151_669, max_positions=40_960, markov_rank=256, confidence_head=True,
)  # fmt: skip
"""Shape of a public drafter for Qwen3-8B."""
SMALL = BlockConfig(
    kind="dspark", gamma=3, vocab_size=300, hidden_size=128, intermediate_size=64, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=64, num_target_layers=2, target_layers=(0,), mask_token_id=7, max_positions=256,
    markov_rank=16, confidence_head=True,
)  # fmt: skip
LARGE_REQUESTS, LARGE_CONTEXT = 64, 1024
SMALL_REQUESTS, SMALL_CONTEXT = 3, 40
ROOM = 40e9
"""Bytes of a GPU for LARGE_REQUESTS; smaller ones get a quarter of them."""


@dataclass(frozen=True, slots=True)
class Given:
    """Start of a step, at one address for all steps: anchors, lengths, rows and seeds [R], and the budget [1].

    decided: [R] bool, true for seeded requests. temperatures: [R], 0 for greedy ones.
    """

    anchors: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    seeds: torch.Tensor
    budget: torch.Tensor
    temperatures: torch.Tensor
    decided: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.anchors, self.seq_lens, self.rows, self.seeds, self.budget, self.temperatures, self.decided

    def take(self, other: Given) -> None:
        for mine, its in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(its)


class Decoder:
    """A drafter of random weights, a target of one layer, and caches of `requests` texts."""

    def __init__(self, requests: int, context: int):
        self.config = config = SMALL if INTERPRETED else LARGE
        self.context, self.gamma = context, config.gamma
        dtype = torch.float32 if INTERPRETED else torch.bfloat16
        generator = torch.Generator(ON).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator, device=ON) * scale).to(dtype)

        with ON:
            model = BlockModel(config).to(dtype)
        self.embedding = normal(config.vocab_size, config.hidden_size)
        self.head = normal(config.vocab_size, config.hidden_size, scale=3 / config.hidden_size**0.5)
        self.drafter = BlockDrafter(model, embedding=self.embedding, head=self.head)
        slots = (requests + 1) * context + 1
        self.drafter.allocate(slots)
        pool = slots, config.num_kv_heads, config.head_dim
        self.keys, self.values = normal(*pool), normal(*pool)
        places = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(0))[: (requests + 1) * context]
        self.page_table = (places + 1).int().view(requests + 1, context).to(ON)  # slot 0 is unused
        self.ends = torch.full((requests + 1, 1), -1, device=ON)
        features = torch.randn(slots, 1, device=ON).expand(-1, len(config.target_layers) * config.hidden_size)
        for start in range(1, slots, 4096):
            some = torch.arange(start, min(start + 4096, slots), device=ON)
            self.drafter.observe(Features(features[some], some, some % config.max_positions, some))

    def given(self, requests: int, budget: int, seed: int) -> Given:
        """Random texts; a third of the requests each is greedy, sampled and seeded."""
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.arange(requests) % 3
        made = (
            torch.randint(self.config.vocab_size, (requests,), generator=generator),
            torch.randint(1, self.context - 2 * self.gamma, (requests,), generator=generator),
            torch.randperm(len(self.page_table), generator=generator)[:requests],
            torch.randint(2**62, (requests,), generator=generator),
            torch.tensor([budget]),
            torch.where(kinds == 0, 0.0, 0.8),
            kinds == 2,
        )
        return Given(*(x.to(ON) for x in made))

    def draft(self, given: Given) -> Draft:
        keys = substreams(streams(given.seeds, given.seq_lens, Purpose.DRAFT), self.gamma)
        arrays = given.anchors, given.seq_lens, self.page_table, given.rows, given.temperatures
        batch = DraftBatch(*arrays, keys=keys, all_greedy=False, longest=self.context)
        return self.drafter.propose(batch)

    def plan(self, given: Given, draft: Draft, tokens: int) -> tuple[torch.Tensor, FlatVerify]:
        """Verified lengths [R], and the batch."""
        confidence, until = weigh_drafts(draft.tokens, draft.confidence, given.rows, given.rows, self.ends, None)
        lens = torch.minimum(draft.lens, until)
        verify_lens, _ = admit(confidence, lens, given.budget)
        arrays = given.anchors, draft.tokens, verify_lens, given.seq_lens, self.page_table, given.rows
        return verify_lens, flatten_verify(*arrays, tokens)

    def verify(self, given: Given, verify_lens: torch.Tensor, flat: FlatVerify) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [T, d] and logits [T, V]."""
        config, (ids, _, slots, indptr, _, _) = self.config, flat
        hidden = self.embedding[ids]
        shape = len(ids), config.num_kv_heads, config.head_dim
        width = config.num_kv_heads * config.head_dim
        self.keys[slots], self.values[slots] = hidden[:, :width].view(shape), hidden[:, -width:].reshape(shape)
        lens = given.seq_lens + verify_lens + 1
        batch = FlatBatch(indptr, lens, given.rows, self.page_table, self.gamma + 1, self.context)
        wide = config.num_heads * config.head_dim
        q = hidden[:, :wide].view(len(ids), config.num_heads, config.head_dim)
        attended = flat_attention(q, self.keys, self.values, batch, scale=config.head_dim**-0.5)
        hidden = hidden + attended.flatten(1)
        return hidden, hidden @ self.head.T

    def accept(
        self,
        given: Given,
        draft: Draft,
        verify_lens: torch.Tensor,
        flat: FlatVerify,
        logits: torch.Tensor,
        rules: Rules | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _, positions, _, indptr, request, _ = flat
        batch = Verification(
            draft.tokens, verify_lens, indptr,
            uniforms=uniforms(streams(given.seeds, given.seq_lens, Purpose.ACCEPT), self.gamma),
            final_keys=streams(given.seeds, given.seq_lens, Purpose.FINAL),
            decided=given.decided, draft_probs=draft.probs, vocab=draft.vocab,
        )  # fmt: skip
        row_keys = streams(given.seeds.index_select(0, request), positions + 1, Purpose.TOKEN)
        return accept_logits(batch, request, logits, rules or Rules(given.temperatures), row_keys)

    def keep(
        self, given: Given, flat: FlatVerify, hidden: torch.Tensor, accepted: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cached lengths and anchors [R] of the next step; the drafter observes the accepted tokens."""
        ids, positions, slots, _, request, step = flat
        lens, bonus, kept = commit(*accepted, given.seq_lens, request, step, slots)
        self.drafter.observe(Features(hidden.repeat(1, len(self.config.target_layers)), ids, positions, kept))
        return lens, bonus

    def step(self, given: Given, tokens: int) -> tuple[torch.Tensor, ...]:
        """accept_lens [R], tokens [R, γ + 1], and the next lengths and anchors [R]."""
        draft = self.draft(given)
        verify_lens, flat = self.plan(given, draft, tokens)
        hidden, logits = self.verify(given, verify_lens, flat)
        accepted = self.accept(given, draft, verify_lens, flat, logits)
        return (*accepted, *self.keep(given, flat, hidden, accepted))


def decoder() -> tuple[Decoder, int]:
    """A decoder and the largest number of requests that fit the device."""
    if INTERPRETED:
        return Decoder(SMALL_REQUESTS, SMALL_CONTEXT), SMALL_REQUESTS
    large = torch.cuda.get_device_properties(ON).total_memory > ROOM
    requests = LARGE_REQUESTS if large else LARGE_REQUESTS // 4
    return Decoder(requests, LARGE_CONTEXT), requests
