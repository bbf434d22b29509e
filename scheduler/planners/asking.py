"""For whom a drafter's model drafts, and how many tokens, at the price of a second.

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
class Ask:
    """who: [R] bool, for whom the model drafts. depth: tokens of each; None: all that it can."""

    who: np.ndarray
    depth: int | None = None

    def cut(self, survival: np.ndarray, free: np.ndarray | None, block: int | None) -> np.ndarray:
        """Survivals [samples, R, gamma] of a step that asks so, from those with whole drafts of all, and of prompt
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


def above(survival: np.ndarray, margin: float) -> np.ndarray:
    """[R, gamma] float32, tokens above what verifying them costs, in the mean over samples; survival
    [samples, R, gamma]."""
    return np.maximum(survival - np.float32(margin), 0.0).mean(0)


@dataclass(frozen=True, slots=True, eq=False)
class Takes:
    """What becomes of asking each of R requests: the model drafts only where prompt lookup is not sure, and its draft is
    taken only where lookup's promises less.

    taken: [R] chance that the model's draft is taken. drafted: [R] chance that it drafts at all.
    """

    taken: np.ndarray
    drafted: np.ndarray


def worth_asking(
    drafts: np.ndarray, takes: Takes, able: np.ndarray, margin: float, costs: np.ndarray, block: int | None
) -> tuple[Ask | None, Ask]:
    """Those whose drafts pay and as deep as they do, None if none does; and all, as deep as is best for them.

    drafts: [samples, R, gamma] survivals of whole drafts of the model that were taken. able: [R] bool, who may be
        asked. margin: tokens that a verified one costs.
    costs: [depths, R + 1] tokens that 0 .. R drafts cost, of 1 .. block tokens; without `block` of whole drafts.
    """
    gain = above(drafts, margin) * (takes.taken * able)[:, None]
    worth = gain.sum(1)[None] if block is None else gain[:, :block].cumsum(1).T
    needed = takes.drafted * able
    everyone = Ask(able, _depth(int((worth.sum(1) - cost_of(costs, needed.sum())).argmax()), block))
    depths = np.arange(len(costs)) if len(able) < FEW else _about(worth, costs)
    order = np.argsort(-worth[depths], axis=1)
    net = np.take_along_axis(worth[depths], order, 1).cumsum(1)
    for row, each, counts in zip(net, costs[depths], needed[order].cumsum(1), strict=True):
        row -= cost_of(each, counts)
    best, last = divmod(int(net.argmax()), len(able))
    if net[best, last] <= 0:
        return None, everyone
    who = np.zeros(len(able), dtype=bool)
    who[order[best, : last + 1]] = True
    return Ask(who & able, _depth(int(depths[best]), block)), everyone


def cost_of(costs: np.ndarray, drafts: np.ndarray | float) -> np.ndarray:
    """[..., n] what `drafts` [n], so many in the mean, cost; costs: [..., R + 1] of 0 .. R."""
    below = np.minimum(np.asarray(drafts, dtype=np.int64), costs.shape[-1] - 2)
    low, high = costs[..., below], costs[..., below + 1]
    return low + (high - low) * (drafts - below)


def _about(worth: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """[1] the best depth if each request beyond the first cost as much as the others."""
    each = (costs[:, -1] - costs[:, 1]) / (costs.shape[1] - 2)
    net = np.maximum(worth - each[:, None], 0.0).sum(1) + each - costs[:, 1]
    return net.argmax(keepdims=True)


def _depth(index: int, block: int | None) -> int | None:
    return None if block is None else index + 1
