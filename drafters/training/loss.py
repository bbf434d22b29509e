"""DSpark's losses (section 3.3, equations 9 to 12), computed and differentiated in one pass over the logits.

With t the target's distribution on its K likeliest tokens, ||p - t||_1 = 2 (1 - sum_j min(p_j, t_j)) up to the mass
of t outside them, so the loss needs p only at those K tokens and the log-partition of its row. The gradient with
respect to the logits is then a multiple of the softmax plus K + 1 corrections per row, and is applied to the inputs
chunk by chunk while the logits are still in the cache; no [N, V'] tensor outlives its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Labels:
    """What N drafted positions are trained towards, as columns of the draft vocabulary.

    token: [N] column of the true token, -1 where the draft vocabulary lacks it.
    top: [N, K] columns of the target's likeliest tokens, -1 where lacking; probs: [N, K] their probabilities.
    weight: [N] position weights w_k.
    """

    token: torch.Tensor
    top: torch.Tensor
    probs: torch.Tensor
    weight: torch.Tensor


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, latent, head, w2, labels, alpha_ce, alpha_tv, chunk):  # type: ignore[no-untyped-def]
        total = torch.zeros(2, device=hidden.device)
        accept = torch.empty(hidden.shape[0], device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_latent = None if latent is None else torch.empty_like(latent)
        grad_w2 = None if latent is None else torch.zeros(w2.shape, device=w2.device)
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows]
            z = h @ head.T
            if latent is not None:
                z.addmm_(latent[rows], w2.T)
            token, top = labels.token[rows], labels.top[rows]
            weight, target = labels.weight[rows], labels.probs[rows]
            z.sub_(z.amax(-1, keepdim=True))  # exact near the top, so that bfloat16 is precise where p is large
            known = token >= 0
            at = token.clamp_min(0)[:, None]
            log_true, log_top = z.gather(1, at).float()[:, 0], z.gather(1, top.clamp_min(0)).float()
            partition = z.exp_().sum(-1, dtype=torch.float32)
            log_p = log_true - partition.log()
            p_top = log_top.exp() / partition[:, None] * (top >= 0)
            kept = torch.minimum(p_top, target).sum(-1)
            accept[rows] = kept
            ce_weight = alpha_ce * weight * known
            total[0] -= (weight * known * log_p).sum()
            total[1] += (2 * weight * (1 - kept)).sum()
            rising = p_top * ((p_top < target) & (top >= 0))
            scale = ce_weight + 2 * alpha_tv * weight * rising.sum(-1)
            z.mul_((scale / partition)[:, None].to(z.dtype))
            z.scatter_add_(1, top.clamp_min(0), (-2 * alpha_tv * weight[:, None] * rising).to(z.dtype))
            z.scatter_add_(1, at, -ce_weight[:, None].to(z.dtype))
            grad_hidden[rows] = z @ head
            if grad_latent is not None:
                grad_latent[rows] = z @ w2
                grad_w2 += z.T @ latent[rows]
        ctx.grads = (grad_hidden, grad_latent, None if grad_w2 is None else grad_w2.to(w2.dtype))
        ctx.mark_non_differentiable(total, accept)
        return alpha_ce * total[0] + alpha_tv * total[1], total, accept

    @staticmethod
    def backward(ctx, grad, *unused):  # type: ignore[no-untyped-def]
        hidden, latent, w2 = (None if g is None else g * grad.to(g.dtype) for g in ctx.grads)
        return hidden, latent, None, w2, None, None, None, None


def draft_loss(
    hidden: torch.Tensor,
    latent: torch.Tensor | None,
    head: torch.Tensor,
    w2: torch.Tensor | None,
    labels: Labels,
    *,
    alpha_ce: float,
    alpha_tv: float,
    chunk: int = 512,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """alpha_ce * L_ce + alpha_tv * L_tv, summed over N positions.

    hidden: [N, d]; latent: [N, r] of the sequential head or None; head: [V', d], frozen; w2: [V', r].
    Returns (loss, [L_ce, L_tv], c* [N] of equation 8).
    """
    return _FusedLoss.apply(hidden, latent, head, w2, labels, alpha_ce, alpha_tv, chunk)


def confidence_loss(logits: torch.Tensor, accept: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """L_conf of equation 11, summed over N positions: confidence logits against c* [N]."""
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), accept.clamp(0, 1), reduction="none")
    return (weight * losses).sum()
