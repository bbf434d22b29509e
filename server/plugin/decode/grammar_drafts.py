"""Drafts that follow the grammars of running requests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outrider.drafters.base import Draft, ForcedTokens
from outrider.drafters.forced_first import forced_instead
from outrider.kernels.upload import upload_together

from ..grammars.backend import BoundedGrammar, followed
from .boundary import Boundary
from .sampling import on_host


class GrammarDrafts:
    """Drafts of one step. reqs: SGLang's requests. anchors: [R] int64, the last tokens of their answers.

    If any request has a grammar, SGLang reads the results of a step before it begins the next one
    (`grammar_needs_sync`), so the grammars have read the anchors, on a GPU too. There the host does not know the
    drafts, so forced tokens take their place, and grammars neither cut nor continue them.
    """

    def __init__(self, reqs: Sequence[Any], anchors: torch.Tensor, optional: Boundary):
        self.reqs, self.anchors, self.optional = reqs, anchors, optional
        self.there, self.on_host = any(req.grammar is not None for req in reqs), on_host(anchors)
        self._instead: ForcedTokens | None = None

    def forced(self, gamma: int) -> ForcedTokens | None:
        """Find up to `gamma` tokens that each grammar forces. Return them for the drafter; None if no grammar forces
        any, and on a GPU, where `follow` inserts them."""
        found = self.optional.run("grammars", None, self._forced, gamma) if self.there else None
        sent = None if found is None else ForcedTokens(*upload_together(found, self.anchors.device))
        if self.on_host:
            return sent
        self._instead = sent
        return None

    def follow(self, draft: Draft, decided: torch.Tensor) -> Draft:
        """Cut the draft before the first token that a grammar refuses and append the tokens that it forces. On a GPU
        insert the tokens of `forced`.

        decided: [R] bool, greedy and seeded requests. Other drafts are drawn from q, so a cut that depends on
        the token would change the distribution.
        """
        if not self.on_host:
            return draft if self._instead is None else forced_instead(draft, self._instead)
        return self.optional.run("grammars", draft, self._follow, draft, decided) if self.there else draft

    def _grammars(self) -> Iterator[tuple[int, BoundedGrammar]]:
        """Yield place and grammar of each request that has a grammar and does not think first."""
        anchors = self.anchors.tolist() if self.on_host else [(req.output_ids or [None])[-1] for req in self.reqs]
        for place, (req, anchor) in enumerate(zip(self.reqs, anchors, strict=True)):
            grammar = followed(req.grammar)
            if isinstance(grammar, BoundedGrammar) and grammar.accepted_tokens[-1:] == [anchor] and grammar.drafts:
                yield place, grammar

    def _forced(self, gamma: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the arrays of `ForcedTokens`."""
        shape = len(self.reqs), gamma
        tokens, lens = np.zeros(shape, dtype=np.int64), np.zeros(shape[0], dtype=np.int64)
        confidence = np.zeros(shape, dtype=np.float32)
        for place, grammar in self._grammars():
            with grammar.forced.budget:
                forced = grammar.forced.tokens(grammar.matcher, grammar.accepted_tokens, gamma)
            if count := len(forced.tokens):
                tokens[place, :count], confidence[place, :count], lens[place] = forced.tokens, forced.chances, count
        return (tokens, lens, confidence) if lens.any() else None

    def _follow(self, draft: Draft, decided: torch.Tensor) -> Draft:
        by_grammar = None if draft.by_grammar is None else draft.by_grammar.tolist()
        width = draft.tokens.shape[1] if draft.probs is None else draft.probs.shape[1]
        lens, tokens, confidence = draft.lens.tolist(), draft.tokens.clone(), draft.confidence.clone()
        for place, grammar in self._grammars():
            if not lens[place] or not decided[place] or (by_grammar is not None and by_grammar[place]):
                continue
            drafted = tokens[place, : lens[place]].tolist()
            with grammar.forced.budget:
                allowed, more = grammar.forced.after(grammar.matcher, grammar.accepted_tokens, drafted, width)
            lens[place] = end = allowed + len(more.tokens)
            if more.tokens:
                tokens[place, allowed:end] = torch.tensor(more.tokens)
                confidence[place, allowed:end] = torch.tensor(more.chances)
        return replace(draft, lens=torch.tensor(lens), tokens=tokens, confidence=confidence)
