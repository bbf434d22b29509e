"""Sampling of tokens from logits by each request's rules and seed, for single rows and for verify batches.

A seeded request's token at a position is drawn from the target's distribution with noise of (seed, position, token).
Its drafts are drawn with the same noise and kept if equal, so its text depends on its seed alone. Drafts of requests
without a seed are kept by rejection sampling, by block or token by token, with random numbers of the step.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch

from outrider.drafters.base import Draft
from outrider.kernels.acceptance import Verification, accept, accept_logits
from outrider.kernels.cuda import native as cuda
from outrider.kernels.noise import Purpose, draft_keys, streams, substreams, uniforms
from outrider.kernels.ragged import FlatVerify
from outrider.kernels.sampling import Rules, argmax, draw_tokens, target_probs
from outrider.scheduler.calibration.classes import classes_of

from .requests import RequestTable


def on_host(tensor: torch.Tensor) -> bool:
    """Return True if the host can read the tensor without waiting for a device."""
    return tensor.is_cpu


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """Sampling rules and seeds of the R requests of a batch.

    rules: per request; temperature 0: greedy. seeds: [R] int64, seeds of the random numbers.
    seeded: [R] bool, not greedy, and its seed alone decides. decided: [R] bool, greedy or seeded.
    all_greedy, any_seeded, all_decided: known on the host. by_block: verify undecided requests by block.
    """

    rules: Rules
    seeds: torch.Tensor
    seeded: torch.Tensor
    decided: torch.Tensor
    all_greedy: bool
    any_seeded: bool
    all_decided: bool
    by_block: bool = True

    @classmethod
    def of(
        cls, info: Any, seeds: torch.Tensor, seeded: torch.Tensor, kinds: tuple[bool, bool] | None = None, *,
        by_block: bool = True,
    ) -> Self:  # fmt: skip
        """Create it from SGLang's info, where top_k = 1 means greedy. seeds [R], seeded [R] bool: see `RequestTable`.

        kinds: `RequestTable.kinds`; None: read from the device, with a wait. by_block: as in `Verification`.
        """
        greedy = info.top_ks <= 1
        wanted = info.need_top_k_sampling, info.need_top_p_sampling, info.need_min_p_sampling
        if not on_host(greedy):  # one kernel variant for all batches
            wanted = (any(wanted) or cuda.fits(greedy),) * 3
        rules = Rules(
            temperatures=torch.where(greedy, 0.0, info.temperatures[:, 0]),
            top_ks=info.top_ks.long() if wanted[0] else None,
            top_ps=info.top_ps if wanted[1] else None,
            min_ps=info.min_ps if wanted[2] else None,
        )
        if info.is_all_greedy:
            return cls(rules, seeds, torch.zeros_like(greedy), greedy, True, False, True)
        seeded = seeded & ~greedy
        decided = seeded | greedy
        any_seeded, all_decided = kinds or (bool(seeded.any()), bool(decided.all()))
        return cls(rules, seeds, seeded, decided, False, any_seeded, all_decided, by_block)

    def draft_keys(self, positions: torch.Tensor, gamma: int) -> torch.Tensor:
        """Return keys [R, gamma] of the noise for drafts after anchors at positions [R]."""
        if self.all_greedy and on_host(positions):  # no request draws
            return positions.new_zeros(len(positions), gamma)
        if self.any_seeded or not on_host(positions):
            return draft_keys(self.seeds, self.seeded, positions, gamma)
        return substreams(streams(self.seeds, positions, Purpose.DRAFT), gamma)

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return tokens [R] int64 drawn from logits [R, V] at positions [R]."""
        if self.all_greedy:
            return argmax(logits)
        everyone = torch.arange(len(logits), device=logits.device)
        return self._draw(logits, everyone, everyone, positions.long())

    def accept(
        self, logits: torch.Tensor, draft: Draft, verify_lens: torch.Tensor, flat: FlatVerify
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return accept_lens [R] in 1..gamma+1 and tokens [R, gamma+1], verified by logits [B, V]."""
        if self.all_greedy:
            return accept(Verification(draft.tokens, verify_lens, flat.qo_indptr, wanted=argmax(logits)))
        if self.all_decided or len(logits) == len(verify_lens):  # anchors alone: no draft to test
            rows = torch.arange(len(logits), device=logits.device)
            wanted = self._draw(logits, rows, flat.request, flat.positions)
            return accept(Verification(draft.tokens, verify_lens, flat.qo_indptr, wanted=wanted))
        longest, probs, points = draft.tokens.shape[1], draft.probs, draft.points
        tested = draft.tokens if probs is None or points is not None else draft.tokens[:, : probs.shape[1]]
        probs = None if probs is None else probs[: len(verify_lens)]
        anchors = flat.positions[flat.qo_indptr[:-1].long()]
        batch = Verification(
            tested, verify_lens, flat.qo_indptr,
            uniforms=uniforms(streams(self.seeds, anchors, Purpose.ACCEPT), tested.shape[1]),
            final_keys=streams(self.seeds, anchors, Purpose.FINAL),
            decided=self.decided, draft_probs=probs, vocab=draft.vocab, points=points, by_block=self.by_block,
        )  # fmt: skip
        if on_host(logits):
            heat = torch.where(self.decided, 0.0, self.rules.temperatures)  # makes unread rows cheap
            probs = target_probs(logits, self.rules._replace(temperatures=heat).of(flat.request))
            wanted = self._wanted(logits, flat)
            accept_lens, tokens = accept(batch._replace(wanted=wanted, probs=probs))
        else:  # the host does not know which request each row belongs to
            keys = streams(self.seeds[flat.request], flat.positions + 1, Purpose.TOKEN)
            accept_lens, tokens = accept_logits(batch, flat.request, logits, self.rules, keys)
        return accept_lens, torch.nn.functional.pad(tokens, (0, longest - tested.shape[1]))

    def _wanted(self, logits: torch.Tensor, flat: FlatVerify) -> torch.Tensor:
        """Return the target's token [B] in each row of decided requests; arbitrary in all other rows."""
        wanted = torch.zeros_like(flat.request)
        rows = self.decided[flat.request].nonzero()[:, 0]
        if len(rows):
            wanted[rows] = self._draw(logits, rows, flat.request[rows], flat.positions[rows])
        return wanted

    def _draw(
        self, logits: torch.Tensor, rows: torch.Tensor, request: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the token [M] after each of the `rows` of requests [M] at positions [M]."""
        seeds = self.seeds[request]
        keys = streams(seeds, positions + 1, Purpose.TOKEN) if self.any_seeded else None
        if keys is None or not self.all_decided:
            step_keys = streams(seeds, positions, Purpose.FINAL)
            keys = step_keys if keys is None else torch.where(self.seeded[request], keys, step_keys)
        return draw_tokens(logits, rows, self.rules.of(request), keys)


class RunningSampling:
    """Sampling of the running batch and the classes of its drafts. Computed anew only when the requests change, which
    changes SGLang's tensors."""

    def __init__(self, requests: RequestTable, *, by_block: bool) -> None:
        self._requests, self._by_block = requests, by_block
        self._last: tuple[torch.Tensor, Sampling, torch.Tensor] | None = None

    def of(self, scheduled: Any, rows: torch.Tensor) -> tuple[Sampling, torch.Tensor]:
        """Return sampling and classes [R] of SGLang's batch, with its requests in `rows` [R]."""
        mark, requests = scheduled.sampling_info.temperatures, self._requests
        if self._last is None or self._last[0] is not mark:
            seeded = requests.seeded[rows]
            kinds = requests.kinds(scheduled.req_pool_indices_cpu.numpy())
            given = scheduled.sampling_info, requests.seeds[rows], seeded, kinds
            made = Sampling.of(*given, by_block=self._by_block)
            self._last = mark, made, classes_of(made.rules.temperatures, seeded)
        return self._last[1:]
