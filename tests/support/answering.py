"""Passes one request's tokens through SGLang's result processing, output streamer and detokenizer, without its
processes."""

import pkgutil
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import BatchTokenIDOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from outrider.server.model import target

PROMPT = "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n"
WIDTH = 17
"""Most tokens of a step: 16 accepted drafts and one of the target's."""
THINK_END = [29]  # ">" ends a thought in these tests
THINK_START = [198, 42]
"""Tokens that begin a thought which the request does not allow."""
TOP = [torch.tensor([place, place + 1]) for place in range(WIDTH)]
SPECULATIVE = SimpleNamespace(is_none=lambda: False)
IDLE = SimpleNamespace(free_group_begin=lambda: None, free_group_end=lambda: None)


@dataclass(eq=True)
class Answer:
    """A client's final answer. streamed: put together from chunks; a whole answer has one chunk."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted: int = 0
    accepted_by_step: int = 0
    logprobs: list[float] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@cache
def tokenizer() -> Any:
    return get_tokenizer(target.plain_folder(None))


@cache
def vocabulary() -> int:
    return len(tokenizer())


@cache
def configure() -> None:
    arguments = ServerArgs(model_path=target.plain_folder(None), device="cpu")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0))


class Answering:
    """A request and the parts that process its tokens. params: SGLang's sampling parameters."""

    def __init__(self, *, stream: bool, reasoning: bool = False, **params: Any):
        configure()
        self.answer = Answer()
        sampling = SamplingParams(**{"max_new_tokens": 1000} | params)
        sampling.normalize(tokenizer())
        prompt = array("q", tokenizer().encode(PROMPT))
        self.request = Req(
            "request", PROMPT, prompt, sampling, return_logprob=True, top_logprobs_num=2, stream=stream,
            eos_token_ids={tokenizer().eos_token_id}, vocab_size=vocabulary(), require_reasoning=reasoning,
        )  # fmt: skip
        self.request.tokenizer = tokenizer()
        self.streamer = SchedulerOutputStreamer(
            send_to_detokenizer=SimpleNamespace(send_output=self._detokenize), tree_cache=None, server_args=None,
            is_generation=True, spec_algorithm=SPECULATIVE, disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )  # fmt: skip
        self.detokenizer = object.__new__(DetokenizerManager)
        self.detokenizer.tokenizer, self.detokenizer.vocab_size = tokenizer(), vocabulary()
        self.detokenizer.decode_status, self.detokenizer.disable_tokenizer_batch_decode = {}, False
        self.detokenizer.is_tool_call_parser_gpt_oss, self.detokenizer.tool_close_token_ids = False, frozenset()
        self.processor = object.__new__(SchedulerBatchResultProcessor)
        for name, value in {
            "is_generation": True,
            "enable_overlap": False,
            "enable_overlap_mlx": False,
            "token_to_kv_pool_allocator": IDLE,
            "tree_cache": SimpleNamespace(supports_mamba=lambda: False),
            "metrics_reporter": SimpleNamespace(
                num_generated_tokens=0, forward_ct_decode=0,
                update_spec_metrics=lambda *_, **__: None, report_decode_stats=lambda *_, **__: None,
                snapshot_spec_decode_metrics=lambda *_, **__: None,
            ),
            "model_worker": SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
            "draft_worker": None,
            "model_config": SimpleNamespace(think_end_ids=THINK_END, self_opened_think_start_ids=THINK_START),
            "output_streamer": self.streamer,
        }.items():  # fmt: skip
            object.__setattr__(self.processor, name, value)

    def step(self, run: Sequence[int]) -> None:
        """Process a decode step with the tokens of `run`, 1 to WIDTH."""
        tokens = torch.tensor([*run, *[0] * (WIDTH - len(run))])
        places = torch.arange(WIDTH, dtype=torch.float32) + len(self.request.output_ids)
        logits_output = SimpleNamespace(
            next_token_logprobs=-places[None],
            next_token_top_logprobs_val=list(torch.stack([-places, -places - 1], 1)),
            next_token_top_logprobs_idx=TOP,
            next_token_token_ids_logprobs_val=None,
            hidden_states=None, customized_info=None, sampling_mask_output=None,
        )  # fmt: skip
        result = GenerationBatchResult(
            logits_output=logits_output, next_token_ids=tokens, accept_lens=torch.tensor([len(run)], dtype=torch.int32),
            can_run_cuda_graph=False, speculative_num_draft_tokens=WIDTH,
        )  # fmt: skip
        batch = SimpleNamespace(
            reqs=[self.request], return_logprob=True, spec_algorithm=SPECULATIVE, forward_mode=ForwardMode.DECODE,
            has_grammar=self.request.grammar is not None, batch_size=lambda: 1, mamba_track_mask_cpu=None,
        )  # fmt: skip
        self.processor.process_batch_result_decode(batch, result)

    def _detokenize(self, payload: BatchTokenIDOutput, *_: Any) -> None:
        (text,) = self.detokenizer._decode_batch_token_id_output(payload)
        answer = self.answer
        answer.text += text
        answer.ids += payload.output_ids[0]
        answer.finish = payload.finished_reasons[0]
        answer.completion_tokens = payload.completion_tokens[0]
        answer.reasoning_tokens = payload.reasoning_tokens[0]
        answer.accepted = payload.spec_num_correct_drafts[0]
        answer.accepted_by_step = sum(n * steps for n, steps in enumerate(payload.spec_correct_drafts_histogram[0]))
        answer.logprobs += payload.output_token_logprobs_val[0]
        answer.logprob_ids += payload.output_token_logprobs_idx[0]
        answer.top_logprobs += payload.output_top_logprobs_val[0]


