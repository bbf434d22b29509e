"""Rejection sampling over a flattened verify batch: the step that makes speculation lossless.

Request r has verified `verify_lens[r]` draft tokens; row `qo_indptr[r] + k` of the target's output is its
distribution p for the token after x_k (x_0 is the anchor). Left to right, x_{k+1} is kept with probability
min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(0, p - q), renormalised; if all are
kept, a bonus token is drawn from p (Leviathan et al., 2023, algorithm 1). Whatever q is, what comes out is
distributed as p. A request whose tokens are decided keeps a token if and only if it is the one wanted: the argmax for
a greedy request, what its seed draws from p for a seeded one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .cpu import native
from .cuda import native as cuda
from .noise import gumbel_argmax, torch_gumbel_argmax
from .sampling import Rules, target_probs


class Verification(NamedTuple):
    """A verify batch of R requests: drafts, the target's say, and random numbers.

    Parameters
    ----------
    tokens : [R, gamma] int64, drafted tokens x_1 .. x_gamma in the target's vocabulary.
    verify_lens : [R] in 0 .. gamma, how many of them were verified; the others are not read.
    qo_indptr : [R + 1], request r owns target rows `qo_indptr[r]:qo_indptr[r + 1]`, `verify_lens[r] + 1` of them.
    uniforms : [R, gamma] float64 in (0, 1), one per acceptance test; required with `probs`.
    final_keys : [R] int64, of the noise that draws the replacement or bonus token; independent of `uniforms`; required
        with `probs`.
    wanted : [B] int64, the token after each row of decided requests; required if there are any.
    probs : [B, V] float32, p after the request's sampling rules; read for the others, required if there are any.
    decided : [R] bool; None: all if `probs` is None, otherwise none.
    draft_probs : [R, gamma, V'], q, exactly what each token was drawn from; not read for decided requests. None: a
        point mass on the drafted token.
    vocab : [V'] int64, strictly increasing, the target's token of each column of q; None: V' = V. Others have q = 0.
    """

    tokens: torch.Tensor
    verify_lens: torch.Tensor
    qo_indptr: torch.Tensor
    uniforms: torch.Tensor | None = None
    final_keys: torch.Tensor | None = None
    wanted: torch.Tensor | None = None
    probs: torch.Tensor | None = None
    decided: torch.Tensor | None = None
    draft_probs: torch.Tensor | None = None
    vocab: torch.Tensor | None = None


def accept(batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide which draft tokens stay and what follows them.

    Returns
    -------
    accept_lens : [R] int64 in 1 .. gamma + 1, tokens that come out, the final one included.
    out : [R, gamma + 1] int64, the tokens; 0 at and beyond `accept_lens`.

    Raises ValueError where shapes do not fit or something required is missing.
    """
    tokens, verify_lens, qo_indptr, uniforms, _, wanted, probs, decided, draft_probs, vocab = batch
    if probs is None and decided is None and wanted is not None and wanted.is_cpu and native.available():
        return torch.ops.outrider.accept_wanted(tokens, verify_lens.long(), qo_indptr.long(), wanted)
    decided = _decided(batch)
    _check(batch, None if probs is None else probs.shape[1])
    gamma = tokens.shape[1]
    steps = torch.arange(gamma, device=tokens.device)
    first_row = qo_indptr[:-1].long()
    verified = steps < verify_lens[:, None]
    rows, tokens = first_row[:, None] + steps.where(verified, 0), tokens.where(verified, 0)
    keep = torch.zeros_like(tokens, dtype=torch.bool)
    if wanted is not None:
        keep = wanted[rows] == tokens
    if probs is not None and uniforms is not None:
        token_q = 1.0 if draft_probs is None else _token_probs(draft_probs, vocab, tokens)
        keep = keep.where(decided[:, None], uniforms * token_q < probs[rows, tokens])
    keep &= verified
    kept = keep.long().cumprod(1).sum(1)
    final_row = first_row + kept
    final = torch.zeros_like(kept)
    if wanted is not None:
        final = wanted[final_row]
    if probs is not None and not tokens.is_cpu:
        final = torch.where(decided, final, draw_each(batch, kept))
    elif probs is not None:
        free = (~decided).nonzero()[:, 0]
        final[free] = _draw(batch, free, kept[free])
    return _ended(tokens, kept, final)


def accept_wanted(
    tokens: torch.Tensor, verify_lens: torch.Tensor, first_row: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept` where all requests are decided, with the same shapes whatever the lengths, as a CUDA graph wants.

    first_row: [R] int64, of each request in wanted [B]; nothing is asked of the rows behind the last request's.
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    verified = steps < verify_lens[:, None]
    tokens = tokens.where(verified, 0)
    keep = (wanted[first_row[:, None] + steps.where(verified, 0)] == tokens) & verified
    kept = keep.long().cumprod(1).sum(1)
    return _ended(tokens, kept, wanted[first_row + kept])


def _ended(tokens: torch.Tensor, kept: torch.Tensor, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """accept_lens and out: the first `kept` [R] of tokens [R, gamma], then the final ones [R]."""
    out = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, kept[:, None], final[:, None])
    return kept + 1, out.masked_fill(torch.arange(tokens.shape[1] + 1, device=tokens.device) > kept[:, None], 0)


def _draw(batch: Verification, requests: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[M] final tokens of `requests` [M] that keep `kept` [M] drafts: from p, or where one is rejected the residual."""
    tokens, verify_lens, qo_indptr, _, final_keys, _, probs, _, draft_probs, vocab = batch
    assert probs is not None
    assert final_keys is not None
    keys, rows = final_keys[requests], qo_indptr[requests].long() + kept
    gamma = tokens.shape[1]
    if gamma == 0:
        return gumbel_argmax(probs[rows], keys)
    rejected, steps = kept < verify_lens[requests], kept.clamp(max=gamma - 1)
    last = tokens[requests, steps]
    if probs.is_contiguous() and (draft_probs is None or draft_probs.is_contiguous()) and native.fits(probs):
        q = None if draft_probs is None else draft_probs.flatten(0, 1)
        place = requests * gamma + steps
        return torch.ops.outrider.draw_final(probs, rows, last.where(rejected, -1), q, place, vocab, keys)
    weights, which = probs[rows], rejected.nonzero()[:, 0]
    q = None if draft_probs is None else draft_probs[requests[which], steps[which]]
    weights[which] = residual(weights[which], last[which], q, vocab)
    return gumbel_argmax(weights, keys)


def draw_each(batch: Verification, kept: torch.Tensor) -> torch.Tensor:
    """[R] final tokens of all requests, which keep `kept` [R] drafts: from p, or where one is rejected the residual.

    It runs on any device without waiting for it: so the residual of every request is made, whoever needs one.
    """
    tokens, verify_lens, qo_indptr, _, final_keys, _, probs, _, draft_probs, vocab = batch
    assert probs is not None
    assert final_keys is not None
    weights, rejected = probs[qo_indptr[:-1].long() + kept], kept < verify_lens
    if tokens.shape[1]:
        steps = kept.clamp(max=tokens.shape[1] - 1)
        everyone = torch.arange(len(tokens), device=tokens.device)
        q = None if draft_probs is None else draft_probs[everyone, steps]
        drafted = tokens[everyone, steps].where(rejected, 0)  # what is not verified may be no token
        weights = torch.where(rejected[:, None], residual(weights, drafted, q, vocab), weights)
    return gumbel_argmax(weights, final_keys)


def residual(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor | None, vocab: torch.Tensor | None) -> torch.Tensor:
    """Weights of the replacement after `tokens` were rejected: max(0, p - q), not normalised.

    p: [M, V]. tokens: [M]. q: [M, V'] over `vocab`, or None for a point mass on `tokens`. Where p - q
    vanishes by rounding, p itself: a rejection was then as good as impossible, and p holds no token that may
    not come out.
    """
    if q is None:
        rest = p.scatter(1, tokens[:, None], 0.0)
    elif vocab is None:
        rest = (p - q).clamp_(min=0)
    else:
        rest = p.index_add(1, vocab, q.to(p.dtype), alpha=-1).clamp_(min=0)
    return rest.where(rest.sum(-1, keepdim=True) > 0, p)


def _token_probs(draft_probs: torch.Tensor, vocab: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """[R, gamma], q of each drafted token; 0 where it lies outside the drafter's vocabulary."""
    if vocab is None:
        return draft_probs.gather(2, tokens[:, :, None])[:, :, 0]
    column = torch.searchsorted(vocab, tokens).clamp_(max=vocab.shape[0] - 1)
    return draft_probs.gather(2, column[:, :, None])[:, :, 0] * (vocab[column] == tokens)


def accept_logits(
    batch: Verification,
    request: torch.Tensor,
    logits: torch.Tensor,
    rules: Rules,
    row_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept` from the target's logits [T, V], whose rows at and beyond `qo_indptr[R]` are padding.

    On CUDA p is never stored, nothing waits for the device, and what is drawn from a row does not depend on the others.

    batch : with uniforms, final_keys and decided, without wanted and probs. Greedy requests are decided in any case.
    request : [T] int64, the request of each row. rules : of the requests, [R] each.
    row_keys : [T] int64, of the noise that draws what is wanted after a row; required if decided requests are not all
    greedy.
    With gamma 0 every request's one token is drawn.
    """
    tokens, verify_lens, qo_indptr, uniforms, final_keys, _, _, decided, draft_probs, vocab = batch
    if uniforms is None or final_keys is None or decided is None:
        raise ValueError("logits are drawn from with uniforms, final_keys and decided, which are missing")
    if cuda.fits(logits):
        _check(batch, logits.shape[1])
        given = uniforms, final_keys, row_keys, decided
        arrays = tokens, verify_lens, qo_indptr, request, logits, *rules.typed(), *given
        return torch.ops.outrider_cuda.accept(*arrays, draft_probs, vocab)
    probs = target_probs(logits, *rules.of(request))
    wanted = gumbel_argmax(probs, final_keys[request] if row_keys is None else row_keys)
    return accept(batch._replace(wanted=wanted, probs=probs, decided=decided | (rules.temperatures <= 0)))


def reference_accept(batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `accept`: one token at a time, with q spread over the whole vocabulary."""
    tokens, verify_lens, qo_indptr, uniforms, final_keys, wanted, probs, _, draft_probs, vocab = batch
    decided = _decided(batch)
    _check(batch, None if probs is None else probs.shape[1])
    lens = torch.ones_like(verify_lens, dtype=torch.int64)
    out = tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 1)
    for r in range(tokens.shape[0]):
        for k in range(int(verify_lens[r]) + 1):
            row, bonus = int(qo_indptr[r]) + k, k == int(verify_lens[r])
            if wanted is not None and decided[r]:
                out[r, k] = wanted[row]
                stop = bonus or bool(tokens[r, k] != wanted[row])
            elif probs is not None and uniforms is not None and final_keys is not None:
                p, q, x = probs[row], torch.zeros_like(probs[row]), 0 if bonus else int(tokens[r, k])
                if not bonus:
                    columns = torch.arange(p.shape[0]) if vocab is None else vocab
                    q[x if draft_probs is None else columns] = 1.0 if draft_probs is None else draft_probs[r, k]
                stop = bonus or bool(uniforms[r, k] * q[x] >= p[x])
                weights = (p - q).clamp(min=0) if stop and (p > q).any() else p
                out[r, k] = torch_gumbel_argmax(weights[None], final_keys[r, None]) if stop else x
            if stop:
                break
            lens[r] += 1
    return lens, out


def _decided(batch: Verification) -> torch.Tensor:
    """The decided mask [R]; raises ValueError where wanted or probs are missing for it."""
    wanted, probs, decided = batch.wanted, batch.probs, batch.decided
    if wanted is None and probs is None:
        raise ValueError("give wanted for decided requests, probs for the others, or both with a decided mask")
    if decided is None:
        if probs is not None and wanted is not None:
            raise ValueError("both wanted and probs given: say with decided=[R] bool which request uses which")
        return torch.full((len(batch.tokens),), probs is None, device=batch.tokens.device)
    if decided.is_cpu and ((wanted is None and decided.any()) or (probs is None and not decided.all())):
        raise ValueError("decided requests need wanted, the others need probs")
    return decided


def _check(batch: Verification, width: int | None) -> None:
    """Raise ValueError for shapes that do not fit, as far as no device is waited for.

    width: tokens of the target's distribution, where there is one.
    """
    (requests, gamma), (verify_lens, qo_indptr) = batch.tokens.shape, (batch.verify_lens, batch.qo_indptr)
    if verify_lens.shape != (requests,) or qo_indptr.shape != (requests + 1,):
        raise ValueError(
            f"for tokens {[requests, gamma]} expected verify_lens [{requests}] and qo_indptr [{requests + 1}], "
            f"got {[*verify_lens.shape]} and {[*qo_indptr.shape]}"
        )
    for name, shape in (("uniforms", [requests, gamma]), ("final_keys", [requests])):
        given = getattr(batch, name)
        if given is None and width is not None:
            raise ValueError(f"probs are drawn from with {name} {shape}, which are missing")
        if given is not None and [*given.shape] != shape:
            raise ValueError(f"expected {name} {shape}, got {[*given.shape]}")
    if batch.tokens.is_cpu and not torch.equal(qo_indptr.diff().long(), verify_lens.long() + 1):
        raise ValueError("qo_indptr must give every request verify_lens + 1 rows")
    if batch.draft_probs is not None:
        columns = width if batch.vocab is None else len(batch.vocab)
        shape = [requests, gamma, batch.draft_probs.shape[2] if columns is None else columns]
        if [*batch.draft_probs.shape] != shape:
            raise ValueError(
                f"draft_probs must be {shape}, got {[*batch.draft_probs.shape]}; "
                "a drafter with fewer tokens than the target must pass its vocab"
            )
