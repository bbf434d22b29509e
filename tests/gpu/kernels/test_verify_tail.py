"""Verification, acceptance and commit in one graph: the server's own tail."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from gpu_device import INTERPRETED, ON, captured, differing, triton
from random_decoder import Decoder, Given, decoder

from outrider.drafters.base import Draft
from outrider.kernels.acceptance import Verification, with_point_masses
from outrider.kernels.ragged import FlatVerify, commit
from outrider.kernels.sampling import Rules, argmax
from outrider.scheduler.buckets import TokenBuckets
from outrider.server.plugin.decode.verify_tail import VerifyTail

WRONG = 0.3
"""Share of wrong drafts of greedy requests."""


Texts = tuple[Given, Draft, torch.Tensor, FlatVerify, Any]
"""Requests, drafts, lengths, batch, and the batch's `Sampling` arguments."""


class Merged:
    """A graph of a bucket with its tail. seen: the last observed token of each cache slot."""

    def __init__(
        self, made: Decoder, tail: VerifyTail, buckets: TokenBuckets, tokens: int, seen: torch.Tensor,
        room: torch.Tensor,
    ):  # fmt: skip
        self.made, self.tail, self.tokens, self.seen, self.room = made, tail, tokens, seen, room
        slots = buckets.slots(tokens)
        self.requests = max(1, min(slots - 1, tokens // 3, made.page_table.shape[0] - 1))
        self.given, self.draft, self.lens, self.flat, _ = self.texts(0, sampled=False)
        ids, positions, places = self.flat[:3]
        self.batch: Any = SimpleNamespace(
            batch_size=slots, out_cache_loc=places, input_ids=ids, positions=positions,
            seq_lens=torch.zeros(slots, dtype=torch.int64, device=ON),
        )  # fmt: skip
        self.replay = captured(self._run)

    def _run(self) -> None:
        hidden, logits = self.made.verify(self.given, self.lens, self.flat)
        output = SimpleNamespace(hidden_states=hidden, next_token_logits=logits)
        self.tail.capture(None, output, self.batch, self.tokens)

    def texts(self, seed: int, *, sampled: bool) -> Texts:
        """Requests, their drafts, and the batch of their verification.

        sampled: by all rules, a third of them with seeds; and a third greedy. Some drafts are lookups.
        """
        gamma = self.made.gamma
        budget = min(self.tokens - self.requests, self.requests * gamma)
        given = self.made.given(self.requests, budget, seed)
        if not sampled:
            given = replace(given, temperatures=torch.zeros_like(given.temperatures), decided=given.decided & False)
        greedy, seeded = given.temperatures <= 0, given.decided
        rules = Rules(given.temperatures)
        if sampled:
            numbers = torch.rand((3, self.requests), generator=torch.Generator().manual_seed(seed)).to(ON)
            rules = Rules(given.temperatures, (2 + 30 * numbers[0]).long(), 0.5 + numbers[1] / 2, numbers[2] / 8)
        said = not sampled, sampled and bool(seeded.any()), bool((greedy | seeded).all())
        sampling: Any = SimpleNamespace(
            rules=rules,
            seeds=given.seeds,
            seeded=seeded,
            decided=greedy | seeded,
            all_greedy=said[0],
            all_decided=said[2],
        )
        draft = self.made.draft(given)
        lens, flat = self.made.plan(given, draft, self.tokens)
        wanted = argmax(self.made.verify(given, lens, flat)[1])
        generator = torch.Generator().manual_seed(seed)
        rows = flat[3][:-1, None].long() + torch.arange(gamma, device=wanted.device)
        wrong = torch.rand(self.requests, gamma, generator=generator).to(wanted.device) < WRONG
        right = wanted[rows.clamp(max=len(wanted) - 1)]
        tokens = torch.where(wrong | ~greedy[:, None], draft.tokens, right)
        probs, points = draft.probs, None
        if sampled:
            self.room[: self.requests].copy_(probs)
            points = given.rows % 2 == 0
        return (
            given,
            replace(draft, tokens=tokens, probs=self.room if sampled else None, points=points),
            lens,
            flat,
            sampling,
        )

    def take(self, texts: Texts) -> None:
        given, draft, lens, flat, sampling = texts
        self.given.take(given)
        self.lens.copy_(lens)
        for mine, its in zip(self.flat, flat, strict=True):
            mine.copy_(its)
        self.batch.seq_lens.zero_()
        self.batch.seq_lens[: self.requests].copy_(given.seq_lens)
        named: Any = SimpleNamespace(qo_indptr=flat[3], request=flat[4], step=flat[5])
        self.tail.open(draft, sampling, lens, named)

    def expected(self, texts: Texts) -> tuple[torch.Tensor, ...]:
        """accept_lens [R], tokens [R, γ + 1], new lengths and anchors [R], and `seen`, by separate kernels."""
        given, draft, lens, flat, sampling = texts
        _, logits = self.made.verify(given, lens, flat)
        if draft.points is not None:  # q includes the point masses
            batch = Verification(draft.tokens, lens, flat[3], draft_probs=draft.probs, points=draft.points)
            draft = replace(draft, probs=with_point_masses(batch, logits.shape[1]).draft_probs)
        accepted = self.made.accept(given, draft, lens, flat, logits, sampling.rules)
        ids, _, places, _, request, step = flat
        new_seq_lens, bonus, slots = commit(*accepted, given.seq_lens, request, step, places)
        seen = torch.zeros_like(self.seen)
        seen[slots] = ids
        return *accepted, new_seq_lens, bonus, seen


@torch.inference_mode()
def test_a_graph_accepts_and_commits_other_texts_and_none_while_its_tail_is_closed() -> None:
    made, most = decoder()
    buckets, seen = TokenBuckets(most, made.gamma + 1), torch.zeros(len(made.keys), dtype=torch.int64, device=ON)

    def observe(
        hidden: torch.Tensor | None, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        seen[slots] = tokens

    accepted = {False: 0, True: 0}
    room = torch.full((most, made.gamma, made.config.vocab_size), torch.nan, device=ON)
    with triton():
        tail = VerifyTail(buckets, observe, ON, (room, None))
        for tokens in [n for n in (buckets.sizes[::5] if INTERPRETED else buckets.sizes) if n > 1]:
            graph = Merged(made, tail, buckets, tokens, seen, room)
            for sampled in (False, True):
                texts = graph.texts(1000 + tokens, sampled=sampled)
                graph.take(texts)
                seen.zero_()
                graph.replay()
                results = (*tail.results(graph.requests, tokens), seen.clone())
                expected = graph.expected(texts)
                seen[0] = results[-1][0] = expected[-1][0] = 0
                assert differing(results, expected) == 0, (tokens, sampled)
                accepted[sampled] += int((expected[0] - 1).sum())
                tail.close()
                seen.zero_()
                graph.replay()
                assert not seen[1:].any(), tokens
    assert min(accepted.values()) > 0
