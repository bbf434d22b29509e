"""Proposals of a round: the draft graph filled, scored and put in order for all requests at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.scheduler.spiffy.fill import Candidates, admission_order, fill, scores
from outrider.scheduler.spiffy.graph import DraftGraph
from outrider.scheduler.spiffy.learning import StateAcceptance

from .drafts import StateDraft


@dataclass(frozen=True, slots=True)
class Prediction:
    """The last forward's predictions for a request's open block.

    start, state: where the block is, and its newest state, [B] int64.
    tokens, probabilities: [B, J] of each position, the likeliest first; meaningless at revealed positions.
    """

    start: int
    state: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray

    def holds(self, start: int, state: np.ndarray) -> bool:
        """Return True if a request's open block is still this one."""
        return self.start == start and np.array_equal(self.state, state)


@dataclass(frozen=True, slots=True, eq=False)
class Proposals:
    """Up to K drafts of each of n requests, in their order of admission; entries beyond `counts` are not to be read.

    requests: [n] their numbers in the batch. counts: [n] drafts of each. states: [n, K, B]. complete: [n, K] bool.
    scores: [n, K] of `prune`. depths: [n, K] steps ahead. chances: [n, K] estimates that they are accepted.
    """

    requests: list[int]
    counts: list[int]
    states: np.ndarray
    complete: np.ndarray
    scores: np.ndarray
    depths: np.ndarray
    chances: np.ndarray

    def rows(self) -> np.ndarray:
        """Return [n, K] the mean rows of a draft: a complete one takes two, and if accepted saves the next round
        one."""
        return np.where(self.complete, 2.0 - self.chances, 1.0)

    def drafts(self, place: int, count: int) -> list[StateDraft]:
        """Return the first `count` drafts of the request at `place`."""
        number, complete = self.requests[place], self.complete[place, :count].tolist()
        return [StateDraft(number, self.states[place, k], whole) for k, whole in enumerate(complete)]

    def observe(
        self, stepped: np.ndarray, drafted: Sequence[int], paths: Sequence[Sequence[int]], acceptance: StateAcceptance
    ) -> None:
        """Learn the outcome of drafts: all one step ahead, and further ones that were in the forward.

        stepped: [n, B], the open blocks after their step. drafted: [n] how many were. paths: [n] the accepted ones of
            these.
        """
        places = np.arange(self.states.shape[1])
        near = (self.depths == 1) & (places < np.array(self.counts)[:, None])
        accepted = near & (self.states == stepped[:, None]).all(2)
        far = (self.depths > 1) & (places < np.array(drafted)[:, None])
        for place, path in enumerate(paths):
            accepted[place, path] = True
        seen = near | far
        acceptance.observe(self.scores[seen], self.depths[seen], accepted[seen])


def propose(
    graph: DraftGraph,
    acceptance: StateAcceptance,
    requests: list[int],
    known: Sequence[Prediction],
    goes_on: Sequence[bool],
    limits: Sequence[int],
    mask_id: int,
) -> Proposals:
    """Return the best drafts of n > 0 requests of one class. goes_on: [n] another block follows the open one, so
    complete drafts are useful. limits: [n] most drafts of each."""
    candidates = Candidates(
        np.stack([prediction.tokens[:, : graph.vocabulary_ranks] for prediction in known]),
        np.stack([prediction.probabilities[:, : graph.vocabulary_ranks] for prediction in known]),
    )
    filled = fill(graph, np.stack([prediction.state for prediction in known]), candidates, mask_id)
    complete = ~(filled.states == mask_id).any(2)
    np.logical_and(filled.fits, ~complete | np.array(goes_on)[:, None], out=filled.fits)
    worth = scores(graph, filled)
    order = admission_order(graph, filled, worth, max(limits))
    counts = np.minimum((order >= 0).sum(1), limits)
    each, nodes = np.arange(len(known))[:, None], np.maximum(order, 0)
    values, depths = worth[each, nodes], graph.depths[nodes]
    return Proposals(
        requests,
        counts.tolist(),
        filled.states[each, nodes],
        complete[each, nodes],
        values,
        depths,
        acceptance.chances(values, depths),
    )
