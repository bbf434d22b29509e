"""The target's distribution after a request's sampling rules, and its tokens.

The rules follow SGLang's torch sampler (`top_k_top_p_min_p_sampling_from_probs_torch`): softmax at the request's
temperature; on the falling probabilities keep rank < top_k, keep while the mass before a token is at most top_p (of the
unfiltered distribution), drop tokens below min_p times the largest; renormalise. Among equal probabilities the lower
token ranks first. Speculation needs the whole vector, not only a sample: acceptance divides by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .cpu import native
from .cuda import native as cuda
from .noise import gumbel_argmax


class Rules(NamedTuple):
    """Sampling rules of N rows; None: off for every row.

    temperatures: [N] float32; 0 means greedy and yields all mass on the argmax.
    top_ks: [N] integers >= 1; V or more (SGLang writes 2**30): off. top_ps: [N], 1: off. min_ps: [N], 0: off.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor | None = None
    top_ps: torch.Tensor | None = None
    min_ps: torch.Tensor | None = None

    def of(self, rows: torch.Tensor) -> Rules:
        """Return the rules of `rows` [M]."""
        rest = (None if rule is None else rule[rows] for rule in self[1:])
        return Rules(self.temperatures[rows], *rest)

    def typed(self) -> Rules:
        """Return the rules in the types of the kernels."""
        types = (torch.int64, torch.float32, torch.float32)
        rest = (None if rule is None else rule.to(t).contiguous() for rule, t in zip(self[1:], types, strict=True))
        return Rules(self.temperatures.to(torch.float32).contiguous(), *rest)


def target_probs(logits: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Return the probabilities of the next token after the requests' own sampling rules: [B, V] float32, each row sums
    to 1 up to rounding; an excluded token has exactly 0.

    logits: [B, V], penalties, biases and grammar masks (-inf) already applied. rules: B of each. Raises ValueError for
        other shapes.
    """
    _check_rules(logits, rules)
    if logits.stride(1) == 1 and native.fits(logits):
        return torch.ops.outrider.target_probs(logits, *rules.typed())
    return torch_target_probs(logits, rules)


def torch_target_probs(logits: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Do `target_probs` without compiled kernels, on any device without waiting for it. Every rule keeps a prefix of
    the stable ranking, so one sort serves all rows."""
    temperatures, top_ks, top_ps, min_ps = rules
    greedy = temperatures <= 0
    probs = torch.softmax(logits.float() / temperatures.masked_fill(greedy, 1.0)[:, None], dim=-1)
    if not (top_ks is None and top_ps is None and min_ps is None):
        ranked, tokens = probs.sort(dim=-1, descending=True, stable=True)
        keep, cut = torch.ones_like(ranked, dtype=torch.bool), torch.zeros_like(greedy)
        if top_ks is not None:
            keep &= torch.arange(ranked.shape[1], device=ranked.device) < top_ks[:, None]
            cut |= top_ks < logits.shape[1]
        if top_ps is not None:
            keep &= (ranked.cumsum(-1) - ranked) <= top_ps.where(top_ps < 1, torch.inf)[:, None]
            cut |= top_ps < 1
        if min_ps is not None:
            keep &= ranked >= ranked[:, :1] * min_ps[:, None]
            cut |= min_ps > 0
        kept = torch.zeros_like(ranked).scatter(1, tokens, ranked * keep)
        probs = torch.where(cut[:, None], kept / kept.sum(-1, keepdim=True), probs)
    best = torch.zeros_like(probs).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], best, probs)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return [B] int64, the best token of each row of [B, V]; the first among equals."""
    if logits.stride(1) == 1 and native.fits(logits):
        return torch.ops.outrider.argmax(logits)
    return logits.argmax(-1)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest of each row of logits [..., V], falling, float32 [..., count], and their columns."""
    if native.fits(logits) and not logits.requires_grad:
        values, columns = torch.ops.outrider.likeliest(logits.reshape(-1, logits.shape[-1]).contiguous(), count)
        return values.view(*logits.shape[:-1], count), columns.view(*logits.shape[:-1], count)
    values, columns = logits.float().topk(count, -1)
    return values, columns


def draw_tokens(logits: torch.Tensor, rows: torch.Tensor, rules: Rules, keys: torch.Tensor) -> torch.Tensor:
    """Return [N] int64, the token drawn from `target_probs` in each of the `rows` [N] of logits [B, V]. rules, keys: N
    of each; see `gumbel_argmax`. At temperature 0 it is the best token, whatever the key."""
    if logits.stride(1) == 1 and native.fits(logits):
        return torch.ops.outrider.draw_tokens(logits, rows, *rules.typed(), keys.contiguous())
    if cuda.fits(logits):
        return _draw_on_cuda(logits.index_select(0, rows), rules, keys)
    return gumbel_argmax(target_probs(logits[rows], rules), keys)


def _draw_on_cuda(logits: torch.Tensor, rules: Rules, keys: torch.Tensor) -> torch.Tensor:
    """Draw each row's token by verifying it without a draft."""
    none, each = keys.new_empty(len(keys), 0), torch.arange(len(keys) + 1, device=keys.device)
    lens, request, decided = torch.zeros_like(keys), each.narrow(0, 0, len(keys)), rules.temperatures <= 0
    arrays = none, lens, each, request, logits, *rules.typed(), none.double(), keys.contiguous(), None, decided
    return cuda.acceptance.accept(*arrays, None, None, None, False)[1].squeeze(1)


def _check_rules(logits: torch.Tensor, rules: Rules) -> None:
    if logits.dim() != 2:
        raise ValueError(f"expected logits [B, V], got shape {tuple(logits.shape)}")
    for rule in rules:
        if rule is not None and rule.shape != logits.shape[:1]:
            raise ValueError(f"expected one value per row of logits ({logits.shape[0]}), got {tuple(rule.shape)}")
