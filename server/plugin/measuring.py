"""Steps of an exact shape, for `outrider tune`: the serving parts of a worker are replaced while steps are timed.

Requests set by their `gamma` how many tokens, or states of a block, they have in a step. Drafts are neither learned
from nor counted, but step times are recorded. Other requests get the same answers meanwhile, without speedup.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features, Prefilled
from outrider.drafters.dummy import FixedDrafter
from outrider.drafters.graphs import DraftGraphs
from outrider.drafters.lookup_first import LookupFirst
from outrider.drafters.wrappers import Initialised
from outrider.scheduler.baselines import VerifyAll
from outrider.scheduler.contract import StepView

from .decode.metrics import SpeculationMetrics
from .decode.optional.part import OptionalParts
from .decode.plan import StepPlanner
from .decode.requests import Entries
from .decode.step import StepDrafts
from .diffusion.drafting import Round, StateDrafting
from .diffusion.drafts import StateDraft
from .diffusion.recording import RoundRecording

REPLACED = "outrider_replaced"
"""Attribute of a measuring worker: its replaced parts, by name."""


def begin(worker: Any) -> None:
    """Let a worker, of speculation or block diffusion, run steps of exact shapes until `end`."""
    end(worker)
    measures: dict[str, Any] = {}
    if isinstance(served := getattr(worker, "drafting", None), StateDrafting):
        measures = {
            "drafting": PaddedDrafting(served.graphs, served.planner.cost, served.mask_id),
            "recording": RoundRecording(served.mask_id),
        }
    elif worker.drafter is not None:
        worker.planning.interrupt()
        vocabulary = worker.target_worker.model_config.vocab_size
        measures = {
            "drafter": TimedDrafter(worker.drafter, vocabulary, worker.draft.graphs),
            "planning": FixedStepPlanner(worker.planning),
        }
    setattr(worker, REPLACED, {name: getattr(worker, name) for name in measures})
    vars(worker).update(measures)


def end(worker: Any) -> None:
    """Serve as before `begin`."""
    vars(worker).update(vars(worker).pop(REPLACED, {}))


class TimedDrafter(FixedDrafter):
    """Runs a drafter's model for all requests, but drafts other tokens. `graphs`, if there are any, include prompt
    lookup. On a GPU every other step runs no model: the difference is the time of a draft."""

    def __init__(self, served: Drafter, vocabulary: int, graphs: DraftGraphs | None = None):
        super().__init__(served.gamma, vocabulary)
        self.asked, self.graphs = 0, graphs
        self.served = self.model = served
        self.target_layers, self.reads_output = served.target_layers, served.reads_output
        while isinstance(self.model, LookupFirst | Initialised):
            self.model = self.model.model

    def observe(self, features: Features) -> None:
        self.served.observe(features)

    def prefilled(self, chunks: Prefilled) -> None:
        self.served.prefilled(chunks)

    def propose(self, batch: DraftBatch) -> Draft:
        self.asked += 1
        if not batch.anchors.is_cpu and self.asked % 2:
            return super().propose(batch)
        by_graph = self.graphs is not None and self.graphs.fits(len(batch.anchors), batch.page_table)
        draft = self.graphs.propose(batch) if self.graphs and by_graph else self.model.propose(batch)
        return replace(super().propose(batch), drafting=draft.drafting)


class FixedStepPlanner(StepPlanner):
    """Verifies every draft, also beyond an answer's end."""

    def __init__(self, served: StepPlanner):
        super().__init__(
            VerifyAll(), None,
            requests=served.requests, metrics=(metrics := StepTimesOnly(served.metrics)),
            device="cpu" if served.on_host else "cuda", buckets=served.buckets, block=served.block,
            draft_sizes=served.draft_sizes, parts=OptionalParts(served.optional, [metrics]),
        )  # fmt: skip
        self.view = self._whole

    def _whole(self, entries: Entries, contexts: np.ndarray, unsure: int) -> StepView:
        return replace(self.requests.view(entries, contexts, unsure), limits=entries.view.limits)


class StepTimesOnly(SpeculationMetrics):
    """A server's metrics without counts of drafts."""

    def __init__(self, served: SpeculationMetrics):
        vars(self).update(vars(served))

    def count(self, drafts: StepDrafts) -> None:
        self.steps.inc()


class PaddedDrafting(StateDrafting):
    """Each request drafts its newest state until it has 1 + gamma states in the forward; none is accepted."""

    def choose(self, current: Round) -> list[StateDraft]:
        drafts = []
        for number, root in enumerate(current.roots):
            if root >= 0:
                rows = int((current.rows.tables == current.rows.tables[root]).sum())
                missing = 1 + (current.served[number].options.gamma or 0) - rows
                drafts += [StateDraft(number, current.rows.tokens[root].numpy(), complete=False)] * missing
        return drafts
