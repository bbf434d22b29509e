"""Rejection sampling over a flattened verify batch: the step that makes speculation lossless.

Request r has verified `verify_lens[r]` draft tokens; row `qo_indptr[r] + k` of the target's output is its
distribution p for the token after x_k (x_0 is the anchor). Left to right, x_{k+1} is kept with probability
min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(0, p - q), renormalised; if all are
kept, a bonus token is drawn from p (Leviathan et al., 2023, algorithm 1). Whatever q is, what comes out is
distributed as p. A request whose tokens are decided keeps a token if and only if it is the one wanted: the argmax for
a greedy request, what its seed draws from p for a seeded one.
"""

from __future__ import annotations

import torch

from .cpu import native
from .cuda import native as cuda
from .noise import gumbel_argmax, torch_gumbel_argmax
from .sampling import Rules, target_probs


def accept(
    tokens: torch.Tensor,
    verify_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    *,
    uniforms: torch.Tensor | None = None,
    final_keys: torch.Tensor | None = None,
    wanted: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    decided: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    vocab: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide which draft tokens stay and what follows them.

    Parameters
    ----------
    tokens : [R, gamma] int64, drafted tokens x_1 .. x_gamma in the target's vocabulary.
    verify_lens : [R] in 0 .. gamma, how many of them were verified; the others are not read.
    qo_indptr : [R + 1], request r owns target rows `qo_indptr[r]:qo_indptr[r + 1]`, `verify_lens[r] + 1` of
    them.
    uniforms : [R, gamma] float64 in (0, 1), one per acceptance test; required with `probs`.
    final_keys : [R] int64, of the noise that draws the replacement or bonus token; independent of `uniforms`;
    required with `probs`.
    wanted : [B] int64, the token after each row of decided requests; required if there are any.
    probs : [B, V] float32, p after the request's sampling rules; read for the others, required if there are
    any.
    decided : [R] bool; None: all if `probs` is None, otherwise none.
    draft_probs : [R, gamma, V'], q, exactly what each token was drawn from; not read for decided requests.
    None: a point
        mass on the drafted token.
    vocab : [V'] int64, strictly increasing, the target's token of each column of q; None: V' = V. Others have
    q = 0.

    Returns
    -------
    accept_lens : [R] int64 in 1 .. gamma + 1, tokens that come out, the final one included.
    out : [R, gamma + 1] int64, the tokens; 0 at and beyond `accept_lens`.
    """
    if probs is None and decided is None and wanted is not None and wanted.is_cpu and native.available():
        return torch.ops.outrider.accept_wanted(tokens, verify_lens.long(), qo_indptr.long(), wanted)
    decided = _check(tokens, verify_lens, qo_indptr, uniforms, final_keys, wanted, probs, decided, draft_probs, vocab)
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
    if probs is not None and final_keys is not None and not tokens.is_cpu:
        drawn = draw_each(probs, final_row, kept < verify_lens, kept, tokens, final_keys, draft_probs, vocab)
        final = torch.where(decided, final, drawn)
    elif probs is not None and final_keys is not None:
        drawn = (~decided).nonzero()[:, 0]
        rejected = kept[drawn] < verify_lens[drawn]
        final[drawn] = _draw(
            probs, final_row[drawn], rejected, drawn, kept[drawn], tokens, final_keys[drawn], draft_probs, vocab
        )
    return _ended(tokens, kept, final)


def accept_wanted(
    tokens: torch.Tensor, verify_lens: torch.Tensor, first_row: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept` where all requests are decided, in operations of the same shapes whatever the lengths, as a graph wants.

    first_row: [R] int64, of each request in wanted [B]; nothing is asked of the rows behind the last request's.
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    verified = steps < verify_lens[:, None]
    tokens = tokens.where(verified, 0)
    keep = (wanted[first_row[:, None] + steps.where(verified, 0)] == tokens) & verified
    kept = keep.long().cumprod(1).sum(1)
    return _ended(tokens, kept, wanted[first_row + kept])


def _ended(tokens: torch.Tensor, kept: torch.Tensor, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """accept_lens and out: of tokens [R, gamma] the first kept [R], behind them the final ones [R]."""
    out = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, kept[:, None], final[:, None])
    return kept + 1, out.masked_fill(torch.arange(tokens.shape[1] + 1, device=tokens.device) > kept[:, None], 0)


def _draw(
    probs: torch.Tensor,
    rows: torch.Tensor,
    rejected: torch.Tensor,
    requests: torch.Tensor,
    steps: torch.Tensor,
    tokens: torch.Tensor,
    keys: torch.Tensor,
    draft_probs: torch.Tensor | None,
    vocab: torch.Tensor | None,
) -> torch.Tensor:
    """[M] final tokens: from p at `rows`, or where `rejected` from the residual of token `steps` of `requests`."""
    gamma = tokens.shape[1]
    if gamma == 0:
        return gumbel_argmax(probs[rows], keys)
    steps = steps.clamp(max=gamma - 1)
    last = tokens[requests, steps]
    if probs.is_contiguous() and (draft_probs is None or draft_probs.is_contiguous()) and native.fits(probs):
        q = None if draft_probs is None else draft_probs.flatten(0, 1)
        place = requests * gamma + steps
        return torch.ops.outrider.draw_final(probs, rows, last.where(rejected, -1), q, place, vocab, keys)
    weights, which = probs[rows], rejected.nonzero()[:, 0]
    q = None if draft_probs is None else draft_probs[requests[which], steps[which]]
    weights[which] = residual(weights[which], last[which], q, vocab)
    return gumbel_argmax(weights, keys)


def draw_each(
    probs: torch.Tensor,
    rows: torch.Tensor,
    rejected: torch.Tensor,
    steps: torch.Tensor,
    tokens: torch.Tensor,
    keys: torch.Tensor,
    draft_probs: torch.Tensor | None,
    vocab: torch.Tensor | None,
) -> torch.Tensor:
    """[R] final tokens of all requests: from p at `rows`, or where `rejected` from the residual of token `steps`.

    On any device and without waiting for it: so the residual of every request is made, whoever needs one.
    """
    weights = probs[rows]
    if tokens.shape[1]:
        steps = steps.clamp(max=tokens.shape[1] - 1)
        everyone = torch.arange(len(tokens), device=tokens.device)
        q = None if draft_probs is None else draft_probs[everyone, steps]
        rest = residual(weights, tokens[everyone, steps], q, vocab)
        weights = torch.where(rejected[:, None], rest, weights)
    return gumbel_argmax(weights, keys)


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
    tokens: torch.Tensor,
    verify_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    request: torch.Tensor,
    logits: torch.Tensor,
    rules: Rules,
    *,
    uniforms: torch.Tensor,
    final_keys: torch.Tensor,
    decided: torch.Tensor,
    row_keys: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    vocab: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept` from the target's logits [T, V], whose rows at and beyond `qo_indptr[R]` are padding.

    On CUDA p is never stored, nothing waits for the device, and what is drawn from a row does not depend on the others.

    request : [T] int64, the request of each row. rules : of the requests, [R] each.
    decided : [R] bool, what is wanted is drawn with the row's own of `row_keys` [T] int64; required if there are any
    that are not greedy. Greedy requests are decided in any case.
    The other arguments and what is returned are those of `accept`; with gamma 0 every request's one token is drawn.
    """
    if cuda.fits(logits):
        shapes = uniforms, final_keys, final_keys, logits, decided, draft_probs, vocab  # logits have those of probs
        _check(tokens, verify_lens, qo_indptr, *shapes)
        given = uniforms, final_keys, row_keys, decided
        arrays = tokens, verify_lens, qo_indptr, request, logits, *rules.typed(), *given
        return torch.ops.outrider_cuda.accept(*arrays, draft_probs, vocab)
    probs = target_probs(logits, *rules.of(request))
    return accept(
        tokens,
        verify_lens,
        qo_indptr,
        uniforms=uniforms,
        final_keys=final_keys,
        wanted=gumbel_argmax(probs, final_keys[request] if row_keys is None else row_keys),
        probs=probs,
        decided=decided | (rules.temperatures <= 0),
        draft_probs=draft_probs,
        vocab=vocab,
    )


def reference_accept(
    tokens: torch.Tensor,
    verify_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    *,
    uniforms: torch.Tensor | None = None,
    final_keys: torch.Tensor | None = None,
    wanted: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    decided: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    vocab: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `accept`: one token at a time, with q spread over the whole vocabulary."""
    decided = _check(tokens, verify_lens, qo_indptr, uniforms, final_keys, wanted, probs, decided, draft_probs, vocab)
    lens, out = (
        torch.ones_like(verify_lens, dtype=torch.int64),
        tokens.new_zeros(tokens.shape[0], tokens.shape[1] + 1),
    )
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


def _check(
    tokens: torch.Tensor,
    verify_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    uniforms: torch.Tensor | None,
    final_keys: torch.Tensor | None,
    wanted: torch.Tensor | None,
    probs: torch.Tensor | None,
    decided: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    vocab: torch.Tensor | None,
) -> torch.Tensor:
    """The decided mask, after checking what can be checked without waiting for a device."""
    requests, gamma = tokens.shape
    if verify_lens.shape != (requests,) or qo_indptr.shape != (requests + 1,):
        raise ValueError(
            f"for tokens {tuple(tokens.shape)} expected verify_lens [{requests}] and qo_indptr [{requests + 1}], "
            f"got {tuple(verify_lens.shape)} and {tuple(qo_indptr.shape)}"
        )
    for name, given, shape in (("uniforms", uniforms, tokens.shape), ("final_keys", final_keys, (requests,))):
        if given is None and probs is not None:
            raise ValueError(f"probs are drawn from with {name} {list(shape)}, which are missing")
        if given is not None and given.shape != shape:
            raise ValueError(f"expected {name} {list(shape)}, got {list(given.shape)}")
    if tokens.device.type == "cpu" and not torch.equal(qo_indptr.diff().long(), verify_lens.long() + 1):
        raise ValueError("qo_indptr must give every request verify_lens + 1 rows")
    if decided is None:
        if probs is not None and wanted is not None:
            raise ValueError("both wanted and probs given: say with decided=[R] bool which request uses which")
        decided = torch.full((requests,), probs is None, device=tokens.device)
    elif tokens.device.type == "cpu" and ((wanted is None and decided.any()) or (probs is None and not decided.all())):
        raise ValueError("decided requests need wanted, the others need probs")
    if wanted is None and probs is None:
        raise ValueError("give wanted for decided requests, probs for the others, or both with a decided mask")
    if draft_probs is not None:
        expected = None if probs is None else probs.shape[1]
        width = expected if vocab is None else vocab.shape[0]
        if draft_probs.shape[:2] != (requests, gamma) or (width is not None and draft_probs.shape[2] != width):
            raise ValueError(
                f"draft_probs must be [{requests}, {gamma}, {width}], got {tuple(draft_probs.shape)}; "
                "a drafter with fewer tokens than the target must pass its vocab"
            )
    return decided
