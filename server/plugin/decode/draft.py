"""Stage 1, draft: the drafter proposes tokens, and grammars force some."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter
from outrider.drafters.graphs import DraftGraphs
from outrider.kernels.upload import upload

from .boundary import Boundary
from .flatten import StepBatch
from .grammar_drafts import GrammarDrafts
from .requests import RequestTable
from .step import Step


class DraftStage:
    """ages: the drafter needs to know how long answers are.

    room: of `Drafter.reserve_probs`; None: drafts are not captured. graphs: captured drafts of `drafter`.
    """

    room: torch.Tensor | None = None
    graphs: DraftGraphs | None = None
    drafter: Drafter | None = None

    def __init__(self, requests: RequestTable, optional: Boundary, *, ages: bool) -> None:
        self.requests, self.optional, self.ages = requests, optional, ages
        self._nothing = Draft.nothing(0, requests.gamma, requests.device)

    @torch.inference_mode()
    def capture(self, drafter: Drafter, sizes: Sequence[int], page_table: torch.Tensor) -> None:
        """Capture graphs of drafts for these numbers of requests, ascending."""
        if self.room is not None:
            self.drafter = drafter
            self.graphs = DraftGraphs(drafter.propose, sizes, page_table, self.requests.gamma, self.room)

    def __call__(self, drafter: Drafter | None, batch: StepBatch, step: Step | None) -> tuple[Draft, float | None]:
        """Draft as the step decides; return drafts and their seconds (`Admission.draft_seconds`). Prompt lookup drafts
        for all requests. Drafts are empty if drafting has failed, or planning, which leaves no step."""
        if drafter is not None and step is not None and (step.drafts or (drafter.looks_up and step.looks_up)):
            drafted = self.optional.run("drafting", None, self._draft, drafter, batch, step)
            if drafted is not None:
                return drafted
            self.requests.stop_drafts()
        if len(self._nothing.lens) != len(batch.rows):
            self._nothing = Draft.nothing(len(batch.rows), self.requests.gamma, batch.rows.device)
        return self._nothing, 0.0

    def _draft(self, drafter: Drafter, batch: StepBatch, step: Step) -> tuple[Draft, float | None]:
        """Draft, and cut to each request's limit: 0 where it switched speculation off."""
        began, sampling = time.perf_counter(), batch.sampling
        anchors, seq_lens = batch.anchors, batch.seq_lens
        grammars = GrammarDrafts(batch.scheduled.reqs, anchors, self.optional)
        graphs = self.graphs if step.drafts and drafter is self.drafter else None
        if graphs is not None and not graphs.fits(len(anchors), batch.page_table):
            graphs = None
        requested = DraftBatch(
            anchors=anchors, seq_lens=seq_lens, page_table=batch.page_table, rows=batch.rows,
            draft_mask=None if step.draft_mask.all() else upload(step.draft_mask, anchors.device), depth=step.depth,
            keys=sampling.seeds[:0, None] if graphs else sampling.draft_keys(seq_lens, self.requests.gamma),
            seeds=sampling.seeds, seeded=sampling.seeded, wants_probs=not sampling.all_decided,
            decided=sampling.decided, all_greedy=sampling.all_greedy,
            answer_lens=seq_lens - self.requests.prompts[batch.rows] + 1 if self.ages else None,
            longest=None if anchors.is_cpu else 1 << int(step.view.contexts.max()).bit_length(),
            sets=step.entries.tensor("sets"), corpora=step.entries.tensor("corpora"),
            forced=grammars.forced(drafter.gamma), **sampling.rules._asdict(),
        )  # fmt: skip
        propose = graphs.propose if graphs else drafter.propose if step.drafts else drafter.look_up
        draft = grammars.follow(propose(requested), sampling.decided)
        seconds = time.perf_counter() - began if anchors.is_cpu else None
        lens = torch.minimum(draft.lens, self.requests.sent_limits.of(step.view.limits, anchors.device))
        if draft.probs is not None and draft.points is None:
            lens = lens.clamp(max=draft.probs.shape[1])
        return replace(draft, lens=lens), seconds
