"""Rejection sampling over a flattened verify batch: the step that makes speculation lossless.

Request r has verified `verify_lens[r]` draft tokens; row `qo_indptr[r] + k` of the target's output is its distribution
p_k for the token after x_k (x_0 is the anchor); x_{k+1} was drawn from q_k. A decided request keeps a token if and only
if it is the wanted one: the argmax for a greedy request, the seed's draw from p for a seeded one. All other requests
have one of two rules. Whatever q is, tokens come out distributed as p.

**Token by token** (Leviathan et al., 2023, algorithm 1): left to right, x_{k+1} is kept with probability
min(1, p_k(x) / q_k(x)); the first rejected one is replaced by a draw from max(0, p_k - q_k), renormalised; if all are
kept, a bonus token is drawn from p.

**By block** (Sun et al., Block verification accelerates speculative decoding, 2024, algorithm 2), which keeps at least
as many tokens on average. The scale s_0 is 1 and s_{k+1} = min(1, s_k p_k(x_{k+1}) / q_k(x_{k+1})): a token that p
likes better than q makes up for one before it. Let w_k = max(0, s_k p_k - q_k) be weights, and W_k their sum. Every k
from 1 on is tested: the last with chance s_k, the rest with chance W_k / (W_k + 1 - s_k). All tokens up to the last k
that passes are kept. The token after them is drawn from w_k, or from p_k if k is the last. For point masses, as in
lookups, it keeps as much as the first rule, so the first rule serves where all drafts are point masses.

**Why both are lossless.** Without drafts a token is drawn from p. One more draft token, drawn from q_n after n earlier
ones, changes no distribution. Let s be the chance that all n are kept if no more are verified: then they and a next
token y come out with chance s p_n(y). Token by token, with one more, they come out with s min(p_n, q_n)(y) where y is
the new token and kept, and with s max(0, p_n - q_n)(y) where y replaces it: the same sum. By block s = s_n. The new
token is kept with chance sum min(s p_n, q_n) = s - W_n. Else test n passes, with chance (1 - s + W_n) W_n / (W_n + 1 -
s) = W_n, and y is drawn from w_n. Together they come out with min(s p_n, q_n)(y) + max(0, s p_n - q_n)(y): the same.
Both fail with chance 1 - s, as the last test did before, and the tests before n are unchanged. So lengths may depend on
the tokens drafted so far, as docs/planner.md requires.

By block, at least k tokens are thus kept with chance s_k, given x_1 .. x_k and that k are verified, however many more
are verified; token by token with the product of min(1, p / q), which is never larger.

The scale is rounded to float32, so that its product with p is exact in float64, and W_k adds multiples of 2^-44, which
is exact in any order: every implementation has the same bits.
"""

from typing import NamedTuple

import torch

from .cpu import native
from .cuda import native as cuda
from .noise import gumbel_argmax
from .sampling import Rules, target_probs


class Verification(NamedTuple):
    """A verify batch of R requests: drafts, the target's distributions, and random numbers.

    Parameters
    ----------
    tokens : [R, gamma] int64, drafted tokens x_1 .. x_gamma in the target's vocabulary.
    verify_lens : [R] in 0 .. gamma, how many of them were verified; the rest are not read.
    qo_indptr : [R + 1], request r owns target rows `qo_indptr[r]:qo_indptr[r + 1]`, `verify_lens[r] + 1` of them.
    uniforms : [R, gamma] float64 in (0, 1), one per acceptance test; required with `probs`.
    final_keys : [R] int64, of the noise that draws the replacement or bonus token; independent of `uniforms`; required
        with `probs`.
    wanted : [B] int64, the token after each row of decided requests; required if there are any.
    probs : [B, V] float32, p after the request's sampling rules; read for requests that are not decided, required if
        there are any.
    decided : [R] bool; None: all if `probs` is None, otherwise none.
    draft_probs : [R, gamma, V'], q, the exact distribution of each token; not read for decided requests. None: a point
        mass on the drafted token.
    vocab : [V'] int64, strictly increasing, the target's token of each column of q; None: V' = V. Tokens outside it
        have q = 0.
    points : [R] bool, requests with a point mass on every drafted token as q, whatever draft_probs contains. It may
        then cover fewer tokens and more requests than the batch. None: none. Only `accept_logits` takes it.
    by_block : False: token by token.
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
    points: torch.Tensor | None = None
    by_block: bool = True


def accept(batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Decide which draft tokens stay and which token follows them.

    Returns
    -------
    accept_lens : [R] int64 in 1 .. gamma + 1, tokens that come out, the final one included.
    out : [R, gamma + 1] int64, the tokens; 0 at and beyond `accept_lens`.

    Raises ValueError where shapes do not fit or a required tensor is missing.
    """
    tokens, verify_lens, qo_indptr, _, _, wanted, probs, *_ = batch
    if probs is None and batch.decided is None and wanted is not None and wanted.is_cpu and native.available():
        return torch.ops.outrider.accept_wanted(tokens, verify_lens.long(), qo_indptr.long(), wanted)
    decided = _decided(batch)
    _check(batch, None if probs is None else probs.shape[1])
    return _accepted(batch, decided)


