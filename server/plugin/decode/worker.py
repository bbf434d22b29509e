"""The speculative worker: draft, plan, flatten, verify, accept, commit, once per decode step.

SGLang's scheduler calls `forward_batch_generation` for every batch. A prefill runs the target, shows its tokens to the
drafter and draws the first token; a decode step runs the seven stages of the design. All randomness comes from
`outrider.kernels.noise`, all sampling from `Sampling`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from outrider.drafters.base import Draft, Drafter, Features
from outrider.drafters.slot_tokens import SlotTokens
from outrider.kernels.ragged import commit

from ..attention_backends import buckets_of, captured_sizes, check_taken, commit_states
from ..config import PluginConfig
from ..cpu.direct_forward import DirectForward, direct_forward
from ..cpu.free_memory import give_back_free_memory
from ..image_tokens import rotary_positions, within_vocabulary
from ..loading.from_profile import load_plan, plan_again
from ..slot_pool import SlotPool
from ..spec_inputs import FlatVerify, Layouts, VerifyInput, extend_positions, flatten
from . import warm_up
from .adapters import AdapterOutcomes
from .boundary import Boundary
from .draft_batch import draft_batch
from .grammar_drafts import GrammarDrafts
from .learning import AnswerKeeper, Exchange
from .logit_rules import LogitRules
from .logprobs import write_logprobs, write_step_logprobs
from .metrics import SpeculationMetrics
from .owner_drafters import OwnerDrafters
from .ranks import Ranks
from .request_parts import RequestParts
from .requests import RequestTable, prefilled_chunks, rows_and_lengths
from .results import decoded, prefilled
from .sampling import RunningSampling, Sampling
from .step import Step
from .step_planner import StepPlanner
from .texts import TextKeeper
from .trace import StepTrace
from .verify_tail import VerifyTail


class SpeculativeWorker(BaseSpecWorker):
    by_owner: OwnerDrafters | None = None

    def __init__(self, server_args: Any, target_worker: Any, **_: Any):
        super().__init__()
        self._target_worker, self.server_args = target_worker, server_args
        self.config = PluginConfig.from_env()
        self.width = get_spec().speculative_num_draft_tokens  # gamma + 1, reserved by SGLang per step
        self.speculative_num_draft_tokens = self.width
        self._sampling, self._layouts = RunningSampling(), Layouts()
        self._direct: DirectForward | None = None
        self._direct_sought = False

    @property
    def draft_worker(self) -> None:
        return None  # SGLang expects its own model runner; our drafters are not one

    @property
    def primary_draft_kv_pool(self) -> SlotPool | None:
        state = [] if self.drafter is None else self.drafter.slot_state()
        return SlotPool.of(state, self.token_to_kv_pool_allocator.page_size)

    def alloc_memory_pool(self, **_: Any) -> None:
        runner = self._target_worker.model_runner
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self._target_worker.get_memory_pool()
        slots = runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size  # slot 0.. of the padding page
        self.device = runner.device
        self.ranks = Ranks(get_parallel().tp_group, self.device)
        self._set_up(runner, slots)
        if torch.device(self.device).type == "cpu":
            give_back_free_memory()

    def _set_up(self, runner: Any, slots: int) -> None:
        """Create drafter, planner and sampler. slots: KV slots."""
        from ..loading.drafter import load_drafter

        metrics = SpeculationMetrics(self.width - 1, self.config.drafter)
        self.optional = Boundary(metrics.failures, self.device)
        self.history = SlotTokens(slots, self.device)
        self.rules = LogitRules(self.history, self.req_to_token_pool.req_to_token)
        rows, context = self.req_to_token_pool.req_to_token.shape[0], runner.model_config.context_len
        self.requests = RequestTable(rows, self.width - 1, self.device, context)
        self.texts = TextKeeper.of(self.config, runner, self.optional)
        self.drafter: Drafter | None = load_drafter(self.config, runner, self.texts.corpora if self.texts else None)
        self.exchange = Exchange(self.config, self.drafter)
        self.by_owner = OwnerDrafters.of(self.config, self.drafter)
        if self.drafter is not None:
            self.drafter.allocate(slots)
        adapters = AdapterOutcomes.of(runner, self.width - 1)
        self.planning = StepPlanner(
            *load_plan(self.config, self.exchange.in_use),
            requests=self.requests,
            metrics=metrics,
            optional=self.optional,
            device=self.device,
            buckets=buckets_of(runner, self.width),
            block=self.config.gamma if self.drafter is not None and self.drafter.shortens else None,
            draft_sizes=captured_sizes(runner),
            watch=self.exchange.watch if self.config.learning else None,
            by_owner=self.by_owner,
            adapters=adapters,
            corrects=self.drafter is not None and self.drafter.assesses_itself,
        )
        self._nothing = Draft.nothing(0, self.width - 1, self.device)
        keeper = AnswerKeeper.of(self.config)
        self.parts = RequestParts(self.optional, self.by_owner, self.texts, adapters, keeper)
        self.tail: VerifyTail | None = None
        if (buckets := self.planning.buckets) is not None and buckets.graphs:
            sizes = captured_sizes(runner)
            room = None if self.drafter is None or not sizes else self.drafter.reserve_probs(sizes[-1])
            self.tail = VerifyTail(buckets, self._observe, self.device, room, by_block=self.config.by_block)
            runner.capture_tail_hooks.append(self.tail.capture)

    def init_attention_backends(self) -> None:
        check_taken(self._target_worker.model_runner)

    def init_cuda_graphs(self) -> None:
        """SGLang calls it when the target's are captured."""
        runner, table = self._target_worker.model_runner, self.req_to_token_pool.req_to_token
        if self.drafter is not None and (sizes := captured_sizes(runner)):
            self.drafter.capture(sizes, table)
        if not table.is_cpu:
            shape = self.req_to_token_pool.size, table, runner.model_config.vocab_size, self.width - 1
            warm_up.run_all(warm_up.Shapes(*shape, self.config.by_block), self.drafter)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        **_: Any,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def outrider_state(self) -> dict[str, Any]:
        """Records since `forget_records`, for another process."""
        return self.planning.state()

    def outrider_live(self) -> dict[str, Any]:
        """The live state of speculation, for the page."""
        exchange = (self.by_owner or self.exchange).state()
        return self.planning.live() | {"exchange": exchange, "failures": self.optional.counts.copy()}

    def forget_records(self) -> None:
        self.planning.forget()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.optional.run("planning", None, self.planning.flush)
        self.parts.finished(rid)

    def save(self) -> None:
        """Write the texts of lookups and the answers to learn from that are not on the disk yet."""
        for each in (self.parts.texts, self.parts.keeper):
            if each is not None:
                each.save()

    def reload_profile(self) -> None:
        """Plan by the current profile on the disk, if it can be read."""
        self.optional.run("planning", None, plan_again, self.planning.plan_by, self.config, self.exchange.in_use)

    def use_drafter(self, folder: str) -> None:
        """Draft with the weights in `folder` from the next step on (`Exchange.take`)."""
        if self.optional.run("learning", False, self.exchange.take, folder):
            self.reload_profile()

    def drop_owner(self, learner: str) -> None:
        """Drop an owner's drafters from memory."""
        if self.by_owner is not None:
            self.optional.run("own_drafters", None, self.by_owner.drop_owner, learner)

    @property
    def _captures_hidden(self) -> bool:
        return self.drafter is not None and (bool(self.drafter.target_layers) or self.drafter.reads_output)

    # -- prefill ------------------------------------------------------------------------------------------------

    def admit(self, batch: Any) -> np.ndarray:
        """Read the options of a batch's requests before they decode; return their rows [R]."""
        self.optional.run("planning", None, self.planning.interrupt)
        at: np.ndarray = batch.req_pool_indices_cpu.numpy()
        self.parts.admit(self.requests, at.tolist(), batch.reqs)
        self.requests.admit(batch.reqs, batch.req_pool_indices, at)
        return at

    def _prefill(self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None) -> GenerationBatchResult:
        at = self.admit(batch)
        config = self.target_worker.model_runner.model_config
        input_ids, slots = within_vocabulary(batch.input_ids, batch.reqs, config), batch.out_cache_loc
        mode = CaptureHiddenMode.FULL if self._captures_hidden else None
        result = self.target_worker.forward_batch_generation(batch, is_verify=True, capture_hidden_mode=mode)
        seq_lens, logits_output = batch.seq_lens, result.logits_output
        positions = extend_positions(batch.prefix_lens, batch.extend_lens, self.device)
        sets = None if self.by_owner is None else torch.from_numpy(np.repeat(self.requests.sets[at], batch.extend_lens))
        self._observe(logits_output.hidden_states, input_ids, positions, slots, sets)
        if self.drafter is not None:
            chunks = prefilled_chunks(batch, self.req_to_token_pool.req_to_token)
            self.optional.run("drafting", None, self.drafter.prefilled, chunks)
        if batch.is_prefill_only:
            tokens = torch.zeros(len(batch.reqs), dtype=torch.int64, device=self.device)
        else:
            tokens = self._first_tokens(batch, logits_output, seq_lens)
            self.ranks.broadcast(tokens)
        if self._captures_hidden:
            logits_output.hidden_states = None
        if on_publish is not None:
            on_publish(seq_lens)
        result = prefilled(result, tokens, seq_lens, self.width)
        self.optional.run("tracing", None, StepTrace.send, result, self.requests.traced[at], self.optional)
        return result

    def _first_tokens(self, batch: Any, logits_output: Any, seq_lens: torch.Tensor) -> torch.Tensor:
        rows = batch.req_pool_indices.long()
        logits = logits_output.next_token_logits
        self.rules.prefilled(batch, logits, seq_lens)
        kinds = self.requests.kinds(batch.req_pool_indices_cpu.numpy())
        sampling = Sampling.of(batch.sampling_info, self.requests.seeds[rows], self.requests.seeded[rows], kinds)
        tokens = sampling.draw(logits, seq_lens - 1)
        if batch.return_logprob:
            write_logprobs(logits_output, batch, logits, tokens)
        return tokens

    # -- decode -------------------------------------------------------------------------------------------------

    def _decode(
        self, batch: Any, on_publish: Callable[[torch.Tensor], None] | None, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        rows, seq_lens = batch.req_pool_indices.long(), batch.seq_lens.long()
        anchors = batch.spec_info.bonus_tokens.long()
        sampling, classes = self._sampling.of(batch, rows, self.requests, by_block=self.config.by_block)
        run = self.optional.run
        if run("learning", False, self.exchange.take_back_if_worse):
            self.reload_profile()

        at, contexts, unsure = rows_and_lengths(batch, self.width)
        step = run("planning", None, self.planning.begin, at, contexts, classes, unsure)
        bucket = self.planning.least_bucket(len(at)) if step is None else step.bucket
        if bucket is not None:
            self.ranks.broadcast_bucket(bucket)
        draft, draft_seconds = self._draft_or_nothing(step, rows, seq_lens, anchors, sampling, batch.reqs)
        admission = None if step is None else run("planning", None, self.planning.admit, step, draft, draft_seconds)
        verify_lens = torch.zeros_like(seq_lens) if admission is None else admission.verify_lens
        alone = admission is None or admission.ends is None  # anchors alone are verified
        self.ranks.broadcast(draft.tokens, verify_lens)
        page_table = self.req_to_token_pool.req_to_token
        flat = flatten(anchors, draft.tokens, verify_lens, seq_lens, page_table, rows, bucket)
        tail = self.tail
        if tail is not None and not tail.takes(batch, sampling, draft, verify_lens, flat, alone):
            tail = None
        query_lens, verified = self._verify(batch, flat, verify_lens, seq_lens, rows, alone=alone)
        logits_output = verified.logits_output
        if tail is not None and verified.can_run_cuda_graph:
            accept_lens, tokens, new_seq_lens, bonus = tail.results(len(rows), len(flat.request))
            logits_output.hidden_states = None
            self.ranks.broadcast(tokens, accept_lens)
        else:
            self.target_worker.model_runner.shared_read_done_event = None  # rules read the page table after its graph
            logits = self.rules.verified(
                batch, logits_output, flat, anchors, draft.tokens, seq_lens,
                longest=int(contexts.max()), exact=not sampling.all_greedy, barrier=grammar_barrier
            )  # fmt: skip
            accept_lens, tokens = sampling.accept(logits, draft, verify_lens, flat)
            self.ranks.broadcast(tokens, accept_lens)
            commit_states(self.target_worker.model_runner, accept_lens)
            sets = None if self.by_owner is None else torch.from_numpy(self.requests.sets[at])
            self._commit(flat, accept_lens, tokens, seq_lens, logits_output, sets)
            new_seq_lens, bonus = seq_lens + accept_lens, tokens.gather(1, accept_lens[:, None] - 1)[:, 0]
        if on_publish is not None:
            on_publish(new_seq_lens)
        if batch.return_logprob:
            write_step_logprobs(logits_output, batch, flat, tokens)
        if admission is not None:
            run("planning", None, self.planning.finish, admission, accept_lens)
        batch.forward_mode = ForwardMode.DECODE
        result = decoded(verified, query_lens, tokens, accept_lens, new_seq_lens, bonus)
        traced = self.requests.traced[at]
        run("tracing", None, StepTrace.send, result, traced, self.optional, admission, accept_lens)
        return result

    def _draft_or_nothing(self, step: Step | None, rows: torch.Tensor, *given: Any) -> tuple[Draft, float | None]:
        """Draft as the step decides; return drafts and seconds (`Admission`). Prompt lookup drafts for all requests.
        Drafts are empty if drafting or planning has failed; after a failed plan there is no step."""
        drafter = self.drafter
        if drafter is not None and step is not None and (step.drafts or (drafter.looks_up and step.looks_up)):
            drafted = self.optional.run("drafting", None, self._draft, step, rows, *given)
            if drafted is not None:
                return drafted
            self.requests.stop_drafts()
        if len(self._nothing.lens) != len(rows):
            self._nothing = Draft.nothing(len(rows), self.width - 1, self.device)
        return self._nothing, 0.0

    def _draft(
        self,
        step: Step,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        anchors: torch.Tensor,
        sampling: Sampling,
        reqs: Sequence[Any],
    ) -> tuple[Draft, float | None]:
        """Drafts and seconds. Requests that switched speculation off get length 0."""
        assert self.drafter is not None
        began = time.perf_counter()
        grammars = GrammarDrafts(reqs, anchors, self.optional)
        given = step, sampling, self.requests, self.req_to_token_pool.req_to_token, rows, seq_lens, anchors
        forced, owned = grammars.forced(self.drafter.gamma), self.by_owner is not None
        batch = draft_batch(*given, forced, owned=owned, ages=bool(self.config.initial_tokens))
        draft = self.drafter.propose(batch) if step.drafts else self.drafter.look_up(batch)
        draft = grammars.follow(draft, sampling.decided)
        seconds = time.perf_counter() - began if anchors.is_cpu else None
        lens = torch.minimum(draft.lens, self.requests.sent_limits.of(step.view.limits, self.device))
        if draft.probs is not None and draft.points is None:
            lens = lens.clamp(max=draft.probs.shape[1])
        return replace(draft, lens=lens), seconds

    def _verify(
        self,
        batch: Any,
        flat: FlatVerify,
        verify_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        rows: torch.Tensor,
        *,
        alone: bool = False,
    ) -> tuple[torch.Tensor, GenerationBatchResult]:
        """Rows [R] of each request, and the result of their forward. alone: as in `Layouts.of`."""
        query_lens, layout = self._layouts.of(flat, verify_lens, alone=alone)
        direct = self._direct_forward()
        if direct is not None and not batch.return_hidden_states:
            output = direct.verify(flat, seq_lens, rows, batch.reqs)
            return query_lens, GenerationBatchResult(output, can_run_cuda_graph=False)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = flat.input_ids
        batch.out_cache_loc = flat.slots
        positions = rotary_positions(flat, batch.reqs)
        batch.spec_info = VerifyInput(positions, query_lens, self.width, self._captures_hidden, layout)
        return query_lens, self.target_worker.forward_batch_generation(batch, is_verify=True)

    def _direct_forward(self) -> DirectForward | None:
        if not self._direct_sought or (self._direct is not None and not self._direct.stands):
            self._direct_sought = True
            self._direct = direct_forward(self.target_worker, self._captures_hidden)
        return self._direct

    def _commit(
        self,
        flat: FlatVerify,
        accept_lens: torch.Tensor,
        accepted: torch.Tensor,
        seq_lens: torch.Tensor,
        logits_output: Any,
        sets: torch.Tensor | None = None,
    ) -> None:
        """Show the drafter the newly cached tokens: the anchor and the accepted drafts. sets: [R], the requests' sets
        of weights."""
        hidden = logits_output.hidden_states if self._captures_hidden else None
        tokens, positions, slots = flat.input_ids, flat.positions, flat.slots
        sets = None if sets is None else sets[flat.request]
        if not accept_lens.is_cpu:  # the host does not know the count: rejected tokens go to slot 0
            slots = commit(accept_lens, accepted, seq_lens, flat.request, flat.step, slots)[2]
        elif len(tokens) > len(accept_lens):  # more than anchors, which always stay
            kept = (flat.step < accept_lens[flat.request]).nonzero()[:, 0]
            hidden = None if hidden is None else hidden[kept]
            tokens, positions, slots = tokens[kept], positions[kept], slots[kept]
            sets = None if sets is None else sets[kept]
        self._observe(hidden, tokens, positions, slots, sets)
        logits_output.hidden_states = None

    def _observe(
        self,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        sets: torch.Tensor | None = None,
    ) -> None:
        self.history.write(slots, tokens)
        if self.drafter is not None:
            features = Features(hidden, tokens, positions, slots, sets)
            self.optional.run("drafting", None, self.drafter.observe, features)
