"""The worker's state of running requests, in arrays indexed by their rows of SGLang's request pool."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Prefilled
from outrider.kernels.upload import LastUpload, upload
from outrider.scheduler.contract import StepView

from ..options import RequestOptions
from .logit_rules import changes_logits, stop_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Entries of R requests, in their order.

    view: without contexts. numbers: without the columns in which all are 0. The rest: as in the table.
    """

    view: StepView
    lengths: np.ndarray
    planned: np.ndarray
    numbers: dict[str, np.ndarray]
    all_planned: bool
    any_level: bool

    def tensor(self, column: str) -> torch.Tensor | None:
        """Return numbers on the host; None: all are 0."""
        return torch.from_numpy(self.numbers[column]) if column in self.numbers else None


class RequestTable:
    """Options and state of the requests, by row; `context`: positions that a text may have.

    On the device, seeds: [rows] int64, of random numbers. seeded: [rows] bool, it came with the request.
    ends: [rows, E] int64, tokens that end the answer, filled up with -1. prompts: [rows] int64, tokens of the prompt.

    On the host, [rows] each, limits: drafted tokens per step, at most; 0 without speculation.
    lengths: tokens of prompt and answer, at most. planned: False: every drafted token is verified.
    ruled: has rules for its logits (`logit_rules.changes_logits`).
    numbers: written by the optional parts: "sets" of weights that draft for it, "corpora" of other texts that it looks
        up, "adapters" (LoRA), "traced"; 0: none.
    greedy, given: of temperature 0; with a seed that came with the request.
    generations: counts the prefills of a row, to tell a new request from the old one.
    levels: tokens per second required; 0 without a service level. generated: tokens since the prefill.
    started: seconds on the host's clock, of the prefill.
    """

    def __init__(self, rows: int, gamma: int, device: Any, context: int = 1 << 30):
        self.gamma, self.context = gamma, context
        self.longest = gamma  # of a draft; 0 once drafting is off
        self.device = device
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seeded = torch.zeros(rows, dtype=torch.bool, device=device)
        self.ends = torch.full((rows, 1), -1, dtype=torch.int64, device=device)
        self.prompts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limits = np.full(rows, gamma, dtype=np.int64)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self.planned = np.ones(rows, dtype=bool)
        self.ruled = np.zeros(rows, dtype=bool)
        self.numbers = {name: np.zeros(rows, dtype=np.int64) for name in ("sets", "corpora", "adapters", "traced")}
        self.generations = np.zeros(rows, dtype=np.int64)
        self.greedy = np.zeros(rows, dtype=bool)
        self.given = np.zeros(rows, dtype=bool)
        self.levels = np.zeros(rows)
        self.started = np.zeros(rows)
        self.generated = np.zeros(rows, dtype=np.int64)
        self.sent_rows, self.sent_limits = LastUpload(), LastUpload()  # of the last step
        self._running: Entries | None = None  # of the last call of `entries`

    def admit(self, reqs: Sequence[Any], rows: torch.Tensor, at: np.ndarray | None = None) -> None:
        """Read the settings of requests that are being prefilled (again, after a retraction).

        rows: [R], on the device. at: the same on the host; None: the device is waited for.
        """
        self._running = None
        at = rows.cpu().numpy() if at is None else at
        options = [RequestOptions.from_custom_params(req.sampling_params.custom_params) for req in reqs]
        prompts = np.array([len(req.origin_input_ids) for req in reqs], dtype=np.int64)
        self.prompts[rows.long()] = upload(prompts, self.device)
        self.limits[at] = [option.draft_limit(self.longest) for option in options]
        self.lengths[at] = prompts + [req.sampling_params.max_new_tokens for req in reqs]
        self.planned[at] = [option.planned for option in options]
        self.ruled[at] = [changes_logits(req.sampling_params) for req in reqs]
        self.levels[at] = [option.min_tokens_per_second or 0.0 for option in options]
        self.generations[at] += 1
        self.started[at] = time.perf_counter()
        self.generated[at] = 0
        given = [req.sampling_params.sampling_seed for req in reqs]
        # Seeds of our own need not be kept: numbers drawn with them are not needed again.
        seeds = np.array([secrets.randbits(62) if seed is None else seed for seed in given], dtype=np.int64)
        self.seeds[rows.long()] = upload(seeds, self.device)
        self.given[at] = [seed is not None for seed in given]
        self.greedy[at] = [req.sampling_params.top_k == 1 for req in reqs]  # so SGLang marks temperature 0
        self.seeded[rows.long()] = upload(self.given[at], self.device)
        stops = [[] if req.sampling_params.ignore_eos else sorted(stop_tokens(req)) for req in reqs]
        if (more := max(map(len, stops)) - self.ends.shape[1]) > 0:
            self.ends = torch.nn.functional.pad(self.ends, (0, more), value=-1)
        ends = np.full((len(reqs), self.ends.shape[1]), -1, dtype=np.int64)
        for row, tokens in zip(ends, stops, strict=True):
            row[: len(tokens)] = tokens
        self.ends[rows.long()] = upload(ends, self.device)

    def stop_drafts(self) -> None:
        """Set every limit to 0 from now on: drafting is off, so there is no draft to plan."""
        if self.longest:
            self.longest, self._running = 0, None
            self.limits[:] = 0

    def kinds(self, rows: np.ndarray) -> tuple[bool, bool]:
        """Return whether any request in `rows` [R] is seeded and not greedy, and whether all are greedy or seeded."""
        greedy, given = self.greedy[rows], self.given[rows]
        return bool((given & ~greedy).any()), bool((given | greedy).all())

    def entries(self, rows: np.ndarray) -> Entries:
        """Return entries of the requests in `rows` [R], gathered once for consecutive steps of the same ones."""
        if self._running is not None and np.array_equal(self._running.view.rows, rows):
            return self._running
        planned, levels, ruled = self.planned[rows], self.levels[rows], self.ruled[rows]
        numbers = {name: column[rows] for name, column in self.numbers.items()}
        numbers = {name: column for name, column in numbers.items() if column.any()}
        adapters, groups = numbers.get("adapters"), None
        if adapters is not None or ruled.any():  # of requests that are accepted alike
            groups = ruled + (0 if adapters is None else 2 * adapters)
        view = StepView(
            rows=rows, generations=self.generations[rows], contexts=np.zeros_like(rows), limits=self.limits[rows],
            levels=levels, progress=np.full(len(rows), np.inf), ruled=ruled if ruled.any() else None,
            groups=groups,
        )  # fmt: skip
        every, level = bool(planned.all()), bool(levels.any())
        self._running = Entries(view, self.lengths[rows], planned, numbers, all_planned=every, any_level=level)
        return self._running

    def view(self, entries: Entries, contexts: np.ndarray, unsure: int = 0) -> StepView:
        """Return the planner's view of requests before they draft. contexts: [R] cached tokens, at most; up to `unsure`
        fewer are possible. Drafts may then pass an answer's end, but not the context's."""
        room = entries.lengths - (contexts - unsure) - 2  # after the anchor, with one target token at the end
        if unsure:
            room = np.minimum(room, self.context - contexts - 1)
        view = replace(entries.view, contexts=contexts, limits=np.minimum(np.maximum(room, 0), entries.view.limits))
        if entries.any_level:  # tokens per second so far; inf for requests that have just started
            had = self.generated[view.rows]
            seconds = np.maximum(time.perf_counter() - self.started[view.rows], 1e-9)
            view = replace(view, progress=np.where(had > 0, had / seconds, np.inf))
        return view

    def take(self, view: StepView, accept_lens: np.ndarray) -> None:
        """Count the tokens [R] of a step, except for requests that no longer hold their row."""
        current = self.generations[view.rows] == view.generations
        rows = view.rows[current]
        self.generated[rows] += accept_lens[current]


