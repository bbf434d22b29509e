"""The worker of every rank as SGLang sees it: memory, attention backends, a call for every batch, and its result."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from outrider.drafters.base import Drafter

from ..attention_backends import check_taken
from ..config import PluginConfig
from ..cpu.free_memory import give_back_free_memory
from ..slot_pool import SlotPool
from ..spec_inputs import StepState
from . import warm_up
from .accept import Accepted
from .boundary import Boundary
from .flatten import StepBatch
from .logprobs import write_logprobs, write_step_logprobs
from .ranks import Ranks
from .verify import VerifyStage

Publish = Callable[[torch.Tensor], None] | None
"""SGLang's: takes the cached tokens [R] of the requests after a step, before the step's result."""


class HostResult(GenerationBatchResult):
    """A result already on the CPU; skips SGLang's check of its device."""

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        self.copy_done.record()


class TargetWorker(BaseSpecWorker):
    """The worker of a rank. width: gamma + 1, tokens that SGLang reserves per step."""

    drafter: Drafter | None = None
    optional: Boundary
    _set_up: Callable[[Any, int], None]
    """Creates the parts of a rank for SGLang's model runner of the target and a number of KV slots."""
    _prefill: Callable[[Any, Publish], GenerationBatchResult]
    _decode: Callable[[Any, Publish, Callable[[], None] | None], GenerationBatchResult]

    def __init__(self, server_args: Any, target_worker: Any, **_: Any):
        super().__init__()
        self._target_worker, self.server_args = target_worker, server_args
        self.config = PluginConfig.from_env()
        self.width = self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens

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
        self.page_table = self.req_to_token_pool.req_to_token
        self.device = runner.device
        self.ranks = Ranks(get_parallel().tp_group, self.device)
        self.verify = VerifyStage(self._target_worker, self.width)
        self._set_up(runner, runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size)  # with the padding page
        if torch.device(self.device).type == "cpu":
            give_back_free_memory()

    def init_attention_backends(self) -> None:
        check_taken(self._target_worker.model_runner)

    def init_cuda_graphs(self) -> None:
        """Capture drafts and compile kernels. SGLang calls this after capturing the target's graphs."""
        runner, table = self._target_worker.model_runner, self.page_table
        self._capture_drafts()
        if not table.is_cpu:
            shape = self.req_to_token_pool.size, table, runner.model_config.vocab_size, self.width - 1
            warm_up.run_all(*shape, self.drafter, by_block=self.config.by_block)

    def _capture_drafts(self) -> None:
        """Capture graphs of drafts, on the rank that drafts."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish = None, grammar_barrier: Callable[[], None] | None = None, **_: Any
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefilled(
        self, scheduled: Any, result: GenerationBatchResult, tokens: torch.Tensor, on_publish: Publish
    ) -> GenerationBatchResult:
        """Complete a prefill's result with the first tokens [R] of answers, drawn from its logits."""
        output, seq_lens = result.logits_output, scheduled.seq_lens
        if scheduled.return_logprob and not scheduled.is_prefill_only:
            write_logprobs(output, scheduled, output.next_token_logits, tokens)
        if on_publish is not None:
            on_publish(seq_lens)
        result.next_token_ids, result.new_seq_lens = tokens, seq_lens
        result.next_draft_input = StepState(tokens, seq_lens)
        result.speculative_num_draft_tokens = self.width
        return result

    def _decoded(
        self, batch: StepBatch, verified: GenerationBatchResult, accepted: Accepted, on_publish: Publish
    ) -> GenerationBatchResult:
        """Return a decode step's result, from that of its verification."""
        if on_publish is not None:
            on_publish(accepted.seq_lens)
        if batch.scheduled.return_logprob:
            write_step_logprobs(verified.logits_output, batch.scheduled, batch.flat, accepted.tokens)
        batch.scheduled.forward_mode = ForwardMode.DECODE
        result = (HostResult if accepted.tokens.is_cpu else GenerationBatchResult)(
            logits_output=verified.logits_output, next_token_ids=accepted.tokens.flatten(), accept_lens=accepted.lens,
            new_seq_lens=accepted.seq_lens, can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=StepState(accepted.anchors, accepted.seq_lens), speculative_num_draft_tokens=self.width,
        )  # fmt: skip
        result.cap_lens = verified.cap_lens
        return result
