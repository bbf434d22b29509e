"""Candidate tokens of drafts, from a forward's distributions."""

from __future__ import annotations

import torch

from outrider.kernels.noise import torch_exponentials
from outrider.kernels.sampling import Rules, argmax, target_probs

HEAD = 16
"""Most probable tokens among which noise chooses those of a sampled request's drafts."""


def likely_tokens(
    logits: torch.Tensor,
    rules: Rules,
    keys: torch.Tensor,
    count: int,
    drawn: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [M, count] int64, the likeliest first, and their probabilities [M, count] float32 from logits [M, V].

    rules: M of each. keys: [M], of the noise that the next step draws these tokens with: a sampled request's come in
    the order in which this noise prefers them, so that the first is what it draws unless the distribution changes.
    drawn: tokens and confidence [M] as of `policy.predict`, which at temperature 0 are the first. The logits may be
    changed.
    """
    greedy = rules.temperatures <= 0
    if bool(greedy.all()):
        return _behind(logits, *drawn, min(count, logits.shape[1]))
    head = min(max(HEAD, count), logits.shape[1])
    warm = Rules(rules.temperatures.masked_fill(greedy, 1.0), *rules[1:])
    probs, tokens = target_probs(logits, *warm).topk(head, 1)
    waits = torch_exponentials(keys, tokens).masked_fill(greedy[:, None], 1.0) / probs.double()
    order = waits.argsort(dim=1, stable=True)[:, :count]
    return tokens.gather(1, order), probs.gather(1, order)


def _behind(
    logits: torch.Tensor, best: torch.Tensor, chances: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable tokens, of which the best and its probability are known. As few are wanted, to look for one
    after the other is faster than to sort, and the distribution need not be made again."""
    tokens, found = best[:, None], [best[:, None]]
    scores = [logits.gather(1, tokens)]
    for _ in range(count - 1):
        logits.scatter_(1, tokens, -torch.inf)
        tokens = argmax(logits)[:, None]
        found.append(tokens)
        scores.append(logits.gather(1, tokens))
    likely = torch.cat(scores, 1).float()
    return torch.cat(found, 1), chances[:, None] * (likely - likely[:, :1]).exp()