def rows_and_lengths(batch: Any, width: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return rows and cached tokens of the batch's requests, and how many fewer tokens there may be.

    If SGLang does not read lengths back, the last known ones count, plus the tokens that the running step may add.
    """
    rows = batch.req_pool_indices_cpu.numpy().astype(np.int64)
    if batch.seq_lens_cpu is not None:
        return rows, batch.seq_lens_cpu.numpy().astype(np.int64), 0
    committed = [req.kv.kv_committed_len for req in batch.reqs]
    return rows, np.array(committed, dtype=np.int64) + width, width - 1


def prefilled_chunks(batch: Any, page_table: torch.Tensor) -> Prefilled:
    """Return the chunks of prompts that a prefill batch has read."""
    return Prefilled(
        page_table=page_table,
        rows=batch.req_pool_indices.long(),
        seq_lens=batch.seq_lens.long(),
        counts=batch.extend_lens,
        longest=max(map(sum, zip(batch.prefix_lens, batch.extend_lens, strict=True))),
    )


def transferred_tokens(batch: Any, page_table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots and tokens [N] int64 of requests with transferred KV: each text except its last token."""
    slots, tokens = [], []
    for row, length, req in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), batch.reqs, strict=True):
        slots.append(page_table[row, :length].long())
        tokens += [*req.origin_input_ids, *req.output_ids][:length]
    return torch.cat(slots), torch.tensor(tokens, device=page_table.device)
