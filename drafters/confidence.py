"""Confidences of drafters without a confidence head, from the draft's own distribution.

The largest probability predicts acceptance best, its entropy adds some. How well they predict differs between drafters
and positions, so outcomes correct them while serving (`scheduler/calibration/online.py`).
"""

import torch

GREEDY = (0.70, -0.17, 0.25)
SAMPLED = (0.40, -0.32, 0.04)
"""Weights of the logit of the largest probability in q, of the entropy of q in nats, and of 1. Fitted by logistic
regression to drafts of the embedded model's DFlash, and of its DSpark without the head, at temperature 0, and at 0.7
and 1."""
MIX = torch.tensor([[entropy, largest, constant] for largest, entropy, constant in (SAMPLED, GREEDY)])
"""The same in the order that the compiled kernels expect: `DraftDrawArgs` in cpu/csrc/kernels.h."""


def own_confidence(q: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the chance [R] float32 that a token drawn from q [R, V'] is accepted; the token drawn plays no part.
    temperatures: [R]; q of greedy requests is the one of temperature 1."""
    greedy = temperatures <= 0
    of_largest, of_entropy, constant = (torch.where(greedy, *pair) for pair in zip(GREEDY, SAMPLED, strict=True))
    logits = of_largest * torch.logit(q.amax(-1), eps=1e-6) + of_entropy * torch.special.entr(q).sum(-1)
    return torch.sigmoid(logits + constant)
