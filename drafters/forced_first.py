"""Replace drafts by tokens that a grammar forces."""

from dataclasses import replace

import torch

from .base import Draft, ForcedTokens


def forced_first(lookup: Draft, forced: ForcedTokens) -> Draft:
    """Replace lookups of R requests by forced tokens where these disagree and are at least as likely.

    A lookup that begins with all forced tokens stays, with its tokens after them. Both are point masses, known before
    any token is drawn.
    """
    there = forced.lens > 0
    beyond = torch.arange(forced.tokens.shape[1]) >= forced.lens[:, None]
    agrees = (lookup.lens >= forced.lens) & ((lookup.tokens == forced.tokens) | beyond).all(1)
    better = there & ~agrees & (forced.confidence[:, 0] >= lookup.confidence[:, 0])
    confidence = torch.where((there & agrees)[:, None], lookup.confidence.maximum(forced.confidence), lookup.confidence)
    return replace(
        lookup,
        tokens=torch.where(better[:, None], forced.tokens, lookup.tokens),
        lens=torch.where(better, forced.lens, lookup.lens),
        confidence=torch.where(better[:, None], forced.confidence, confidence),
        across=None if lookup.across is None else lookup.across & ~better,
        by_grammar=better,
    )


def forced_instead(draft: Draft, forced: ForcedTokens) -> Draft:
    """Replace drafts of R requests by forced tokens wherever there are any; on any device, without waiting.

    The drafts may already be drawn, so they must not decide. q of forced tokens is a point mass on each.
    """
    better = forced.lens > 0
    points = better if draft.points is None else draft.points | better
    return replace(
        draft,
        tokens=torch.where(better[:, None], forced.tokens, draft.tokens),
        lens=torch.where(better, forced.lens, draft.lens),
        confidence=torch.where(better[:, None], forced.confidence, draft.confidence),
        looked_up=better if draft.looked_up is None else draft.looked_up | better,
        points=None if draft.probs is None else points,
        across=None if draft.across is None else draft.across & ~better,
        by_grammar=better,
    )
