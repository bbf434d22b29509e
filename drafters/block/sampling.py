"""Left-to-right sampling of a block (DSpark, section 3.1, equation 4), with the exact distribution of every draw."""

import torch

from outrider.kernels.cpu import native
from outrider.kernels.cuda import native as cuda
from outrider.kernels.noise import gumbel_argmax
from outrider.kernels.sampling import Rules, target_probs

from ..base import DraftBatch
from ..confidence import MIX, own_confidence
from .heads import ConfidenceHead, MarkovHead


def draw_columns(
    row: torch.Tensor,
    rules: Rules,
    keys: torch.Tensor,
    vocab: torch.Tensor | None = None,
    all_greedy: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw columns [R] from logits [R, V'] by each row's rules and key [R]; return them and the distribution [R, V'].

    vocab: [V'] target token of each column, None for the identity. all_greedy: as in `DraftBatch`.
    At temperature 0 the largest logit is chosen, and the distribution is the unfiltered one of temperature 1.
    """
    greedy = rules.temperatures <= 0
    if all_greedy or (all_greedy is None and bool(greedy.all())):
        return row.argmax(-1), torch.softmax(row, -1)
    q = target_probs(row, rules)
    column = gumbel_argmax(q, keys, vocab)
    if not q.is_cpu:
        return column, torch.where(greedy[:, None], torch.softmax(row, -1), q)
    if bool(greedy.any()):
        q[greedy] = torch.softmax(row[greedy], -1)
    return column, q


def all_requests_greedy(rules: Rules, known: bool | None) -> bool:
    """Return `known`; if that is None, read the temperatures, which waits for a device."""
    return bool((rules.temperatures <= 0).all()) if known is None else known


def sample_block(
    logits: torch.Tensor, hidden: torch.Tensor, batch: DraftBatch, *, vocab: torch.Tensor | None, markov: MarkovHead,
    confidence: ConfidenceHead | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Draw gamma tokens per request, each given the one before it.

    logits: [R, gamma, V'] base logits U_k. hidden: [R, gamma, d].
    vocab: [V'] target token of each column, None for the identity.
    Returns tokens [R, gamma], probs [R, gamma, V'] float32 (None where all are greedy or not wanted) and confidence [R,
    gamma]. Without a confidence head that is max_v q_k(v), which does not depend on the token drawn.
    """
    requests, gamma, width = logits.shape
    on_cuda, rules = cuda.fits(logits), batch.rules.typed()
    all_greedy = not on_cuda and all_requests_greedy(batch.rules, batch.all_greedy)  # which would wait for the device
    wants_probs, room = batch.wants_probs and not all_greedy, batch.probs_room
    if wants_probs and room is not None:
        q = room[:requests]
    else:
        q = logits.new_empty((requests, gamma if wants_probs else 1, width), dtype=torch.float32)
    state, previous = markov.start(hidden), batch.anchors
    tokens, embedded, sure = [], [], []
    for k in range(gamma):
        before = markov.w1(previous)
        state, latent = markov.step(state, before, hidden[:, k])
        row = q[:, k if wants_probs else 0]
        if on_cuda:
            given = markov.w2.weight, *rules, batch.keys[:, k], vocab, wants_probs, batch.decided
            previous, largest = cuda.draft_block.draft_step(row, logits[:, k], latent, *given)
        else:
            whole = logits[:, k].float() + markov.w2(latent)
            column, distribution = draw_columns(whole, batch.rules, batch.keys[:, k], vocab, all_greedy)
            previous, largest = column if vocab is None else vocab[column], distribution.amax(-1)
            if wants_probs:
                row.copy_(distribution)
        tokens.append(previous)
        embedded.append(before)
        sure.append(largest)
    chances = torch.stack(sure, 1)
    if confidence is not None:
        chances = confidence.confidence(hidden, torch.stack(embedded, 1), chances, batch.temperatures)
    return torch.stack(tokens, 1), q if wants_probs else None, chances


def _kept(probs: torch.Tensor, batch: DraftBatch) -> torch.Tensor:
    """Return probs [R, G, V'], copied to the batch's buffer where it has one."""
    room = batch.probs_room
    return probs if room is None else room[: len(probs)].copy_(probs)


def sample_parallel(
    logits: torch.Tensor, batch: DraftBatch, *, vocab: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Draw as `sample_block` without a sequential head: all positions at once, independently."""
    keys = batch.keys[:, : logits.shape[1]]
    return draw_independently(
        logits, batch.rules, keys, vocab=vocab, wants_probs=batch.wants_probs, all_greedy=batch.all_greedy,
        decided=batch.decided, room=batch.probs_room,
    )  # fmt: skip


def sample_path(
    ids: torch.Tensor, scores: torch.Tensor, batch: DraftBatch, *, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Draw as `sample_block`, along a path: each position draws from its own candidates, given the token before.

    ids: [R, G, K] int64, all different within a position.
    scores: [R, G, K, K] float32, logits of each candidate after each of the position before; at the first position all
        rows are equal. Other tokens have q = 0.
    """
    on_cuda, rules = cuda.fits(scores), batch.rules.typed()
    all_greedy = all_requests_greedy(batch.rules, batch.all_greedy)
    wants_probs = batch.wants_probs and not all_greedy
    if native.fits(scores):
        keys = batch.keys[:, : ids.shape[1]].contiguous()
        drawn, q, confidence = torch.ops.outrider.draw_path(ids.contiguous(), scores.contiguous(), *rules, keys, MIX)
        if not wants_probs:
            return drawn, None, confidence
        return drawn, _kept(q.new_zeros(*ids.shape[:2], vocab_size).scatter_(2, ids, q), batch), confidence
    tokens, probs, sure = [], [], []
    place = batch.anchors.new_zeros(len(ids), 1)
    for k in range(ids.shape[1]):
        row = scores[:, k].take_along_dim(place[:, :, None], 1)[:, 0]
        whole = row.new_full((len(ids), vocab_size), -torch.inf).scatter_(1, ids[:, k], row)
        keys = batch.keys[:, k].contiguous()
        if on_cuda:
            q = torch.empty_like(whole)
            token, _ = cuda.draft_block.draft_step(q, whole, None, None, *rules, keys, None, True, None)
        else:
            token, q = draw_columns(whole, batch.rules, keys, all_greedy=all_greedy)
        place = (ids[:, k] == token[:, None]).long().argmax(1, keepdim=True)
        sure.append(own_confidence(q.gather(1, ids[:, k]), batch.temperatures))
        tokens.append(token)
        if wants_probs:
            probs.append(q)
    return torch.stack(tokens, 1), _kept(torch.stack(probs, 1), batch) if wants_probs else None, torch.stack(sure, 1)


def draw_independently(
    logits: torch.Tensor, rules: Rules, keys: torch.Tensor, *, vocab: torch.Tensor | None, wants_probs: bool,
    all_greedy: bool | None, decided: torch.Tensor | None = None, room: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """Return tokens [R, M], probs [R, M, V'] (None where all are greedy or not wanted) and the largest of each q [R,
    M].

    logits: [R, M, V'], each row drawn from independently. rules: of each request. keys: [R, M] int64.
    all_greedy, decided, room: as in `DraftBatch`, room as its `probs_room`.
    """
    requests, count, width = logits.shape
    each = torch.arange(requests, device=logits.device).repeat_interleave(count)
    keys, rules_of_each = keys.flatten(), rules.of(each)
    if cuda.fits(logits):
        kept = (
            room[:requests] if wants_probs and room is not None else logits.new_empty(logits.shape, dtype=torch.float32)
        )
        q, unread = kept.view(-1, width), None if decided is None else decided[each]
        given = None, None, *rules_of_each.typed(), keys, vocab, wants_probs, unread
        tokens, sure = cuda.draft_block.draft_step(q, logits.reshape(-1, width), *given)
        probs = q.view(requests, count, width) if wants_probs else None
        return tokens.view(requests, count), probs, sure.view(requests, count)
    all_greedy = all_requests_greedy(rules, all_greedy)
    column, q = draw_columns(logits.reshape(-1, width).float(), rules_of_each, keys, vocab, all_greedy)
    tokens = column if vocab is None else vocab[column]
    probs = q.view(requests, count, width) if wants_probs and not all_greedy else None
    if probs is not None and room is not None:
        probs = room[:requests].copy_(probs)
    return tokens.view(requests, count), probs, q.amax(-1).view(requests, count)
