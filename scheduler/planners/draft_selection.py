"""The choice of requests for which a drafter's model drafts, and of how many tokens.

At throughput lambda a draft of d tokens is worth sum_{k<=d} max(0, a_k - lambda dT/dK), and as many of the best draft,
as deep, as pay for lambda T_draft(n d) (Dinkelbach's method): with many requests only the first tokens pay, and what a
block takes is rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FEW = 64
"""With fewer requests there is time to look at every depth, and at drafts of all."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftSelection:
    """who: [R] bool, for whom the model drafts. depth: tokens of each; None: all that it can."""

    who: np.ndarray
    depth: int | None = None

    def cut(self, survival: np.ndarray, free: np.ndarray | None, block: int | None) -> np.ndarray:
        """Survivals [samples, R, gamma] of a step that drafts so, from those with whole drafts of all, and of prompt
        lookup alone (None: there is none), which no depth cuts."""
        if self.depth is not None and self.depth != block:
            survival = survival.copy()
            unseen = survival[:, :, self.depth : block]
            if free is None:
                unseen[:] = 0.0
            else:
                np.minimum(unseen, free[:, :, self.depth : block], out=unseen)
        if self.who.all():
            return survival
        others = self.who[:, None]
        return survival * others if free is None else np.where(others, survival, free)


def worth_drafting(
    survival: np.ndarray,
    taken: np.ndarray,
    drafted: np.ndarray,
    able: np.ndarray,
    margin: float,
    costs: np.ndarray,
    block: int | None,
) -> tuple[DraftSelection | None, DraftSelection]:
    """The requests whose drafts pay, with the best depth (None if none does), and all requests with theirs.

    survival: [samples, R, gamma] of steps in which the model drafted for them, with whole drafts. taken: [samples, R] 1
        where that was the model's draft, 0 where it was found by prompt lookup, which is found without the model as
        well.
    drafted: [R] how likely it is that the model has to draft for each selected. able: [R] bool, who may be selected.
    margin: tokens that a verified one costs. costs: [depths, R + 1] tokens that 0 .. R drafts cost, of 1 .. block
        tokens; without `block` of whole drafts.
    """
    gain = np.maximum(survival - np.float32(margin), 0.0)
    gain *= (taken * able)[:, :, None]
    gain = gain[0] if len(gain) == 1 else gain.mean(0)
    worth = gain.sum(1)[None] if block is None else gain[:, :block].cumsum(1).T
    needed = drafted * able
    everyone = DraftSelection(able, _depth(int((worth.sum(1) - cost_of(costs, needed.sum())).argmax()), block))
    depths = np.arange(len(costs)) if len(able) < FEW else _about(worth, costs)
    order = np.argsort(-worth[depths], axis=1)
    net = worth[depths[:, None], order].cumsum(1)
    counts = np.arange(costs.shape[1])
    for row, each, drafts in zip(net, costs[depths], needed[order].cumsum(1), strict=True):
        row -= np.interp(drafts, counts, each)
    best, last = divmod(int(net.argmax()), len(able))
    if net[best, last] <= 0:
        return None, everyone
    who = np.zeros(len(able), dtype=bool)
    who[order[best, : last + 1]] = True
    return DraftSelection(who & able, _depth(int(depths[best]), block)), everyone


def cost_of(costs: np.ndarray, drafts: float) -> np.ndarray:
    """[...] costs [..., R + 1] of 0 .. R drafts, where there are `drafts` in the mean."""
    below = min(int(drafts), costs.shape[-1] - 2)
    low = costs[..., below]
    return low + (costs[..., below + 1] - low) * (drafts - below)


def _about(worth: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """[1] the best depth if each request beyond the first cost as much as the others."""
    each = (costs[:, -1] - costs[:, 1]) / (costs.shape[1] - 2)
    net = np.maximum(worth - each[:, None], 0.0).sum(1) + each - costs[:, 1]
    return net.argmax(keepdims=True)


def _depth(index: int, block: int | None) -> int | None:
    return None if block is None else index + 1
