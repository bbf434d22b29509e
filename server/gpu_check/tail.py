"""Part A, verification, acceptance and commit in one graph: the server's own tail of its greedy verifications."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from outrider.drafters.base import Draft
from outrider.kernels.ragged import Flattened, commit
from outrider.kernels.sampling import argmax
from outrider.scheduler.planners.token_buckets import TokenBuckets

from ..plugin.decode.verify_tail import VerifyTail
from .device import Device
from .kernels import differing
from .report import Measured
from .step import Decoder, Given, decoder

WRONG = 0.3
"""Of the drafts, which are otherwise what the target says."""


class Merged:
    """A graph of a tier with its tail. seen: the token that was last shown for each slot of the cache."""

    def __init__(
        self, device: Device, made: Decoder, tail: VerifyTail, tiers: TokenBuckets, tier: int, seen: torch.Tensor
    ):
        self.made, self.tail, self.tier, self.seen = made, tail, tier, seen
        slots = tiers.slots(tier)
        self.requests = max(1, min(slots - 1, tier // 3, made.page_table.shape[0] - 1))
        self.given, self.draft, self.lens, self.flat = self.texts(0)
        ids, positions, places = self.flat[:3]
        self.batch: Any = SimpleNamespace(
            batch_size=slots, out_cache_loc=places, input_ids=ids, positions=positions,
            seq_lens=torch.zeros(slots, dtype=torch.int64, device=device.on),
        )  # fmt: skip
        self.replay = device.graph(self._run)

    def _run(self) -> None:
        hidden, logits = self.made.verify(self.given, self.lens, self.flat)
        output = SimpleNamespace(hidden_states=hidden, next_token_logits=logits)
        self.tail.capture(None, output, self.batch, self.tier)

    def texts(self, seed: int) -> tuple[Given, Draft, torch.Tensor, Flattened]:
        """Greedy requests, their drafts, most of which are right, and the batch of their verification."""
        gamma = self.made.gamma
        budget = min(self.tier - self.requests, self.requests * gamma)
        given = self.made.given(self.requests, budget, seed)
        given = replace(given, temperatures=torch.zeros_like(given.temperatures), decided=given.decided & False)
        draft = self.made.draft(given)
        lens, flat = self.made.plan(given, draft, self.tier)
        wanted = argmax(self.made.verify(given, lens, flat)[1])
        generator = torch.Generator().manual_seed(seed)
        rows = flat[3][:-1, None].long() + torch.arange(gamma, device=wanted.device)
        wrong = torch.rand(self.requests, gamma, generator=generator).to(wanted.device) < WRONG
        right = wanted[rows.clamp(max=len(wanted) - 1)]
        return given, replace(draft, tokens=torch.where(wrong, draft.tokens, right), probs=None), lens, flat

    def take(self, texts: tuple[Given, Draft, torch.Tensor, Flattened]) -> None:
        given, draft, lens, flat = texts
        self.given.take(given)
        self.lens.copy_(lens)
        for mine, its in zip(self.flat, flat, strict=True):
            mine.copy_(its)
        self.batch.seq_lens.zero_()
        self.batch.seq_lens[: self.requests].copy_(given.seq_lens)
        named: Any = SimpleNamespace(qo_indptr=flat[3], request=flat[4], step=flat[5])
        self.tail.open(draft.tokens, lens, named)

    def expected(self, texts: tuple[Given, Draft, torch.Tensor, Flattened]) -> tuple[torch.Tensor, ...]:
        """accept_lens [R], tokens [R, γ + 1] and `seen`, by the kernels behind a verification."""
        given, draft, lens, flat = texts
        _, logits = self.made.verify(given, lens, flat)
        accepted = self.made.accept(given, draft, lens, flat, logits)
        ids, _, places, _, request, step = flat
        slots = commit(*accepted, given.seq_lens, request, step, places)[2]
        seen = torch.zeros_like(self.seen)
        seen[slots] = ids
        return *accepted, seen


@torch.inference_mode()
def merged(device: Device) -> Iterator[Measured]:
    """Graphs of every tier with their tails, replayed on other texts, and once with the tail closed."""
    made, most = decoder(device)
    tiers, seen = TokenBuckets(most, made.gamma + 1), torch.zeros(len(made.keys), dtype=torch.int64, device=device.on)

    def observe(
        hidden: torch.Tensor | None, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        seen[slots] = tokens

    wrong, left, kept = 0, 0, 0.0
    sizes = [tier for tier in (tiers.sizes[::5] if device.tiny else tiers.sizes) if tier > 1]
    with device.triton():
        tail = VerifyTail(tiers, observe, device.on)
        for tier in sizes:
            graph = Merged(device, made, tail, tiers, tier, seen)
            texts = graph.texts(1000 + tier)
            graph.take(texts)
            seen.zero_()
            graph.replay()
            found = (*tail.made(graph.requests, tier), seen.clone())
            expected = graph.expected(texts)
            seen[0] = found[2][0] = expected[2][0] = 0  # nobody's
            wrong += differing(found, expected)
            kept += float((expected[0] - 1).sum()) / graph.requests / len(sizes)
            tail.close()
            seen.zero_()
            graph.replay()
            left += int(seen[1:].count_nonzero())
    yield Measured("tiers", len(sizes), "captured with their tails")
    yield Measured("replays on other texts", wrong, "numbers differ", at_most=0)
    yield Measured("accepted", kept, "a request", at_least=0.1)
    yield Measured("a closed tail", left, "slots written", at_most=0)
