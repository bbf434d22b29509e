"""Left-to-right sampling of a block (DSpark, section 3.1, equation 4), with the exact distribution of every draw."""

from __future__ import annotations

import torch

from .heads import ConfidenceHead, MarkovHead


def invert_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Column [R] at which the cumulative sum of `probs` [R, V'] passes uniforms [R] in [0, 1).

    Summed in float64 so that the draw follows `probs` itself and not the rounding of its sum; a column of
    probability 0 is never returned.
    """
    cdf = probs.double().cumsum(-1)
    at = uniforms.double()[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, at, right=True)[:, 0].clamp_max(probs.shape[1] - 1)


def sample_block(
    logits: torch.Tensor,
    hidden: torch.Tensor,
    *,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    vocab: torch.Tensor | None,
    markov: MarkovHead | None,
    confidence: ConfidenceHead | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Draw gamma tokens per request.

    logits: [R, gamma, V'] base logits U_k; hidden: [R, gamma, d]; anchors, temperatures: [R]; uniforms: [R, gamma].
    vocab: [V'] target token of each column, None for the identity.
    Returns tokens [R, gamma], probs [R, gamma, V'] float32 (None when every request is greedy), confidence [R, gamma].
    Without a confidence head the confidence is max_v q_k(v): like a head's, it does not depend on the token drawn.
    """
    gamma = logits.shape[1]
    greedy = temperatures <= 0
    all_greedy = bool(greedy.all())
    scale = 1.0 / torch.where(greedy, 1.0, temperatures)[:, None]
    state = markov.start(hidden) if markov else hidden
    previous, tokens, probs, peaks, embedded = anchors, [], [], [], []
    for k in range(gamma):
        row = logits[:, k].float()
        if markov:
            before = markov.w1(previous)
            state, latent = markov.step(state, before, hidden[:, k])
            row = row + markov.w2(latent)
            embedded.append(before)
        column = row.argmax(-1)
        if not all_greedy:
            q = torch.softmax(row * scale, -1)
            column = torch.where(greedy, column, invert_cdf(q, uniforms[:, k]))
            probs.append(q)
        if confidence is None:
            peaks.append(torch.softmax(row * scale, -1).amax(-1) if all_greedy else probs[-1].amax(-1))
        previous = column if vocab is None else vocab[column]
        tokens.append(previous)
    if confidence is None:
        sure = torch.stack(peaks, 1)
    else:
        sure = torch.sigmoid(confidence(hidden, torch.stack(embedded, 1) if embedded else hidden).float())
    return torch.stack(tokens, 1), None if all_greedy else torch.stack(probs, 1), sure
