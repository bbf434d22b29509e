"""Training of the heads that draw paths through candidates: DFlash 2's selector and LiLiCorr's.

A block's logits are trained as DFlash's, and choose the candidates. In addition each position's distribution over its
candidates, given the answer's token before, learns by the same losses (as SpecForge and speculators train DFlash 2 by
cross entropy over candidates). Where that token is no candidate itself, no path goes through it and the position is not
trained.
"""

from collections.abc import Callable

import torch

from ..block.candidates import LatticeSelector
from ..block.model import BlockModel
from .batches import TrainingStep
from .forward import FrozenTarget, rows_before
from .loss import CPU_CHUNK, GPU_CHUNK, LossWeights, survival


@torch.no_grad()
def of_logits(hidden: torch.Tensor, head: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the results of `read` on logits of hidden states [N, d], computed M rows [M, V] at a time; head: [V,
    d]."""
    size = CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK
    return torch.cat([read(rows @ head.T) for rows in hidden.split(size)])


def lattice(
    model: BlockModel, frozen: FrozenTarget, step: TrainingStep, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return candidates [A, G, K] and scores [A, G, K, K] of every block from its hidden states [A, G, d], as in
    drafting.

    See `candidates.py`. The partition function has no gradient.
    """
    selector = model.selector
    assert selector is not None
    rows, shape = hidden.flatten(0, 1), (*hidden.shape[:2], selector.candidates)
    ids = of_logits(rows, frozen.head, lambda logits: logits.topk(selector.candidates, -1).indices)
    logits_of_ids = torch.einsum("nd,nkd->nk", rows, frozen.head[ids]).float().view(shape)
    ids = ids.view(shape)
    if isinstance(selector, LatticeSelector):
        partition = of_logits(rows, frozen.head, lambda logits: logits.float().logsumexp(-1)).view(*shape[:2], 1)
        context = model.context(step.features.to(hidden.dtype))[rows_before(step)]
        return ids, selector.scores(logits_of_ids - partition, ids, hidden, frozen.embedding, context)
    return ids, selector.scores(logits_of_ids, ids, hidden, step.anchors)


def scores_behind(tokens: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [A, G, K] of each position's candidates, given the tokens [A, G] before them, anchors first. Also
    returns [A, G] bool, whether that token is an anchor or a candidate itself; elsewhere the scores are undefined."""
    same = ids[:, :-1] == tokens[:, 1:, None]
    first = torch.zeros_like(tokens[:, :1])
    places = torch.cat([first, same.long().argmax(-1)], 1)
    known = torch.cat([first == 0, same.any(-1)], 1)
    return scores.take_along_dim(places[:, :, None, None], 2)[:, :, 0], known


def path_loss(
    model: BlockModel, frozen: FrozenTarget, step: TrainingStep, hidden: torch.Tensor, loss_weights: LossWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the losses of `loss.py` for distributions over candidates.

    hidden: [A, G, d] of all positions; the step's labels belong to `step.rows`.
    Returns the weighted loss, summed over N positions, [L_ce, L_tv, L_kl], and c* [N], 0 where no path goes.
    """
    labels = step.labels
    ids, scores = lattice(model, frozen, step, hidden)
    behind, known = (x.flatten(0, 1)[step.rows] for x in scores_behind(step.tokens[:, :-1], ids, scores))
    ids = ids.flatten(0, 1)[step.rows]
    log_p = behind.log_softmax(-1)
    target = ((ids[:, :, None] == labels.top[:, None]) * labels.probs[:, None]).sum(-1)
    kept = torch.minimum(log_p.exp(), target).sum(-1) * known
    weight = labels.weight * known
    if loss_weights.survival:
        weight = weight * survival(kept.detach(), labels.place)
    ce = -(log_p * (ids == labels.token[:, None])).sum(-1)
    tv = 2 * (1 - kept)
    kl = torch.xlogy(target, target).sum(-1) - (target * log_p).sum(-1)
    parts = torch.stack([(weight * part).sum() for part in (ce, tv, kl)])
    falling = (-loss_weights.kl_falloff * kept.detach()).exp()
    loss = loss_weights.ce * parts[0] + loss_weights.tv * parts[1] + loss_weights.kl * (weight * falling * kl).sum()
    return loss, parts.detach(), kept.detach()
