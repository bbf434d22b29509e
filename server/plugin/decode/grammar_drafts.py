"""Drafts that follow the grammars of running requests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.drafters.base import Draft, ForcedTokens

from ..grammars.backend import BoundedGrammar, followed
from .boundary import Boundary


class GrammarDrafts:
    """Drafts of one step. reqs: SGLang's requests. anchors: [R] int64, the last tokens of their answers.

    On a GPU the host does not know the anchors yet, so no drafts follow a grammar there.
    """

    def __init__(self, reqs: Sequence[Any], anchors: torch.Tensor, optional: Boundary):
        self.reqs, self.anchors, self.optional = reqs, anchors, optional
        self.there = anchors.is_cpu and any(req.grammar is not None for req in reqs)

    def forced(self, gamma: int) -> ForcedTokens | None:
        """Return up to `gamma` tokens that each grammar forces; None if no grammar forces any."""
        return self.optional.run("grammars", None, self._forced, gamma) if self.there else None

    def follow(self, draft: Draft, decided: torch.Tensor) -> Draft:
        """Cut the draft before the first token that a grammar refuses and append the tokens that it forces.

        decided: [R] bool, greedy and seeded requests. Other drafts are drawn from q, so a cut that depends on
        the token would change the distribution.
        """
        return self.optional.run("grammars", draft, self._follow, draft, decided) if self.there else draft

    def _grammars(self) -> Iterator[tuple[int, BoundedGrammar]]:
        """Yield place and grammar of each request that has a grammar and does not think first."""
        for place, (req, anchor) in enumerate(zip(self.reqs, self.anchors.tolist(), strict=True)):
            grammar = followed(req.grammar)
            if isinstance(grammar, BoundedGrammar) and grammar.accepted_tokens[-1:] == [anchor] and grammar.drafts:
                yield place, grammar

    def _forced(self, gamma: int) -> ForcedTokens | None:
        tokens = torch.zeros(len(self.reqs), gamma, dtype=torch.int64)
        lens, confidence = torch.zeros_like(self.anchors), torch.zeros(len(self.reqs), gamma)
        for place, grammar in self._grammars():
            with grammar.forced.budget:
                forced = grammar.forced.tokens(grammar.matcher, grammar.accepted_tokens, gamma)
            if count := len(forced.tokens):
                tokens[place, :count] = torch.tensor(forced.tokens)
                confidence[place, :count] = torch.tensor(forced.chances)
                lens[place] = count
        return ForcedTokens(tokens, lens, confidence) if bool(lens.any()) else None

    def _follow(self, draft: Draft, decided: torch.Tensor) -> Draft:
        by_grammar = None if draft.by_grammar is None else draft.by_grammar.tolist()
        width = draft.tokens.shape[1] if draft.probs is None else draft.probs.shape[1]
        lens, tokens, confidence = draft.lens.tolist(), draft.tokens.clone(), draft.confidence.clone()
        for place, grammar in self._grammars():
            if not lens[place] or not decided[place] or (by_grammar is not None and by_grammar[place]):
                continue
            drafted = tokens[place, : lens[place]].tolist()
            with grammar.forced.budget:
                answer, most = grammar.accepted_tokens, width - len(drafted)
                allowed, more = grammar.forced.after(grammar.matcher, answer, drafted, most)
            lens[place] = end = allowed + len(more.tokens)
            if more.tokens:
                tokens[place, allowed:end] = torch.tensor(more.tokens)
                confidence[place, allowed:end] = torch.tensor(more.chances)
        return replace(draft, lens=torch.tensor(lens), tokens=tokens, confidence=confidence)
