"""From logits to tokens under each request's sampling rules, for single rows and for verify batches."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafters.base import Draft
from outrider.kernels.acceptance import accept
from outrider.kernels.sampling import argmax, inverse_cdf, target_probs
from outrider.server.plugin.decode.spec_inputs import FlatVerify


class Sampler:
    """SGLang marks a greedy request (temperature 0) by top_k = 1; its row is decided by argmax alone."""

    def greedy(self, info: Any) -> torch.Tensor:
        """[R] bool."""
        return info.top_ks <= 1

    def draw(self, logits: torch.Tensor, info: Any, uniforms: torch.Tensor) -> torch.Tensor:
        """One token for each of R rows: logits [R, V], uniforms [R] -> [R] int64."""
        best = argmax(logits)
        if info.is_all_greedy:
            return best
        probs = self._probs(logits, info, torch.arange(len(logits), device=logits.device))
        return torch.where(self.greedy(info), best, inverse_cdf(probs, uniforms))

    def accept(
        self,
        logits: torch.Tensor,
        info: Any,
        draft: Draft,
        verify_lens: torch.Tensor,
        flat: FlatVerify,
        uniforms: torch.Tensor,
        final_uniforms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rejection sampling: logits [B, V] -> accept_lens [R] in 1..gamma+1 and tokens [R, gamma+1]."""
        return accept(
            draft.tokens,
            verify_lens,
            flat.qo_indptr,
            uniforms=uniforms,
            final_uniforms=final_uniforms,
            argmax=argmax(logits) if info.is_any_greedy else None,
            probs=None if info.is_all_greedy else self._probs(logits, info, flat.request),
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
