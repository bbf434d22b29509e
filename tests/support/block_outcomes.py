"""All outcomes of unmasking a block step by step, with their probabilities."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

import torch

State = tuple[int, ...]


def enumerated(
    chances: Callable[[State], Sequence[Mapping[int, float]]],
    reveals: Callable[[Mapping[int, float]], Collection[int]],
    state: State,
    mask: int,
) -> Counter[State]:
    """Probabilities of the finished blocks reached from a state.

    chances: of each token, by position, after a state. reveals: the positions that a step reveals, from the chance of
    the token drawn at each masked one.
    """
    masked = [place for place, token in enumerate(state) if token == mask]
    if not masked:
        return Counter({state: 1.0})
    of_position, outcomes = chances(state), Counter[State]()
    for drawn in product(*(of_position[place].items() for place in masked)):
        shown = reveals({place: chance for place, (_, chance) in zip(masked, drawn, strict=True)})
        after = [*state]
        for place, (token, _) in zip(masked, drawn, strict=True):
            after[place] = token if place in shown else mask
        for block, p in enumerated(chances, reveals, tuple(after), mask).items():
            outcomes[block] += p * math.prod(chance for _, chance in drawn)
    return outcomes


def top_chances(logits: torch.Tensor, mask: int, top_k: int, temperature: float = 1.0) -> list[dict[int, float]]:
    """Chances of each position's `top_k` likeliest tokens, from its logits [B, V]; never the mask's."""
    best = logits.double().index_fill(1, torch.tensor([mask]), -torch.inf).topk(top_k)
    chances = (best.values / temperature).softmax(1).tolist()
    return [dict(zip(ids, row, strict=True)) for ids, row in zip(best.indices.tolist(), chances, strict=True)]
