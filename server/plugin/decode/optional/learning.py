"""The engine's part in learning: it keeps finished answers and watches a newly exchanged drafter."""

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

from outrider.drafters.base import Drafter
from outrider.drafters.learning.answers import Answer, AnswerStore
from outrider.scheduler.calibration.classes import SOURCES

from ...config import PluginConfig
from ...options import RequestOptions
from ..logit_rules import changes_logits
from ..step import StepDrafts
from .adapters import BASE
from .part import OptionalPart

logger = logging.getLogger(__name__)

KEPT_TOKENS = 2_000_000
"""Tokens of answers kept to learn from, prompts included."""
OPEN_STORES = 64
"""Most answer stores open at once; opening a store reads its files."""
WINDOW = 512
"""Drafts over which the share of the drafter that serves is averaged."""
WATCHED = 2048
"""Drafts after which an exchanged drafter is no longer watched."""
LOSS = 0.1
"""Tolerated drop of first-token acceptance after an exchange: the traffic may have changed as well."""
UNKNOWN = 0.4
"""Acceptance assumed for the previous drafter if too few of its drafts were seen."""
CHANCE = 1e-4
"""Chance, at each check, of taking back a drafter that is only `LOSS` below the previous one."""


class AnswerKeeper(OptionalPart):
    """Keeps finished answers, except of requests that refused. It keeps no other part of a request.

    A separate thread opens stores and writes answers in the order of finishing, so the scheduler waits for no file.
    store_of: returns the store of a request's learner; "" is the server's.
    """

    part = "learning"

    def __init__(self, store_of: Callable[[str], AnswerStore]):
        self.store_of = store_of
        self._writer = ThreadPoolExecutor(1, "answers")
        self._failed = False

    @classmethod
    def of(cls, config: PluginConfig) -> Self | None:
        """Return the keeper of a server that learns. The first of several engines is enough."""
        if not config.learning or (get_parallel().dp_rank or 0) > 0:
            return None
        return cls(OwnerStores(Path(config.learning), KEPT_TOKENS))

    def finished(self, req: Any) -> None:
        params = req.sampling_params
        options = RequestOptions.from_custom_params(params.custom_params)
        # A drafter learns from the answers of the model, or of one adapter, alone; and it reads no images.
        whole = req.multimodal_inputs is None and not isinstance(req.finished_reason, FINISH_ABORT)
        if options.learn and req.lora_id == options.adapter and whole:
            temperature = 0.0 if params.top_k == 1 else float(params.temperature)
            tokens = [*req.origin_input_ids], [*req.output_ids_through_stop]
            answer = Answer(*tokens, temperature, changes_logits(params))
            self._writer.submit(self._write, options.learner, answer)

    def save(self) -> None:
        """Wait until all finished answers are written."""
        self._writer.submit(int).result()

    def _write(self, learner: str, answer: Answer) -> None:
        """Keep an answer. A full disk does not end the engine: of failures in a row the first is logged."""
        try:
            self.store_of(learner).append(answer)
            self._failed = False
        except Exception as error:
            if not self._failed:
                logger.warning("answers cannot be kept for the drafter to learn from: %s", error)
            self._failed = True


class OwnerStores:
    """The stores of learners in `folder`, each of at most `most_tokens` tokens; some are open. Not thread-safe."""

    def __init__(self, folder: Path, most_tokens: int):
        self.folder, self.most_tokens = folder, most_tokens
        self._open: dict[str, AnswerStore] = {}  # the least recently used first

    def __call__(self, learner: str) -> AnswerStore:
        """Return the store of a learner. Raises OSError."""
        store = self._open.pop(learner, None) or AnswerStore(self.folder / learner, self.most_tokens)
        self._open[learner] = store
        if len(self._open) > OPEN_STORES:
            self._open.pop(next(iter(self._open))).close()
        return store


