"""DSpark's losses (section 3.3, equations 9 to 12), computed and differentiated in one pass over the logits.

With t the target's distribution on its K likeliest tokens, ||p - t||_1 = 2 (1 - sum_j min(p_j, t_j)) up to the mass of
t outside them, so the loss needs p only at those K tokens and the log-partition of its row. The gradient with respect
to the logits is then a multiple of the softmax plus K + 1 corrections per row. It is applied to the inputs chunk by
chunk while the logits are still in the cache; no [N, V'] tensor outlives its chunk. The same holds for the divergence
KL(t || p), which needs log p at those K tokens.
"""

from dataclasses import dataclass

import torch

CPU_CHUNK, GPU_CHUNK = 512, 8192
"""Rows of logits made at a time: as many as a cache holds, and enough to keep a GPU busy."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Training targets of N drafted positions, as columns of the draft vocabulary.

    token: [N] column of the true token, -1 where the draft vocabulary lacks it.
    top: [N, K] columns of the target's likeliest tokens, -1 where lacking. probs: [N, K] their probabilities.
    weight: [N] position weights w_k.
    place: [N] int64, k - 1: how many rows of the same block precede this one, without a gap.
    blocks: the first row of every block, ascending.
    """

    token: torch.Tensor
    top: torch.Tensor
    probs: torch.Tensor
    weight: torch.Tensor
    place: torch.Tensor
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the losses.

    ce, tv: of the true token's cross entropy and of the total variation (equation 12).
    kl: of KL(t || p) over the target's likeliest tokens, times exp(-kl_falloff c*) at every position. Total variation
        is the aim, but has almost no gradient where p is small at tokens that t likes. "LK losses" (2026) mix the two
        by acceptance; here every position has its own mix.
    survival: multiply w_k by c*_1 ... c*_{k-1} of the same block, as constants: the chance that verification reaches
        position k.
    """

    ce: float
    tv: float
    kl: float = 0.0
    kl_falloff: float = 0.0
    survival: bool = False


def survival(accept: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return [N] the product of c* over the rows of a block before each row; accept: [N] c*, place: [N], whole
    blocks."""
    logs = accept.double().clamp_min(1e-12).log()
    before = logs.cumsum(0) - logs
    first = torch.arange(len(place), device=place.device) - place
    return (before - before[first]).exp().float()


def chunks(blocks: list[int], rows: int, size: int) -> list[slice]:
    """Return slices of about `size` rows that cut no block."""
    bounds = [0]
    for here, following in zip(blocks, [*blocks[1:], rows], strict=True):
        if following - bounds[-1] > size and here > bounds[-1]:
            bounds.append(here)
    return [slice(a, b) for a, b in zip(bounds, [*bounds[1:], rows], strict=True)]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, latent, head, w2, labels, loss_weights, chunk):  # type: ignore[no-untyped-def]
        total = torch.zeros(3, device=hidden.device)
        loss = torch.zeros((), device=hidden.device)
        accept = torch.empty(hidden.shape[0], device=hidden.device)
        weights = torch.empty(hidden.shape[0], device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_latent = None if latent is None else torch.empty_like(latent)
        grad_w2 = None if latent is None else torch.zeros(w2.shape, device=w2.device)
        for rows in chunks(labels.blocks, hidden.shape[0], chunk):
            h = hidden[rows]
            z = h @ head.T
            if latent is not None:
                z.addmm_(latent[rows], w2.T)
            token, top = labels.token[rows], labels.top[rows]
            target = labels.probs[rows] * (top >= 0)
            z.sub_(z.amax(-1, keepdim=True))  # exact near the top, so that bfloat16 is precise where p is large
            known = token >= 0
            at, places = token.clamp_min(0)[:, None], top.clamp_min(0)
            log_true, log_top = z.gather(1, at).float()[:, 0], z.gather(1, places).float()
            partition = z.exp_().sum(-1, dtype=torch.float32)
            log_p, log_p_top = log_true - partition.log(), log_top - partition.log()[:, None]
            p_top = log_p_top.exp()
            kept = torch.minimum(p_top, target).sum(-1)
            weight = labels.weight[rows]
            if loss_weights.survival:
                weight = weight * survival(kept, labels.place[rows])
            accept[rows], weights[rows] = kept, weight
            ce_weight = loss_weights.ce * weight * known
            total[0] -= (weight * known * log_p).sum()
            total[1] += (2 * weight * (1 - kept)).sum()
            rising = p_top * ((p_top < target) & (top >= 0))
            scale = ce_weight + 2 * loss_weights.tv * weight * rising.sum(-1)
            corrections = -2 * loss_weights.tv * weight[:, None] * rising
            if loss_weights.kl:
                kl = torch.xlogy(target, target).sum(-1) - (target * log_p_top).sum(-1)
                kl_weight = loss_weights.kl * weight * (-loss_weights.kl_falloff * kept).exp()
                total[2] += (weight * kl).sum()
                loss += (kl_weight * kl).sum()
                scale = scale + kl_weight * target.sum(-1)
                corrections = corrections - kl_weight[:, None] * target
            z.mul_((scale / partition)[:, None].to(z.dtype))
            z.scatter_add_(1, places, corrections.to(z.dtype))
            z.scatter_add_(1, at, -ce_weight[:, None].to(z.dtype))
            grad_hidden[rows] = z @ head
            if grad_latent is not None:
                grad_latent[rows] = z @ w2
                grad_w2 += z.T @ latent[rows]
        ctx.grads = (grad_hidden, grad_latent, None if grad_w2 is None else grad_w2.to(w2.dtype))
        ctx.mark_non_differentiable(total, accept, weights)
        return loss + loss_weights.ce * total[0] + loss_weights.tv * total[1], total, accept, weights

    @staticmethod
    def backward(ctx, grad, *unused):  # type: ignore[no-untyped-def]
        hidden, latent, w2 = (None if g is None else g * grad.to(g.dtype) for g in ctx.grads)
        return hidden, latent, None, w2, None, None, None


def draft_loss(
    hidden: torch.Tensor,
    latent: torch.Tensor | None,
    head: torch.Tensor,
    w2: torch.Tensor | None,
    labels: Labels,
    loss_weights: LossWeights,
    *,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weighted losses, summed over N positions.

    hidden: [N, d]. latent: [N, r] of the sequential head or None. head: [V', d], frozen. w2: [V', r].
    Returns (loss, [L_ce, L_tv, L_kl], c* [N] of equation 8, the weights [N] of the positions).
    """
    chunk = chunk or (CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK)
    return _FusedLoss.apply(hidden, latent, head, w2, labels, loss_weights, chunk)


def position_weights(size: int, decay: float, device: torch.device | None = None) -> torch.Tensor:
    """Return w_k = exp(-(k - 1) / decay), [size]; all 1 where `decay` is infinite."""
    return torch.exp(-torch.arange(size, dtype=torch.float32, device=device) / decay)
