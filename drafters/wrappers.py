"""Drafters around a drafter model: one buffers observed tokens, one waits until an answer has begun."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from .base import Draft, DraftBatch, Drafter, Features, Prefilled

ROWS = 128
"""Most tokens that wait; larger batches are not cheaper per token."""


class Wrapper(Drafter):
    """A drafter around `model`, which answers every call and attribute that a subclass does not change."""

    def __init__(self, model: Drafter):
        self.model = model
        self.gamma, self.target_layers, self.shortens = model.gamma, model.target_layers, model.shortens
        self.assesses_itself, self.reads_output = model.assesses_itself, model.reads_output
        self.looks_up, self.corpora = model.looks_up, model.corpora

    def allocate(self, slots: int) -> None:
        self.model.allocate(slots)

    def slot_state(self) -> list[torch.Tensor]:
        return self.model.slot_state()

    def reserve_probs(self, requests: int) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return self.model.reserve_probs(requests)

    def capture(self, sizes: Sequence[int], page_table: torch.Tensor) -> None:
        self.model.capture(sizes, page_table)

    def observe(self, features: Features) -> None:
        self.model.observe(features)

    def prefilled(self, chunks: Prefilled) -> None:
        self.model.prefilled(chunks)

    def reload(self, checkpoint: str, number: int = 0) -> None:
        self.model.reload(checkpoint, number)

    def drop(self, number: int) -> None:
        self.model.drop(number)

    def look_up(self, batch: DraftBatch) -> Draft:
        return self.model.look_up(batch)


class DeferredObserve(Wrapper):
    """Buffers observed tokens until `propose`, the only reader of the draft state, or until ROWS tokens wait.

    Observing one token costs as much as observing many, since both read the model's weights; a busy server does not
    draft in most steps. Drafts stay the same to the bit.
    """

    def __init__(self, model: Drafter):
        super().__init__(model)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # hidden states; tokens, positions, slots, sets
        self._tokens = 0  # that wait

    def observe(self, features: Features) -> None:
        if features.hidden is None:
            raise ValueError("a drafter model needs the target's hidden states")
        count = len(features.slots)
        if self._tokens + count > ROWS:
            self.flush()
        if count > ROWS:
            self.model.observe(features)
            return
        numbers = features.tokens, features.positions, features.slots, features.sets
        self._waiting.append((features.hidden.clone(), torch.stack([each for each in numbers if each is not None])))
        self._tokens += count

    def propose(self, batch: DraftBatch) -> Draft:
        self.flush()
        return self.model.propose(batch)

    def reload(self, checkpoint: str, number: int = 0) -> None:
        self.flush()
        super().reload(checkpoint, number)

    def drop(self, number: int) -> None:
        self.flush()
        super().drop(number)

    def flush(self) -> None:
        """Pass the waiting tokens to the model. A slot that was freed and reused keeps the state of its latest
        token."""
        if not self._waiting:
            return
        hidden = torch.cat([states for states, _ in self._waiting])
        numbers = torch.cat([each for _, each in self._waiting], 1)
        slots = numbers[2].tolist()
        if len(set(slots)) < len(slots):
            latest = torch.tensor(list({slot: index for index, slot in enumerate(slots)}.values()))
            hidden, numbers = hidden[latest], numbers[:, latest]
        self.model.observe(Features(hidden, *numbers))
        self._waiting, self._tokens = [], 0


class Initialised(Wrapper):
    """`model`, which drafts for answers of at least `tokens` tokens (sequence initialisation: SpecDiff, section 4).

    Shorter answers are left to prompt lookup, or go without drafts: the beginning of an answer depends on the last
    words of the prompt, which a drafter trained on running text knows least. The decision depends on the length of the
    text alone, so it cannot favour an outcome of a draw.
    """

    def __init__(self, model: Drafter, tokens: int):
        super().__init__(model)
        self.tokens = tokens

    def propose(self, batch: DraftBatch) -> Draft:
        if batch.answer_lens is None:
            raise ValueError("sequence initialisation needs to know how long the answers are")
        begun = batch.answer_lens >= self.tokens
        return self.model.propose(
            replace(batch, draft_mask=begun if batch.draft_mask is None else batch.draft_mask & begun)
        )
