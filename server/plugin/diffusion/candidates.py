"""What a forward's distributions say of the steps to come: the tokens that drafts are made of."""

from __future__ import annotations

import torch

from outrider.kernels.noise import torch_exponentials
from outrider.kernels.sampling import Rules, argmax, target_probs

HEAD = 16
"""Most probable tokens among which noise chooses those of a sampled request's drafts."""


def likely_tokens(
    logits: torch.Tensor, rules: Rules, keys: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [M, count] int64, the likeliest first, and their probabilities [M, count] float32 from logits [M, V].

    rules: M of each. keys: [M], of the noise that the next step draws these tokens with: a sampled request's come in
    the order in which this noise prefers them, so that the first is what it draws unless the distribution changes.
    The logits may be changed.
    """
    greedy = rules.temperatures <= 0
    if bool(greedy.all()):
        return _best(logits, min(count, logits.shape[1]))
    head = min(max(HEAD, count), logits.shape[1])
    drawn = Rules(rules.temperatures.masked_fill(greedy, 1.0), *rules[1:])
    probs, tokens = target_probs(logits, *drawn).topk(head, 1)
    waits = torch_exponentials(keys, tokens).masked_fill(greedy[:, None], 1.0) / probs.double()
    order = waits.argsort(dim=1, stable=True)[:, :count]
    return tokens.gather(1, order), probs.gather(1, order)


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most probable; as few are wanted, to look for one after the other is faster than to sort."""
    probs, found = target_probs(logits, logits.new_ones(len(logits), dtype=torch.float32)), []
    for _ in range(count):
        found.append(argmax(logits)[:, None])
        logits.scatter_(1, found[-1], -torch.inf)
    tokens = torch.cat(found, 1)
    return tokens, probs.gather(1, tokens)
