"""Left-to-right sampling of a block (DSpark, section 3.1, equation 4), with the exact distribution of every draw."""

from __future__ import annotations

import torch

from outrider.kernels.sampling import inverse_cdf

from .heads import ConfidenceHead, MarkovHead


def choose(row: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [R] drawn from logits [R, V'] at temperatures [R] (0: the largest), and the distribution [R, V']."""
    greedy = temperatures <= 0
    q = torch.softmax(row / temperatures.masked_fill(greedy, 1.0)[:, None], -1)
    if bool(greedy.all()):
        return row.argmax(-1), q
    return torch.where(greedy, row.argmax(-1), inverse_cdf(q, uniforms)), q


def sample_block(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    *,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    vocab: torch.Tensor | None,
    markov: MarkovHead,
    confidence: ConfidenceHead | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Draw gamma tokens per request, each given the one before it.

    logits: [R, gamma, V'] base logits U_k; hidden: [R, gamma, d]; anchors, temperatures: [R]; uniforms: [R, gamma].
    vocab: [V'] target token of each column, None for the identity.
    Returns tokens [R, gamma], probs [R, gamma, V'] float32 (None when every request is greedy), confidence [R, gamma].
    Without a confidence head the confidence is max_v q_k(v): like the head's, it does not depend on the token drawn.
    """
    all_greedy = bool((temperatures <= 0).all())
    state, previous = markov.start(hidden), anchors
    tokens, probs, embedded = [], [], []
    for k in range(logits.shape[1]):
        before = markov.w1(previous)
        state, latent = markov.step(state, before, hidden[:, k])
        row = logits[:, k].float() + markov.w2(latent)
        if all_greedy and confidence is not None:
            column = row.argmax(-1)
        else:
            column, q = choose(row, temperatures, uniforms[:, k])
            probs.append(q)
        previous = column if vocab is None else vocab[column]
        tokens.append(previous)
        embedded.append(before)
    if confidence is None:
        sure = torch.stack(probs, 1).amax(-1)
    else:
        sure = torch.sigmoid(confidence(hidden, torch.stack(embedded, 1)).float())
    return torch.stack(tokens, 1), None if all_greedy else torch.stack(probs, 1), sure


def sample_parallel(
    logits: torch.Tensor, *, temperatures: torch.Tensor, uniforms: torch.Tensor, vocab: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`sample_block` without a sequential head: all positions at once, independently of each other."""
    requests, gamma, width = logits.shape
    heat = temperatures.repeat_interleave(gamma)
    column, q = choose(logits.reshape(-1, width).float(), heat, uniforms.flatten())
    tokens = column if vocab is None else vocab[column]
    probs = None if bool((temperatures <= 0).all()) else q.view(requests, gamma, width)
    return tokens.view(requests, gamma), probs, q.amax(-1).view(requests, gamma)
