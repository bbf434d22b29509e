"""Prefer tokens that a grammar forces to a lookup."""

from dataclasses import replace

import torch

from .base import Draft, ForcedTokens


def forced_first(lookup: Draft, forced: ForcedTokens) -> Draft:
    """The lookups of R requests, replaced by forced tokens where these disagree and are as likely.

    A lookup that begins with all forced tokens goes on after them, so it stays. Both are point masses that are known
    before any token is drawn.
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
