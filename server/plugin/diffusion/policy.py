"""Unmasking policies: pure functions from a block's state and the model's distributions to the next state.

A state is a block's tokens, some of them masked. A step draws a token for each masked position from the model's
distribution there, and reveals the most confident of them: `Static`, a fixed number (LLaDA's and SDAR's low-confidence
remasking); `ThresholdUnmasking`, all above a confidence, and at least one (Fast-dLLM, arXiv:2505.22618; SGLang's
LowConfidence).

A token's confidence is its probability: in the distribution it was drawn from, or at temperature 0, where the best
token is taken, in the model's own. The noise of a draw is a hash of the request's seed, the position in the context and
the step, which is the number of revealed tokens of the block. So a state and its logits decide the next state, in every
caller.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.kernels.noise import Purpose, gumbel_argmax, streams
from outrider.kernels.sampling import Rules, argmax, target_probs


class Policy(Protocol):
    """Decides which tokens a step reveals."""

    def reveal(self, masked: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        """Return [N, B] bool, a part of `masked` [N, B], empty only where that is; confidence: [N, B]."""
        ...


@dataclass(frozen=True, slots=True)
class Static:
    """Reveals the `tokens` most confident; among equals the first."""

    tokens: int = 1

    def reveal(self, masked: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        ranked = torch.where(masked, confidence, -torch.inf).argsort(dim=1, descending=True, stable=True)
        chosen = torch.zeros_like(masked).scatter_(1, ranked[:, : self.tokens], True)
        return chosen & masked


@dataclass(frozen=True, slots=True)
class ThresholdUnmasking:
    """Reveals all tokens with more confidence than `confidence`; where there is none, the most confident."""

    confidence: float = 0.95

    def reveal(self, masked: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
        above = masked & (confidence > self.confidence)
        return torch.where(above.any(1, keepdim=True), above, Static(1).reveal(masked, confidence))


def step(
    policy: Policy, states: torch.Tensor, tokens: torch.Tensor, confidence: torch.Tensor, mask_token_id: int
) -> torch.Tensor:
    """Return the states [N, B] int64 after `states` [N, B]; one without masked tokens stays. tokens, confidence: [N,
    B], of each position; not read at positions that are not masked."""
    return torch.where(policy.reveal(states == mask_token_id, confidence), tokens, states)


def noise_keys(
    seeds: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """Return keys [M] int64 for `predict`, from int64 seeds, positions in the context and steps, all [M].

    temperatures: [M]; if all are 0, no token is drawn and the keys are zeros, which saves time.
    """
    if temperatures is not None and not bool((temperatures > 0).any()):
        return torch.zeros_like(seeds)
    return streams(streams(seeds, positions, Purpose.TOKEN), steps, Purpose.UNMASK)


def steps_of(states: torch.Tensor, mask_token_id: int) -> torch.Tensor:
    """Return [N] int64, the steps of states [N, B]: how many of their tokens are revealed."""
    return (states != mask_token_id).sum(1)


def predict(
    logits: torch.Tensor, rules: Rules, keys: torch.Tensor, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [M] int64 and their confidence [M] float32 from logits [M, V]; the mask itself is never drawn.
    rules: M of each. keys: [M], see `noise_keys`; not read at temperature 0. The logits of the mask are changed."""
    greedy = rules.temperatures <= 0
    if bool(greedy.all()):
        return _best(logits, mask_token_id)
    tokens, confidence = torch.empty_like(keys), logits.new_empty(len(keys), dtype=torch.float32)
    best, drawn = greedy.nonzero()[:, 0], (~greedy).nonzero()[:, 0]
    if len(best):
        tokens[best], confidence[best] = _best(logits[best], mask_token_id)
    logits[:, mask_token_id] = -torch.inf
    probs = target_probs(logits[drawn], rules.of(drawn))
    tokens[drawn] = chosen = gumbel_argmax(probs, keys[drawn])
    confidence[drawn] = probs.gather(1, chosen[:, None])[:, 0]
    return tokens, confidence


def _best(logits: torch.Tensor, mask_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    probs = target_probs(logits, Rules(logits.new_ones(len(logits), dtype=torch.float32)))
    logits[:, mask_token_id] = -torch.inf
    tokens = argmax(logits)
    return tokens, probs.gather(1, tokens[:, None])[:, 0]
