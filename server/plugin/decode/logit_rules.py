"""A request's own rules for its logits (penalties, grammar, bias), applied to every row of a ragged verify.

SGLang applies them for one row per request; with speculation row k must also count the drafted tokens x_1 .. x_k,
or the verified distribution is not the one that plain decoding would sample from.
Order and arithmetic follow SGLang's `SamplingBatchInfo.apply_logits_bias` and its penalizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.drafters.slot_tokens import SlotTokens
from outrider.kernels.ragged import FlatVerify
from outrider.kernels.upload import upload

from ..grammars.masks import apply_masks, fill_masks

TOGETHER = 8
"""Requests with penalties that are processed at once: each takes a few copies of gamma + 1 float32 rows."""


@dataclass(frozen=True, slots=True)
class RowContext:
    """The place of each of B logits rows among R requests; the first rows of each request are read.

    request: [B] int64. step: [B] int64, how many drafted tokens precede the row's prediction.
    block: [R, 1 + gamma] int64, the anchor and the drafted tokens; after a prefill only the last prompt token.
    begins: [R] int64, each request's first row. verify_lens: [R] int64, rows after the first.
    outputs: maps places [P] of requests, on the host, to the tokens [P, W] int64 that each has generated so far, anchor
        included, and their mask [P, W] bool.
    """

    request: torch.Tensor
    step: torch.Tensor
    block: torch.Tensor
    begins: torch.Tensor
    verify_lens: torch.Tensor
    outputs: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of running batches.

    history: the tokens in the cache, by slot. page_table: [requests, context] int, the slots of each row's positions.
    """

    history: SlotTokens
    page_table: torch.Tensor

    def prefilled(self, batch: Any, logits: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Apply the rules to logits [R, V] after a prefill, in place."""
        if not has_rules(batch.reqs, batch.sampling_info):
            return
        request = torch.arange(len(batch.reqs), device=logits.device)
        slots = self.page_table[batch.req_pool_indices.long(), seq_lens - 1].long()
        longest = max(map(sum, zip(batch.prefix_lens, batch.extend_lens, strict=True)))
        nothing = torch.zeros_like(request)
        context = RowContext(
            request, nothing, self.history.tokens[slots].long()[:, None], request, nothing,
            lambda places: self._outputs(batch, places, seq_lens, None, longest),
        )  # fmt: skip
        apply_rules(logits, batch.reqs, batch.sampling_info, context)

    def verified(
        self, batch: Any, logits_output: Any, flat: FlatVerify, anchors: torch.Tensor, draft: torch.Tensor,
        seq_lens: torch.Tensor, *, longest: int, exact: bool, barrier: Callable[[], None] | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return logits [B, V] of a verification after the rules, which `logits_output` then has, too.

        draft: [R, gamma] int64, the drafted tokens. longest: the host's upper bound of seq_lens. exact: return
        float32 logits even if nothing is added to them; otherwise only the largest of each row is needed.
        """
        ruled = has_rules(batch.reqs, batch.sampling_info)
        masks_alone = logits_output.next_token_logits.is_cpu and not adds_to_logits(batch.sampling_info)
        if exact or (ruled and not masks_alone):
            logits_output.next_token_logits = logits_output.next_token_logits.float()
        logits: torch.Tensor = logits_output.next_token_logits
        if ruled:
            context = RowContext(
                flat.request, flat.step, torch.cat([anchors[:, None], draft], 1), flat.qo_indptr[:-1].long(),
                flat.qo_indptr.diff().long() - 1,
                lambda places: self._outputs(batch, places, seq_lens, anchors, longest),
            )  # fmt: skip
            apply_rules(logits, batch.reqs, batch.sampling_info, context, barrier)
        return logits

    def _outputs(
        self, batch: Any, places: np.ndarray, seq_lens: torch.Tensor, anchors: torch.Tensor | None, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read `RowContext.outputs` back from the cache. anchors: [R], the tokens after the cached ones."""
        device = seq_lens.device
        lengths = np.array([len(batch.reqs[place].origin_input_ids) for place in places], dtype=np.int64)
        width = 1 << max(longest - int(lengths.min()), 0).bit_length()  # of few sizes, and at least one more
        index, starts = upload(places, device), upload(lengths, device)
        ends, last = seq_lens[index], self.page_table.shape[1] - 1
        positions = starts[:, None] + torch.arange(width, device=device)
        rows = batch.req_pool_indices[index].long()
        tokens = self.history.tokens[self.page_table[rows[:, None], positions.clamp(max=last)].long()].long()
        if anchors is None:
            return tokens, positions < ends[:, None]
        tokens = torch.where(positions == ends[:, None], anchors[index][:, None], tokens)
        return tokens, positions <= ends[:, None]


def has_rules(reqs: Sequence[Any], sampling_info: Any) -> bool:
    """Return True if `apply_rules` would change anything."""
    return adds_to_logits(sampling_info) or any(req.grammar is not None for req in reqs)


def adds_to_logits(sampling_info: Any) -> bool:
    """Return True if some request of the batch has a penalty or a bias."""
    return sampling_info.acc_additive_penalties is not None or sampling_info.logit_bias is not None


def apply_rules(
    logits: torch.Tensor, reqs: Sequence[Any], sampling_info: Any, context: RowContext, barrier: Any = None
) -> None:
    """Apply each request's rules to logits [B, V] in place, before temperature."""
    if sampling_info.acc_additive_penalties is not None:
        places = np.array([place for place, req in enumerate(reqs) if _is_penalized(req.sampling_params)])
        for some in np.array_split(places, range(TOGETHER, len(places), TOGETHER)) if len(places) else ():
            _penalize(logits, [reqs[place] for place in some], some, context)
    if any(req.grammar is not None for req in reqs):
        _apply_grammar(logits, reqs, sampling_info, context, barrier)
    if sampling_info.logit_bias is not None:
        logits.add_(sampling_info.logit_bias[context.request])


def changes_logits(params: Any) -> bool:
    """Return True if a request has penalties, a bias or a grammar, which change the acceptance of its drafts. params:
    its sampling parameters."""
    grammars = params.json_schema, params.regex, params.ebnf, params.structural_tag
    return _is_penalized(params) or bool(params.logit_bias) or any(grammar is not None for grammar in grammars)


def _is_penalized(params: Any) -> bool:
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _penalize(logits: torch.Tensor, reqs: Sequence[Any], places: np.ndarray, context: RowContext) -> None:
    """Apply the penalties of the requests at `places` [P], on the device of the logits and without waiting for it.

    Every request has gamma + 1 rows here; unverified rows repeat its last one.
    """
    device, width, gamma = logits.device, logits.shape[1], context.block.shape[1] - 1
    index = upload(places, device)
    steps = torch.minimum(torch.arange(gamma + 1, device=device), context.verify_lens[index][:, None])
    rows, block = context.begins[index][:, None] + steps, context.block[index]
    tokens, there = context.outputs(places)
    before = torch.zeros(len(reqs), width, device=device).scatter_add_(1, tokens.where(there, 0), there.float())
    counts = before[:, None].repeat(1, gamma + 1, 1)
    for k in range(1, gamma + 1):  # row k and all after it have seen x_k
        seen = (steps[:, k:, None] >= k).float()
        counts[:, k:].scatter_add_(2, block[:, k, None, None].where(seen > 0, 0), seen)
    part, seen = logits[rows], counts > 0
    frequency, presence, repetition, least = (
        upload(np.array([getattr(req.sampling_params, name) for req in reqs], dtype=np.float32), device)[:, None, None]
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
    )
    if any(req.sampling_params.min_new_tokens > 0 for req in reqs):
        too_short = (there.sum(1)[:, None] + steps)[:, :, None] < least
        stops = [sorted(stop_tokens(req)) for req in reqs]
        named = upload(np.array([bool(each) for each in stops]), device)[:, None, None]
        stops = [each or [0] for each in stops]
        most = max(map(len, stops))
        columns = upload(np.array([each + each[:1] * (most - len(each)) for each in stops], dtype=np.int64), device)
        columns = columns[:, None].expand(-1, gamma + 1, -1)
        part.scatter_(2, columns, part.gather(2, columns).masked_fill(too_short & named, float("-inf")))
    part -= counts * frequency + seen * presence
    scaled = torch.where(part < 0, part * repetition, part / repetition)
    logits[rows] = torch.where(seen & (repetition != 1), scaled, part)


def stop_tokens(req: Any) -> set[int]:
    """Return the tokens that end an SGLang request's answer; none if it ignores them."""
    stops = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if (tokenizer := req.tokenizer) is not None:
        stops |= {tokenizer.eos_token_id, *(getattr(tokenizer, "additional_stop_token_ids", None) or ())}
    return stops - {None}


def _apply_grammar(
    logits: torch.Tensor, reqs: Sequence[Any], sampling_info: Any, context: RowContext, barrier: Any
) -> None:
    """Mask tokens that each request's grammar forbids. Rows after a draft token that it rejects are never reached."""
    if barrier is not None:
        barrier()
    sampling_info.grammar_mask = None  # SGLang's, of the prefill
    grammar = next(req.grammar for req in reqs if req.grammar is not None)
    masks, row = grammar.allocate_vocab_mask(sampling_info.vocab_size, len(logits), "cpu"), 0
    for req, draft, length in zip(reqs, context.block[:, 1:].tolist(), context.verify_lens.tolist(), strict=True):
        if req.grammar is not None:
            fill_masks(req.grammar, draft[:length], masks, row)
        row += length + 1
    apply_masks(grammar, masks, logits)