def answer(runs: Sequence[Sequence[int]], **request: Any) -> Answer:
    """The answer to tokens that come in `runs`; if none of them ends it, its length does."""
    length = min(sum(map(len, runs)), request.get("max_new_tokens", 1000))
    answering = Answering(**request | {"max_new_tokens": length})
    for run in runs:
        answering.step(run)
        if answering.request.finished():
            return answering.answer
    raise AssertionError("an answer that does not end")


def keep_nothing(monkeypatch: Any) -> None:
    """Replace the release of the KV cache, which does not exist here."""
    monkeypatch.setattr(batch_result_processor, "release_kv_cache", lambda *_, **__: None)


@contextmanager
def hooked(register: Callable[[], None], but: str | None = None) -> Iterator[None]:
    """SGLang with only the hooks of `register`, except the hook of method `but`."""
    hooks = [hook for hook in _hooks(register) if hook[1] != but]
    for owner, name, _, wrapped in hooks:
        setattr(owner, name, wrapped)
    try:
        yield
    finally:
        for owner, name, original, _ in hooks:
            setattr(owner, name, original)


@cache
def _hooks(register: Callable[[], None]) -> list[tuple[Any, str, Any, Any]]:
    """Class, name, original and wrapped method of each hook, all of which are removed afterwards."""
    kept = HookRegistry._hooks, HookRegistry._patched
    HookRegistry._hooks, HookRegistry._patched = defaultdict(list), set()
    try:
        register()
        owners = [(pkgutil.resolve_name(path), name) for path, name in (t.rsplit(".", 1) for t in HookRegistry._hooks)]
        originals = [owner.__dict__[name] for owner, name in owners]
        HookRegistry.apply_hooks()
        assert len(HookRegistry._patched) == len(owners)  # SGLang only logs what it cannot hook
    finally:
        HookRegistry._hooks, HookRegistry._patched = kept
    hooks = []
    for (owner, name), original in zip(owners, originals, strict=True):
        hooks.append((owner, name, original, owner.__dict__[name]))
        setattr(owner, name, original)
    return hooks
