"""Batches of a decode step by SGLang's own sampling, without the pools."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import xgrammar
from planning import request
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from outrider.server.plugin.grammars.backend import BoundedGrammar
from outrider.server.plugin.grammars.forced import ForcedText
from outrider.server.plugin.grammars.spelling import Spelling
from outrider.server.plugin.spec_inputs import StepState

VOCABULARY = 96
GREEDY, SAMPLED, SEEDED = {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "sampling_seed": 3}
FILTERED = SAMPLED | {"top_k": 20, "top_p": 0.9, "min_p": 0.1}
BATCHES = {
    "greedy": [GREEDY] * 3, "sampled": [SAMPLED] * 3, "filtered": [FILTERED] * 3, "seeded": [SEEDED] * 3,
    "mixed": [GREEDY, FILTERED, SEEDED],
    "penalized": [SAMPLED | {"frequency_penalty": 0.5}, GREEDY | {"min_new_tokens": 9}, SEEDED],
}  # fmt: skip
"""Kinds of batches; more requests repeat them."""


@dataclass(eq=False)
class Scheduled:
    reqs: list[Any]
    device: torch.device


def batch_of(kind: str, lengths: list[int], rows: torch.Tensor, device: torch.device) -> Any:
    """lengths: cached tokens, as known to the host."""
    kinds = (BATCHES[kind] * len(lengths))[: len(lengths)]
    reqs = []
    for one, length in zip(kinds, lengths, strict=True):
        req = request()
        req.kv, req.grammar = SimpleNamespace(kv_committed_len=length), None
        req.tokenizer = SimpleNamespace(eos_token_id=5, additional_stop_token_ids=None)
        req.sampling_params = SamplingParams(**one)
        req.sampling_params.normalize(req.tokenizer)
        req.return_sampling_mask, req.custom_logit_processor = False, None
        reqs.append(req)
    info = SamplingBatchInfo.from_schedule_batch(Scheduled(reqs, device), VOCABULARY)
    info.update_penalties()
    ids = torch.zeros(len(reqs), dtype=torch.int64, device=device)
    return SimpleNamespace(
        reqs=reqs, req_pool_indices=ids, req_pool_indices_cpu=rows, seq_lens=ids, seq_lens_cpu=None,
        spec_info=StepState(ids, ids), sampling_info=info, return_logprob=False, return_hidden_states=False,
    )  # fmt: skip


def grammar() -> BoundedGrammar:
    """A grammar that forces a text and has read its first token."""
    words = [chr(32 + number) for number in range(VOCABULARY - 1)]
    info = xgrammar.TokenizerInfo([*words, "<end>"], stop_token_ids=[VOCABULARY - 1])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_regex("forced text")
    spelling = Spelling(lambda text: [ord(char) - 32 for char in text], [word.encode() for word in words])
    plain = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), VOCABULARY, compiled, None, "", None)
    made = BoundedGrammar(plain, ForcedText(spelling), unlimited=True)
    made.accept_token(ord("f") - 32)
    return made
