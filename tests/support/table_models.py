"""Drafters with tables as models and chosen draws."""

from unittest import mock

import torch

from outrider.drafters.base import Draft, DraftBatch, Drafter, Features
from outrider.drafters.block import sampling as block_sampling
from outrider.drafters.diffusion.denoise import Schedule, denoise


class TableModel(Drafter):
    """A drafter's model that is a table and draws the tokens in `DraftBatch.keys`.

    q: [gamma, V, V] by position and previous token; a shorter block uses the last ones. confidence: [gamma, V]
    likewise, read before the token is drawn. drawn: after `propose`, each drawn token's chance, by row.
    """

    def __init__(self, q: torch.Tensor, confidence: torch.Tensor, *, shortens: bool = False):
        self.q, self.confidence, self.gamma, self.shortens = q, confidence, len(q), shortens
        self.drawn: dict[int, list[float]] = {}

    def allocate(self, slots: int) -> None:
        pass

    def observe(self, features: Features) -> None:
        pass

    def propose(self, batch: DraftBatch) -> Draft:
        if batch.draft_mask is not None and not bool(batch.draft_mask.all()):
            selected = batch.draft_mask.nonzero()[:, 0]
            if len(selected):
                return self.propose(batch.select(selected)).spread(selected, batch.anchors)
            nothing = torch.zeros(0, self.gamma)
            return Draft(nothing.long(), selected, nothing).spread(selected, batch.anchors)
        depth = self.gamma if batch.depth is None or not self.shortens else min(batch.depth, self.gamma)
        greedy = batch.temperatures <= 0
        previous, tokens, probs, sure, chances = batch.anchors, [], [], [], []
        for q, confidence, drawn in zip(self.q[-depth:], self.confidence[-depth:], batch.keys.T, strict=False):
            sure.append(confidence[previous])
            probs.append(q[previous])
            previous = torch.where(greedy, probs[-1].argmax(1), drawn)
            tokens.append(previous)
            of_drawn = probs[-1].gather(1, drawn[:, None])[:, 0]
            chances.append(torch.where(greedy, (drawn == 0).float(), of_drawn))
        self.drawn |= dict(zip(batch.rows.tolist(), torch.stack(chances, 1).double().tolist(), strict=True))
        made = Draft(
            torch.stack(tokens, 1),
            torch.full_like(batch.anchors, depth),
            torch.stack(sure, 1),
            torch.stack(probs, 1) if batch.wants_probs and not bool(greedy.all()) else None,
            drafting=len(batch.anchors),
        )
        return made.widened(self.gamma)


class DenoisingModel(TableModel):
    """Drafts in several denoising steps; predictions depend on all tokens revealed so far."""

    def __init__(self, gamma: int, vocabulary: int, schedule: Schedule, seed: int = 0):
        super().__init__(torch.zeros(gamma, vocabulary, vocabulary), torch.zeros(gamma, vocabulary))
        self.vocabulary, self.schedule, self.seed = vocabulary, schedule, seed

    def propose(self, batch: DraftBatch) -> Draft:
        if batch.draft_mask is not None and not bool(batch.draft_mask.all()):
            return super().propose(batch)
        drawn_from: list[torch.Tensor] = []

        def draw(q: torch.Tensor, keys: torch.Tensor, vocab: torch.Tensor | None) -> torch.Tensor:
            drawn_from.append(q.view(len(batch.anchors), -1, self.vocabulary))
            return keys

        with mock.patch.object(block_sampling, "gumbel_argmax", draw):
            tokens, probs, confidence = denoise(
                lambda tokens, revealed, columns: self._predict(batch.anchors, tokens, revealed, columns),
                self.schedule, batch.rules, batch.keys[:, : self.gamma], vocab=None, wants_probs=batch.wants_probs,
            )  # fmt: skip
        chances = torch.cat(drawn_from, 1).gather(2, batch.keys[:, : self.gamma, None])[:, :, 0]
        self.drawn |= dict(zip(batch.rows.tolist(), chances.double().tolist(), strict=True))
        lens = torch.full_like(batch.anchors, self.gamma)
        return Draft(tokens, lens, confidence, probs, drafting=len(batch.anchors))

    def _predict(
        self, anchors: torch.Tensor, tokens: torch.Tensor, revealed: torch.Tensor, columns: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random logits [R, M, V] and chances [R, M], a function of the state."""
        states = torch.cat([anchors[:, None], tokens.where(revealed, self.vocabulary)], 1).tolist()
        rows = [torch.Generator().manual_seed(hash((self.seed, *state)) % 2**31) for state in states]
        numbers = torch.stack([torch.randn(self.gamma, self.vocabulary + 1, generator=row) for row in rows])[:, columns]
        return 1.5 * numbers[..., :-1], (2 * numbers[..., -1]).sigmoid()
