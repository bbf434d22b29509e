"""Confidences of drafters without a head for them, from the draft's own distribution.

How large its largest chance is says most of whether a token is accepted, and its entropy some more. How much they say
differs between drafters and positions, which outcomes tell while serving (`scheduler/calibration/online.py`).
"""

import torch

GREEDY = (0.70, -0.17, 0.25)
SAMPLED = (0.40, -0.32, 0.04)
"""Weights of the logit of the largest chance in q, of the entropy of q in nats, and of 1. Logistic regression on drafts
of the embedded model's DFlash and of its DSpark without the head, at temperature 0, and at 0.7 and 1."""
MIX = torch.tensor([[entropy, largest, constant] for largest, entropy, constant in (SAMPLED, GREEDY)])
"""The same as the compiled kernels take them: `DraftDrawArgs` in cpu/csrc/kernels.h."""


def own_confidence(q: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Chances [R] float32 that tokens drawn from q [R, V'] are accepted; q alone decides, never the token drawn.

    temperatures: [R]; q of greedy requests is that of temperature 1.
    """
    greedy = temperatures <= 0
    of_largest, of_entropy, constant = (torch.where(greedy, *pair) for pair in zip(GREEDY, SAMPLED, strict=True))
    logits = of_largest * torch.logit(q.amax(-1), eps=1e-6) + of_entropy * torch.special.entr(q).sum(-1)
    return torch.sigmoid(logits + constant)