class Exchange(OptionalPart):
    """The server's drafter in use: the weights of the start, or a learned version.

    in_use: its folder; "": the weights of the start. refused: folders that were taken back, or did not fit.
    watch: compares the drafter with the one before. replan: called after an exchange.
    """

    part = "learning"

    def __init__(self, config: PluginConfig, drafter: Drafter | None):
        self.drafter, self._start = drafter, config.drafter_path
        self.in_use, self._before = "", ""
        self.refused: list[str] = []
        self.watch = DrafterWatch()
        self.replan: Callable[[], None] = lambda: None
        if config.learned and self.take(config.learned):
            self.watch.forget()

    def take(self, folder: str) -> bool:
        """Switch to these weights; return False if they are in use already or do not fit (logged)."""
        if folder == self.in_use or self.drafter is None:
            return False
        try:
            self.drafter.reload(folder or self._start)
        except (ValueError, OSError) as error:
            logger.warning("the learned drafter %s is not used: %s", folder, error)
            self.refused.append(folder)
            return False
        self.in_use, self._before = folder, self.in_use
        self.watch.exchanged()
        self.replan()
        return True

    def begins(self) -> None:
        """Go back to the previous weights if the current ones do worse."""
        if not self.watch.worse:
            return
        worse = self.in_use
        logger.warning("the learned drafter %s is taken back: fewer of its tokens were accepted than before", worse)
        if not self.take(self._before):  # gone meanwhile
            self.take("")
        self.watch.forget()
        self.refused.append(worse)

    def drafted(self, drafts: StepDrafts) -> None:
        if drafts.drafted:
            adapters = drafts.numbers("adapters")
            self.watch.observe(*drafts.outcome(slice(None) if adapters is None else adapters == BASE))

    def state(self) -> dict[str, Any]:
        """Folders in use and refused, for another process."""
        return {"in_use": self.in_use, "refused": list(self.refused)}


class DrafterWatch:
    """Detects whether fewer tokens of a new drafter are accepted than of the previous one.

    Only the first token of each of the model's drafts counts, because verification lengths do not change its chance. It
    counts 1 or 0 if it was verified, else the drafter's own confidence.
    """

    def __init__(self) -> None:
        self._mean, self._weight = 0.0, 0.0  # of the drafter that serves
        self._before: float | None = None  # share of the previous drafter; None: no watch
        self._sum, self._drafts = 0.0, 0  # since the exchange

    def observe(
        self,
        confidence: np.ndarray,
        classes: np.ndarray,
        draft_lens: np.ndarray,
        verify_lens: np.ndarray,
        accept_lens: np.ndarray,
    ) -> None:
        """Record a step. confidence: [R, gamma], calibrated. Other arrays: [R], as in `FinishedStep`."""
        by_model = (classes % len(SOURCES) == SOURCES.index("model")) & (draft_lens > 0)
        if not np.count_nonzero(by_model):
            return
        first = np.where(verify_lens > 0, accept_lens > 1, confidence[:, 0])[by_model]
        count, total = len(first), float(first.sum())
        self._weight = min(self._weight + count, max(WINDOW, count))
        self._mean += (total / count - self._mean) * count / self._weight
        if self._before is not None:
            self._sum, self._drafts = self._sum + total, self._drafts + count
            if self._drafts > WATCHED:
                self._before = None

    def exchanged(self) -> None:
        """Compare the drafter that drafts from now on with the previous one."""
        known = self._weight >= WINDOW / 8
        self._before = max((self._mean if known else UNKNOWN) - LOSS, 0.05)
        self._mean = self._weight = self._sum = 0.0
        self._drafts = 0

    def forget(self) -> None:
        """Stop watching: another drafter drafts."""
        self._before = None
        self._mean = self._weight = 0.0

    @property
    def worse(self) -> bool:
        """True if acceptance this low has a chance of at most `CHANCE` (Chernoff's bound)."""
        if self._before is None or not self._drafts:
            return False
        share, least = self._sum / self._drafts, self._before
        if share >= least:
            return False
        distance = (1 - share) * math.log((1 - share) / (1 - least))
        if share > 0:
            distance += share * math.log(share / least)
        return self._drafts * distance > -math.log(CHANCE)
