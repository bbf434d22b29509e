"""A block drafted in several denoising steps from left to right, and the q that each token was drawn from.

A step sees the tokens revealed so far, predicts a distribution for each token that it reveals, and draws these, each
with its own key. Every step but the last reveals one token; the last reveals the rest.

Token i, its q and its confidence depend only on tokens to its left that earlier steps revealed. Tokens of one step are
independent draws. So docs/planner.md's condition (2) holds for each token.
"""

from collections.abc import Callable

import torch

from outrider.kernels.sampling import Rules, argmax

from ..block.sampling import all_requests_greedy, draw_independently

Predict = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor | None]]
"""Maps (tokens [R, gamma], revealed [R, gamma] bool, columns) to logits [R, M, V'] of the M columns, and the chance [R,
M] that each is accepted (None without a confidence head). Tokens that are not revealed are arbitrary."""

Schedule = tuple[int, ...]
"""Tokens revealed in each step; they add up to gamma."""


def make_schedule(gamma: int, steps: int) -> Schedule:
    """Return the schedule of this many steps; raises ValueError unless 1 <= steps <= gamma."""
    if not 1 <= steps <= gamma:
        raise ValueError(f"denoising steps must lie in 1..{gamma}, one for each draft token at most; got {steps}")
    return (1,) * (steps - 1) + (gamma - steps + 1,)


def denoise(
    predict: Predict,
    schedule: Schedule,
    rules: Rules,
    keys: torch.Tensor,
    *,
    vocab: torch.Tensor | None,
    wants_probs: bool,
    all_greedy: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Draw gamma tokens for each of R requests.

    rules: how each request is sampled. keys: [R, gamma] int64, of the noise of each token.
    vocab: [V'] int64, the target's token of each column of the logits; None: V' is the target's vocabulary.
    wants_probs, all_greedy: as in `DraftBatch`.
    Returns tokens [R, gamma], probs [R, gamma, V'] float32 (None where all are greedy or not wanted) and confidence [R,
    gamma]. Confidence is read before the draws of the step that revealed the token; without a confidence head it is the
    largest probability of that step.
    """
    all_greedy = all_requests_greedy(rules, all_greedy)
    tokens, places = torch.zeros_like(keys), torch.arange(keys.shape[1], device=keys.device)
    confidence: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    done = 0
    for count in schedule:
        columns = slice(done, done + count)
        logits, chances = predict(tokens, (places < done).expand_as(keys), columns)
        if all_greedy and chances is not None:
            best = argmax(logits.flatten(0, 1)).view(len(keys), -1)
            tokens[:, columns] = best if vocab is None else vocab[best]
        else:
            tokens[:, columns], q, certainty = draw_independently(
                logits, rules, keys[:, columns], vocab=vocab, wants_probs=wants_probs and not all_greedy,
                all_greedy=all_greedy,
            )  # fmt: skip
            probs += [] if q is None else [q]
        confidence.append(certainty if chances is None else chances.float())
        done += count
    together = None if not probs else probs[0] if len(probs) == 1 else torch.cat(probs, 1)
    return tokens, together, torch.cat(confidence, 1)
