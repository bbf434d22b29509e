"""The first rank's worker without its steps: set-up, and the commands of scheduler and HTTP process."""

from functools import partial
from typing import Any

import numpy as np

from outrider.drafters.slot_tokens import SlotTokens

from ..attention_backends import buckets_of, captured_sizes
from ..loading.from_profile import load_plan, plan_again
from .accept import AcceptStage
from .base import TargetWorker
from .boundary import Boundary
from .commit import CommitStage
from .draft import DraftStage
from .logit_rules import LogitRules
from .metrics import SpeculationMetrics
from .optional.adapters import AdapterOutcomes
from .optional.learning import AnswerKeeper, Exchange
from .optional.owner_drafters import OwnerDrafters
from .optional.part import OptionalPart, OptionalParts
from .optional.texts import TextKeeper
from .optional.trace import Tracing
from .plan import StepPlanner
from .requests import RequestTable
from .sampling import RunningSampling
from .verify_tail import VerifyTail


class LeaderWorker(TargetWorker):
    def _set_up(self, runner: Any, slots: int) -> None:
        """Create drafter, planner, optional parts and stages."""
        from ..loading.drafter import load_drafter

        config, gamma, rows = self.config, self.width - 1, self.page_table.shape[0]
        metrics = SpeculationMetrics(gamma, config.drafter)
        self.optional = Boundary(metrics.failures, self.device)
        self.requests = RequestTable(rows, gamma, self.device, runner.model_config.context_len)
        texts = TextKeeper.of(config, runner, self.optional)
        self.drafter = drafter = load_drafter(config, runner, texts.corpora if texts else None)
        if drafter is not None:
            drafter.allocate(slots)
            self.verify.captures_hidden = bool(drafter.target_layers) or drafter.reads_output
        self.exchange, self.by_owner = Exchange(config, drafter), OwnerDrafters.of(config, drafter)
        self.exchange.replan = self.reload_profile
        parts: list[OptionalPart | None] = [
            metrics, texts, self.by_owner, self.exchange if config.learning else None, AnswerKeeper.of(config),
            AdapterOutcomes.of(runner, gamma), Tracing(self.optional),
        ]  # fmt: skip
        self.parts = OptionalParts(self.optional, parts)
        self.planning = StepPlanner(
            *load_plan(config, self.exchange.in_use),
            requests=self.requests,
            metrics=metrics,
            device=self.device,
            buckets=buckets_of(runner, self.width),
            block=config.gamma if drafter is not None and drafter.shortens else None,
            draft_sizes=captured_sizes(runner),
            # Owners' drafters have calibrations of their own.
            corrects=drafter is not None and drafter.assesses_itself and self.by_owner is None,
            parts=self.parts,
        )
        self._set_up_stages(runner, SlotTokens(slots, self.device))

    def _set_up_stages(self, runner: Any, history: SlotTokens) -> None:
        drafter, buckets = self.drafter, self.planning.buckets
        self.history, self.sampling = history, RunningSampling(self.requests, by_block=self.config.by_block)
        self.draft = DraftStage(self.requests, self.optional, ages=bool(self.config.initial_tokens))
        rules = LogitRules(history, self.page_table)
        self.commit = CommitStage(runner, rules, self.requests, self.optional, owned=self.by_owner is not None)
        tail = None
        if buckets is not None and buckets.graphs:
            sizes = captured_sizes(runner)
            room = None if drafter is None or not sizes else drafter.reserve_probs(sizes[-1])
            observe = partial(self.commit.observe, drafter)
            tail = VerifyTail(buckets, observe, self.device, room, by_block=self.config.by_block)
            runner.capture_tail_hooks.append(tail.capture)
        self.accept = AcceptStage(runner, rules, self.requests, tail)

    def admit(self, scheduled: Any) -> np.ndarray:
        """Read the options of a batch's requests before they decode; return their rows [R]."""
        self.optional.run("planning", None, self.planning.interrupt)
        rows: np.ndarray = scheduled.req_pool_indices_cpu.numpy()
        self.parts.admitted(self.requests, rows.tolist(), scheduled.reqs)
        self.requests.admit(scheduled.reqs, scheduled.req_pool_indices, rows)
        return rows

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.optional.run("planning", None, self.planning.flush)
        self.parts.finished(rid)

    def outrider_state(self) -> dict[str, Any]:
        """Records since `forget_records`, for another process."""
        return self.planning.state()

    def outrider_live(self) -> dict[str, Any]:
        """The live state of speculation, for the page."""
        exchange = (self.by_owner or self.exchange).state()
        return self.planning.live() | {"exchange": exchange, "failures": self.optional.counts.copy()}

    def forget_records(self) -> None:
        self.planning.forget()

    def save(self) -> None:
        """Write the texts of lookups and the answers to learn from that are not on the disk yet."""
        self.parts.save()

    def reload_profile(self) -> None:
        """Plan by the current profile on the disk, if it can be read."""
        self.optional.run("planning", None, plan_again, self.planning.plan_by, self.config, self.exchange.in_use)

    def use_drafter(self, folder: str) -> None:
        """Draft with the weights in `folder` from the next step on (`Exchange.take`)."""
        self.optional.run("learning", False, self.exchange.take, folder)

    def drop_owner(self, learner: str) -> None:
        """Drop an owner's drafters from memory."""
        if self.by_owner is not None:
            self.optional.run("own_drafters", None, self.by_owner.drop_owner, learner)
