"""From logits to tokens under each request's sampling rules, for single rows and for verify batches."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafters.base import Draft
from outrider.kernels.acceptance import accept
from outrider.kernels.sampling import argmax, inverse_cdf, target_probs
from outrider.kernels.uniforms import Purpose, uniforms
from outrider.server.plugin.decode.spec_inputs import FlatVerify


class Sampler:
    """SGLang marks a greedy request (temperature 0) by top_k = 1; its row is decided by argmax alone."""

    def greedy(self, info: Any) -> torch.Tensor:
        """[R] bool."""
        return info.top_ks <= 1

    def draw(self, logits: torch.Tensor, info: Any, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for each of R rows: logits [R, V], seeds and positions [R] of the random numbers -> [R] int64."""
        best = argmax(logits)
        if info.is_all_greedy:
            return best
        probs = self._probs(logits, info, torch.arange(len(logits), device=logits.device))
        drawn = inverse_cdf(probs, uniforms(seeds, positions, 1, Purpose.FINAL)[:, 0])
        return torch.where(self.greedy(info), best, drawn)

    def accept(
        self,
        logits: torch.Tensor,
        info: Any,
        draft: Draft,
        verify_lens: torch.Tensor,
        flat: FlatVerify,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rejection sampling: logits [B, V] -> accept_lens [R] in 1..gamma+1 and tokens [R, gamma+1].

        seeds, positions: [R] of the random numbers, which greedy requests do not need.
        """
        if info.is_all_greedy:
            return accept(draft.tokens, verify_lens, flat.qo_indptr, argmax=argmax(logits))
        return accept(
            draft.tokens,
            verify_lens,
            flat.qo_indptr,
            uniforms=uniforms(seeds, positions, draft.tokens.shape[1], Purpose.ACCEPT),
            final_uniforms=uniforms(seeds, positions, 1, Purpose.FINAL)[:, 0],
            argmax=argmax(logits) if info.is_any_greedy else None,
            probs=self._probs(logits, info, flat.request),
            greedy=self.greedy(info),
            draft_probs=draft.probs,
            vocab=draft.vocab,
        )

    def _probs(self, logits: torch.Tensor, info: Any, request: torch.Tensor) -> torch.Tensor:
        return target_probs(
            logits,
            info.temperatures[request, 0],
            info.top_ks[request] if info.need_top_k_sampling else None,
            info.top_ps[request] if info.need_top_p_sampling else None,
            info.min_ps[request] if info.need_min_p_sampling else None,
        )
