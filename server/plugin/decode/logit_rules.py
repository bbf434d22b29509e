"""A request's own rules for its logits (penalties, grammar, bias), applied to every row of a ragged verify.

SGLang applies them for one row per request; with speculation row k must also count the drafted tokens x_1 .. x_k,
or the verified distribution is not the one that plain decoding would sample from.
Order and arithmetic follow SGLang's `SamplingBatchInfo.apply_logits_bias` and its penalizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outrider.drafters.slot_tokens import SlotTokens

if TYPE_CHECKING:
    from ..spec_inputs import FlatVerify


@dataclass(frozen=True, slots=True)
class RowContext:
    """The place of each logits row: B rows of R requests.

    request: [B] int64. step: [B] int64, how many drafted tokens precede the row's prediction.
    block: [R, 1 + gamma] int64, the anchor and the drafted tokens; after a prefill only the last prompt token.
    output_tokens: request index -> 1-D int64 tensor of the tokens generated so far, the anchor included.
    """

    request: torch.Tensor
    step: torch.Tensor
    block: torch.Tensor
    output_tokens: Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of running batches.

    history: the tokens in the cache, by slot. page_table: [requests, context] int, the slots of each row's positions.
    """

    history: SlotTokens
    page_table: torch.Tensor

    def prefilled(self, batch: Any, logits: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Apply the rules to logits [R, V] after a prefill, in place. Returns whose they are, [R] int64."""
        request = torch.arange(len(batch.reqs), device=logits.device)
        slots = self.page_table[batch.req_pool_indices.long(), seq_lens - 1].long()
        context = RowContext(
            request=request,
            step=torch.zeros_like(request),
            block=self.history.tokens[slots].long()[:, None],
            output_tokens=lambda index: self._output_tokens(batch, index, seq_lens),
        )
        apply_rules(logits, batch.reqs, batch.sampling_info, context)
        return request

    def verified(
        self,
        batch: Any,
        logits_output: Any,
        flat: FlatVerify,
        anchors: torch.Tensor,
        draft_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        exact: bool,
        barrier: Callable[[], None] | None,
    ) -> torch.Tensor:
        """Logits [B, V] of a verification after the rules; they become those of `logits_output`.

        exact: they are wanted in float32, also where nothing changes them.
        """
        ruled = has_rules(batch.reqs, batch.sampling_info)
        if ruled or exact:
            logits_output.next_token_logits = logits_output.next_token_logits.float()
        logits: torch.Tensor = logits_output.next_token_logits
        if ruled:
            verified = None if logits.is_cpu else int(flat.qo_indptr[-1])  # padding has no rules
            context = RowContext(
                request=flat.request[:verified],
                step=flat.step[:verified],
                block=torch.cat([anchors[:, None], draft_tokens], 1),
                output_tokens=lambda index: torch.cat(
                    [self._output_tokens(batch, index, seq_lens), anchors[index, None]]
                ),
            )
            apply_rules(logits[:verified], batch.reqs, batch.sampling_info, context, barrier)
        return logits

    def _output_tokens(self, batch: Any, index: int, seq_lens: torch.Tensor) -> torch.Tensor:
        """Tokens that request `index` has generated, read back from the cache."""
        start, end = len(batch.reqs[index].origin_input_ids), int(seq_lens[index])
        return self.history.tokens[self.page_table[batch.req_pool_indices[index], start:end].long()].long()


def has_rules(reqs: Sequence[Any], sampling_info: Any) -> bool:
    """True if `apply_rules` would change anything."""
    return (
        sampling_info.acc_additive_penalties is not None  # some request of the batch has a penalty
        or sampling_info.logit_bias is not None
        or any(req.grammar is not None for req in reqs)
    )


def apply_rules(
    logits: torch.Tensor, reqs: Sequence[Any], sampling_info: Any, context: RowContext, barrier: Any = None
) -> None:
    """Change logits [B, V] in place to what each request's rules make of them, before temperature."""
    if sampling_info.acc_additive_penalties is not None:
        for index, req in enumerate(reqs):
            if _is_penalized(req.sampling_params):
                _penalize(logits, req, index, context)
    if any(req.grammar is not None for req in reqs):
        _apply_grammar(logits, reqs, sampling_info, context, barrier)
    if sampling_info.logit_bias is not None:
        logits.add_(sampling_info.logit_bias[context.request])


def changes_logits(params: Any) -> bool:
    """Tell whether a request has rules of its own, by which its drafts are accepted differently: penalties, a bias, a
    grammar. params: its sampling parameters."""
    grammars = params.json_schema, params.regex, params.ebnf, params.structural_tag
    return _is_penalized(params) or bool(params.logit_bias) or any(grammar is not None for grammar in grammars)


def _is_penalized(params: Any) -> bool:
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _penalize(logits: torch.Tensor, req: Any, index: int, context: RowContext) -> None:
    params = req.sampling_params
    rows = (context.request == index).nonzero().squeeze(1)
    output = context.output_tokens(index)
    base = torch.bincount(output, minlength=logits.shape[1])[: logits.shape[1]]
    counts = base.to(torch.float32).expand(rows.numel(), -1).clone()
    for k in range(1, rows.numel()):  # row k and all after it have seen x_k
        counts[k:, context.block[index, k]] += 1.0
    seen = counts > 0
    part = logits[rows]
    if params.min_new_tokens > 0:
        too_short = output.numel() + context.step[rows] < params.min_new_tokens
        stops = torch.tensor(sorted(_stop_tokens(req)), dtype=torch.int64, device=logits.device)
        part[:, stops] = part[:, stops].masked_fill(too_short[:, None], float("-inf"))
    part -= counts * params.frequency_penalty + seen * params.presence_penalty
    if params.repetition_penalty != 1.0:
        scaled = torch.where(part < 0, part * params.repetition_penalty, part / params.repetition_penalty)
        part = torch.where(seen, scaled, part)
    logits[rows] = part


def _stop_tokens(req: Any) -> set[int]:
    tokenizer = req.tokenizer
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    stops |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
    return {t for t in stops | {tokenizer.eos_token_id} if t is not None}


def _apply_grammar(
    logits: torch.Tensor, reqs: Sequence[Any], sampling_info: Any, context: RowContext, barrier: Any
) -> None:
    """Mask what each request's grammar forbids; the rows after a draft the grammar rejects are never reached."""
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

    width = context.block.shape[1]
    verify_lens = torch.bincount(context.request, minlength=len(reqs)) - 1
    child = torch.arange(1, width + 1).expand(len(reqs), -1)
    child = torch.where(child <= verify_lens.cpu()[:, None], child, -1)
    tree = GrammarTree.from_host(child, torch.full_like(child, -1), context.block.cpu())
    mask = build_grammar_vocab_mask(
        reqs=reqs, tree=tree, sampling_info=sampling_info, device=logits.device, barrier=barrier
    )
    if mask is not None:
        rows = context.request * width + context.step
        GrammarMask(mask.grammar, mask.vocab_mask[rows].contiguous()).apply(logits)