def _accepted(batch: Verification, decided: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, verify_lens, qo_indptr, _, _, wanted, probs, *_ = batch
    steps, first_row = torch.arange(tokens.shape[1], device=tokens.device), qo_indptr[:-1].long()
    verified = steps < verify_lens[:, None]
    batch = batch._replace(tokens=tokens.where(verified, 0))
    kept, final = first_row.new_zeros(2, len(first_row))
    if wanted is not None:
        keep = (wanted[first_row[:, None] + steps.where(verified, 0)] == batch.tokens) & verified
        kept = keep.long().cumprod(1).sum(1)
        final = wanted[first_row + kept]
    if probs is not None and native.fits(probs):
        free = (~decided).nonzero()[:, 0]
        kept[free], final[free] = _accept_compiled(batch, free)
    elif probs is not None:
        drafted, scale = kept_drafts(batch)
        kept = torch.where(decided, kept, drafted)
        final = torch.where(decided, final, draw_each(batch, kept, scale))
    out = torch.nn.functional.pad(batch.tokens, (0, 1)).scatter(1, kept[:, None], final[:, None])
    return kept + 1, out.masked_fill(torch.arange(tokens.shape[1] + 1, device=tokens.device) > kept[:, None], 0)


def _accept_compiled(batch: Verification, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the drafts [M] that `requests` [M] keep, and their final tokens [M]."""
    assert batch.probs is not None
    assert batch.uniforms is not None
    assert batch.final_keys is not None
    return torch.ops.outrider.accept_sampled(
        batch.probs.contiguous(), requests, batch.qo_indptr[:-1].long(), batch.verify_lens.long(),
        batch.tokens.contiguous(), batch.uniforms.contiguous(),
        None if batch.draft_probs is None else batch.draft_probs.contiguous(), batch.vocab,
        batch.final_keys.contiguous(), batch.by_block,
    )  # fmt: skip


def kept_drafts(batch: Verification) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [R] int64, drafts that each request keeps if it is not decided, and [R] float32, the scale of p after
    them.

    Runs on any device without waiting for it. Unverified positions must hold valid tokens all the same.
    """
    tokens, probs, uniforms = batch.tokens, batch.probs, batch.uniforms
    assert probs is not None
    assert uniforms is not None
    requests, gamma = tokens.shape
    steps, first_row = torch.arange(gamma, device=tokens.device), batch.qo_indptr[:-1].long()
    verified = steps < batch.verify_lens[:, None]
    rows = first_row[:, None] + steps.where(verified, 0)
    scales = torch.ones(requests, gamma + 1, device=tokens.device)
    q = torch.ones_like(uniforms) if batch.draft_probs is None else _token_probs(batch.draft_probs, batch.vocab, tokens)
    if not batch.by_block or batch.draft_probs is None:
        kept = ((uniforms * q < probs[rows, tokens]) & verified).long().cumprod(1).sum(1)
        return kept, scales[:, 0]
    p = probs[rows, tokens].double()
    for k in range(gamma):
        joint = scales[:, k] * p[:, k]
        below = torch.where(joint < q[:, k], joint / q[:, k], 1.0)
        scales[:, k + 1] = torch.where(joint > 0, below, 0.0).where(verified[:, k], 0.0)
    kept, everyone = torch.zeros_like(first_row), torch.arange(requests, device=tokens.device)
    for k in range(1, gamma + 1):
        scale, chance = scales[:, k].double(), uniforms[:, k - 1]
        passed = chance < scale  # the last
        if k < gamma:
            left = mass(residual(probs[rows[:, k]], tokens[:, k], batch.draft_probs[:, k], batch.vocab, scales[:, k]))
            within = (scale == 1) | (chance * (left + (1 - scale)) < left)
            passed = torch.where(batch.verify_lens == k, passed, within & (scale > 0))
        kept = torch.where(passed & verified[:, k - 1], k, kept)
    return kept, scales[everyone, kept]


def draw_each(batch: Verification, kept: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return [R] the final tokens of requests that keep `kept` [R] drafts: drawn from p, or after a rejection the
    residual.

    scale: [R] float32, of p. Runs on any device without waiting for it, so it computes the residual of every request.
    """
    tokens, probs = batch.tokens, batch.probs
    assert probs is not None
    assert batch.final_keys is not None
    weights, rejected = probs[batch.qo_indptr[:-1].long() + kept], kept < batch.verify_lens
    if tokens.shape[1]:
        steps = kept.clamp(max=tokens.shape[1] - 1)
        everyone = torch.arange(len(tokens), device=tokens.device)
        q = None if batch.draft_probs is None else batch.draft_probs[everyone, steps]
        drafted = tokens[everyone, steps].where(rejected, 0)  # an unverified one may be no token
        rest = residual(weights, drafted, q, batch.vocab, scale)
        weights = torch.where(rejected[:, None] & (rest.sum(-1, keepdim=True) > 0), rest, weights)
    return gumbel_argmax(weights, batch.final_keys)


def residual(
    p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor | None, vocab: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    """Return the weights of the replacements of `tokens` [M]: max(0, scale p - q), [M, V] float32, not normalised.

    p: [M, V]. q: [M, V'] over `vocab`, or None for a point mass on `tokens`. scale: [M] float32.
    If all vanish by rounding, a rejection was as good as impossible, and the caller draws from p: it holds no forbidden
    token.
    """
    if q is None:
        return (p * scale[:, None]).scatter(1, tokens[:, None], 0.0)
    rest = p.double() * scale[:, None]
    rest = rest - q if vocab is None else rest.index_add(1, vocab, q.double(), alpha=-1)
    return rest.clamp_(min=0).float()


def mass(weights: torch.Tensor) -> torch.Tensor:
    """Return [M] float64 sums of weights [M, V], of at most 1 together, each rounded to a multiple of 2^-44."""
    return ((weights.double() + 256) - 256).sum(-1)


def _token_probs(draft_probs: torch.Tensor, vocab: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """Return [R, gamma] q of each drafted token; 0 outside the drafter's vocabulary."""
    if vocab is None:
        return draft_probs.gather(2, tokens[:, :, None])[:, :, 0]
    column = torch.searchsorted(vocab, tokens).clamp_(max=vocab.shape[0] - 1)
    return draft_probs.gather(2, column[:, :, None])[:, :, 0] * (vocab[column] == tokens)


def accept_logits(
    batch: Verification, request: torch.Tensor, logits: torch.Tensor, rules: Rules, row_keys: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `accept` from the target's logits [T, V]; rows at and beyond `qo_indptr[R]` are padding.

    On CUDA p is never stored, no call waits for the device, and the draw from a row does not depend on the rest.

    batch : with uniforms, final_keys and decided, without wanted and probs. Greedy requests are decided in any case.
        Only the starts of requests and of padding are read from qo_indptr.
    request : [T] int64, the request of each row. rules : of the requests, [R] each.
    row_keys : [T] int64, of the noise that draws the wanted token after a row; required if decided requests are not all
        greedy.
    With gamma 0 every request's one token is drawn.
    """
    tokens, verify_lens, qo_indptr, uniforms, final_keys, _, _, decided, draft_probs, vocab, points, by_block = batch
    if uniforms is None or final_keys is None or decided is None:
        raise ValueError("logits are drawn from with uniforms, final_keys and decided, which are missing")
    if cuda.fits(logits):
        _check(batch, logits.shape[1], packed=False)
        given = uniforms, final_keys, row_keys, decided
        arrays = tokens, verify_lens, qo_indptr, request, logits, *rules.typed(), *given
        return cuda.acceptance.accept(*arrays, draft_probs, vocab, points, by_block)
    probs = target_probs(logits, rules.of(request))
    wanted = gumbel_argmax(probs, final_keys[request] if row_keys is None else row_keys)
    batch = batch if points is None or draft_probs is None else with_point_masses(batch, logits.shape[1])
    return _accepted(batch._replace(wanted=wanted, probs=probs), decided | (rules.temperatures <= 0))


def with_point_masses(batch: Verification, width: int) -> Verification:
    """Return the batch without `points`, with q over the target's `width` tokens; on any device, without waiting for
    it."""
    tokens, q, points = batch.tokens, batch.draft_probs, batch.points
    assert q is not None
    assert points is not None
    known = q[: len(tokens)]
    whole = known.new_zeros(*tokens.shape, width)
    columns = torch.arange(width, device=q.device) if batch.vocab is None else batch.vocab
    whole[:, : known.shape[1], columns] = known
    verified = torch.arange(tokens.shape[1], device=tokens.device) < batch.verify_lens[:, None]
    masses = torch.zeros_like(whole).scatter_(2, tokens.where(verified, 0)[:, :, None], 1.0)
    return batch._replace(draft_probs=torch.where(points[:, None, None], masses, whole), vocab=None, points=None)


def _decided(batch: Verification) -> torch.Tensor:
    """Return the decided mask [R]; raises ValueError where it needs missing wanted or probs."""
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


def _check(batch: Verification, width: int | None, *, packed: bool = True) -> None:
    """Raise ValueError for shapes that do not fit, as far as can be seen without waiting for a device. width: tokens of
    the target's distribution, if given. packed: the rows of consecutive requests follow each other."""
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
    if packed and batch.tokens.is_cpu and not torch.equal(qo_indptr.diff().long(), verify_lens.long() + 1):
        raise ValueError("qo_indptr must give every request verify_lens + 1 rows")
    if batch.points is not None and [*batch.points.shape] != [requests]:
        raise ValueError(f"expected points [{requests}], got {[*batch.points.shape]}")
    if batch.draft_probs is not None and batch.points is None:
        columns = width if batch.vocab is None else len(batch.vocab)
        shape = [requests, gamma, batch.draft_probs.shape[2] if columns is None else columns]
        if [*batch.draft_probs.shape] != shape:
            raise ValueError(
                f"draft_probs must be {shape}, got {[*batch.draft_probs.shape]}; "
                "a drafter with fewer tokens than the target must pass its vocab"
            )
