"""The fused loss and its gradients, compared with dense distributions and autograd."""

import pytest
import torch
from margins import assert_near

from outrider.drafters.training.loss import Labels, LossWeights, chunks, draft_loss, position_weights

RECIPES = {
    "dspark": LossWeights(ce=0.3, tv=0.9),
    "dflash": LossWeights(ce=1.0, tv=0.0),
    "divergence": LossWeights(ce=0.0, tv=0.5, kl=0.7),
    "falling": LossWeights(ce=0.1, tv=0.9, kl=0.7, kl_falloff=3.0),
    "survival": LossWeights(ce=0.1, tv=0.9, kl=0.7, kl_falloff=3.0, survival=True),
}


def labels(n: int, columns: int, k: int) -> Labels:
    """n rows in blocks of four, three, two, one, four, …"""
    token = torch.randint(-1, columns, (n,))
    top = torch.stack([torch.randperm(columns)[:k] for _ in range(n)])
    top[0, 1] = -1
    place = torch.tensor([i for length in [4, 3, 2, 1] * n for i in range(length)][:n])
    blocks = (place == 0).nonzero()[:, 0].tolist()
    return Labels(token, top, torch.rand(n, k).softmax(-1) * 0.9, torch.rand(n), place, blocks)


def dense(z: torch.Tensor, labels: Labels) -> tuple[torch.Tensor, torch.Tensor]:
    """p and the stored part of t, both [N, V']."""
    target = torch.zeros_like(z)
    target.scatter_add_(1, labels.top.clamp_min(0), labels.probs * (labels.top >= 0))
    return z.softmax(-1), target


def reference_loss(z: torch.Tensor, labels: Labels, how: LossWeights) -> torch.Tensor:
    """Equations 9 and 10 and the divergence, over dense distributions."""
    p, target = dense(z, labels)
    accept = torch.minimum(p, target).sum(-1).detach()
    weight = labels.weight.clone()
    if how.survival:
        for first, last in zip(labels.blocks, [*labels.blocks[1:], len(z)], strict=True):
            for row in range(first, last):
                weight[row] *= accept[first:row].prod()
    tv = (p - target).abs().sum(-1) + 1 - target.sum(-1)
    ce = -p.log().gather(1, labels.token.clamp_min(0)[:, None])[:, 0] * (labels.token >= 0)
    kl = (torch.xlogy(target, target) - target * p.log()).sum(-1) * how.kl * (-how.kl_falloff * accept).exp()
    return (weight * (how.ce * ce + how.tv * tv + kl)).sum()


@pytest.mark.parametrize("how", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("sequential", [True, False])
def test_fused_loss_equals_autograd(sequential: bool, how: LossWeights) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 16, requires_grad=True)
    latent = torch.randn(23, 5, requires_grad=True) if sequential else None
    head, w2 = torch.randn(40, 16), torch.randn(40, 5, requires_grad=True) if sequential else None
    want = labels(23, 40, 6)
    inputs = [x for x in (hidden, latent, w2) if x is not None]
    z = hidden @ head.T + (latent @ w2.T if sequential else 0)
    expected = reference_loss(z, want, how)
    loss, parts, accept, weights = draft_loss(hidden, latent, head, w2, want, how, chunk=7)
    assert_near(loss, expected, 100)  # rows of 16, a vocabulary of 40, 23 rows
    for a, b in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert_near(a, b, 100)
    p, target = dense(z, want)
    assert_near(accept, torch.minimum(p, target).sum(-1), 100)
    assert_near(parts[1], 2 * (weights * (1 - accept)).sum(), 100)
    assert torch.equal(weights, want.weight) != how.survival


def test_a_chunk_holds_whole_blocks() -> None:
    assert chunks([0, 4, 7, 9, 10], 14, 7) == [slice(0, 7), slice(7, 14)]
    assert chunks([0, 4, 7, 9, 10], 14, 6) == [slice(0, 4), slice(4, 10), slice(10, 14)]
    assert chunks([0, 4], 8, 1) == [slice(0, 4), slice(4, 8)]
    assert chunks([0], 5, 9) == [slice(0, 5)]


def test_position_weights_decay() -> None:
    torch.testing.assert_close(position_weights(3, 2.0), torch.tensor([1.0, 0.606531, 0.367879]))
    assert torch.equal(position_weights(3, float("inf")), torch.ones(3))


def test_log_partitions_are_not_rounded_to_bfloat16() -> None:
    """The logits are exact in bfloat16 and far from 0."""
    torch.manual_seed(0)
    hidden = torch.full((64, 1), 16.0).bfloat16()
    head = (torch.randint(-8, 9, (4000, 1)) / 16).bfloat16()  # logits -8, -7, …, 8
    want, how = labels(64, 4000, 6), LossWeights(ce=1.0, tv=0.0)
    expected = reference_loss(hidden.float() @ head.float().T, want, how)
    loss, *_ = draft_loss(hidden, None, head, None, want, how)
    torch.testing.assert_close(loss, expected, atol=0, rtol=2e-4)
