"""A block drafted in several denoising steps, with a q for every token that keeps rejection sampling exact.

A step sees the tokens revealed so far, predicts a distribution for each masked token, picks some of these and draws
them, each with its own key. The pick depends on the state before the step's draws: on distributions, never on tokens
drawn in that step.

**The rule.** Let s_i be the step at which token i is revealed. Where s_i = max over j <= i of s_j, no token to its left
was revealed later, and q_i is the distribution that it was drawn from. Elsewhere q_i is a point mass on the token.

**Why it is exact.** docs/planner.md needs of a draft only a set of events F_i for each position i such that
    1. these follow from F_i: y_j and q_j of all j < i; q_i; whether position i is verified;
    2. given F_i, the token y_i is distributed as q_i;
    3. the acceptance numbers and the noise of the replacement are independent of F_i and y_i.
Then a block that also has position i yields the same as the shorter one, on average given F_i, hence on average. The
F_i need not be nested: each position may have its own.

Where s_i = max over j <= i of s_j, take as F_i everything known before the draws of step s_i, all further draws of that
step, and the drafts of all further requests. Every token j < i was revealed at a step s_j <= s_i: earlier, so it is
known, or in the same step by its own draw, independent of y_i given the state. Its q_j is a softmax of a known state,
or a point mass on y_j. Which of the two, and that i itself is such a case, follows from s_1 .. s_i, which were decided
before the draws of step s_i. A confidence c_k of k <= i was read before the draws of step s_k <= s_i, so admission by
c_1 .. c_i is known as well. Given F_i, y_i is one draw from the step's softmax.

Where some j < i was revealed later than i, y_j may depend on y_i, and given y_j the token y_i is no longer distributed
as the softmax that it came from. Take all drafts as F_i: given them, y_i is certain, and a point mass is its
distribution. Such a token may have influenced anything, including c_k of k < i.

Not exact would be: the softmax of its own step for every token (`tests/drafters/test_denoise.py` has an example of two
    tokens that is off by a total variation of 1/4); revealing positions by the probability of the tokens drawn there; a
    softmax for a token taken as the argmax; a q from a second pass over the finished block.

One step, and steps from left to right, keep every q. Greedy requests need no q, nor do seeded ones: their drafts must
equal a token that is known without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.kernels.sampling import Rules, argmax

from ..block.sampling import all_requests_greedy, draw_independently

Predict = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor | None]]
"""Maps (tokens [R, gamma], revealed [R, gamma] bool, columns) to logits [R, M, V'] of the M columns, and the chance [R,
M] that each is accepted (None without a confidence head). Tokens that are not revealed are arbitrary."""

Pick = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Maps (masked [R, M] bool, certainty [R, M], count) to [R, M] bool, `count` of the masked tokens of each request."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which tokens are revealed. counts: tokens revealed in each step; they add up to gamma. pick: chooses
    among the masked tokens. None: from left to right, so a step predicts only the tokens it reveals."""

    counts: tuple[int, ...]
    pick: Pick | None = None


def most_certain(masked: torch.Tensor, certainty: torch.Tensor, count: int) -> torch.Tensor:
    """Pick the `count` masked positions of largest certainty, the first among equals."""
    order = certainty.masked_fill(~masked, -1.0).sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(masked).scatter_(1, order[:, :count], True)


def _evenly(gamma: int, steps: int) -> tuple[int, ...]:
    return tuple(gamma * (step + 1) // steps - gamma * step // steps for step in range(steps))


SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "left": lambda gamma, steps: Schedule((1,) * (steps - 1) + (gamma - steps + 1,)),
    "even": lambda gamma, steps: Schedule(_evenly(gamma, steps)),
    "certain": lambda gamma, steps: Schedule(_evenly(gamma, steps), most_certain),
}
"""left: one token a step, the rest in the last step; even: as many in each step, from left to right; certain: as many
in each step, positions with the largest top probability first."""


def make_schedule(name: str, gamma: int, steps: int) -> Schedule:
    """Return a schedule. Raises ValueError for an unknown name, and for more steps than tokens."""
    if name not in SCHEDULES:
        raise ValueError(f"a denoising order is one of {', '.join(SCHEDULES)}, not {name!r}")
    if not 1 <= steps <= gamma:
        raise ValueError(f"denoising steps must lie in 1..{gamma}, one for each draft token at most; got {steps}")
    return SCHEDULES[name](gamma, steps)


def keeps_distribution(revealed_at: torch.Tensor) -> torch.Tensor:
    """Return [R, gamma] bool, tokens that keep the q they were drawn from; revealed_at: [R, gamma] int64, the step of
    each."""
    return revealed_at == revealed_at.cummax(1).values


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
    requests, gamma = keys.shape
    all_greedy = all_requests_greedy(rules, all_greedy)
    wants_probs = wants_probs and not all_greedy
    tokens = torch.zeros_like(keys)
    revealed_at = torch.full_like(tokens, -1)
    confidence = torch.zeros(requests, gamma, device=keys.device)
    probs: torch.Tensor | None = None
    done = 0
    for step, count in enumerate(schedule.counts):
        columns = slice(done, done + count) if schedule.pick is None else slice(0, gamma)
        logits, chances = predict(tokens, revealed_at >= 0, columns)
        certainty, q = chances, None
        if all_greedy and certainty is not None and schedule.pick is None:
            best = argmax(logits.flatten(0, 1)).view(requests, -1)
            drawn = best if vocab is None else vocab[best]
        else:
            drawn, q, certainty = draw_independently(
                logits, rules, keys[:, columns], vocab=vocab, wants_probs=wants_probs, all_greedy=all_greedy
            )
        masked = revealed_at[:, columns] < 0
        picked = masked if schedule.pick is None else schedule.pick(masked, certainty, count)
        revealed_at[:, columns] = revealed_at[:, columns].where(~picked, step)
        tokens[:, columns] = drawn.where(picked, tokens[:, columns])
        sure = certainty if chances is None else chances.float()
        confidence[:, columns] = sure.where(picked, confidence[:, columns])
        if q is not None:
            if len(schedule.counts) == 1:
                probs = q
            else:
                probs = q.new_zeros(requests, gamma, q.shape[2]) if probs is None else probs
                probs[:, columns] = q.where(picked[..., None], probs[:, columns])
        done += count
    if probs is not None and schedule.pick is not None:
        chosen = tokens if vocab is None else torch.searchsorted(vocab, tokens)
        point = torch.zeros_like(probs).scatter_(2, chosen[..., None], 1.0)
        probs = probs.where(keeps_distribution(revealed_at)[..., None], point)
    return tokens, probs, confidence
