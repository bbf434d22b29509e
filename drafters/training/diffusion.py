"""Training runs of diffusion drafters, in either stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..acceptance import Acceptance
from ..diffusion.denoise import Schedule
from ..diffusion.model import DiffusionModel
from .batches import BatchMaker
from .forward import FrozenTarget
from .loop import DraftRun, Recipe, learn_from
from .masked import MaskedStep, block_states, mask_blocks, masked_anywhere, masked_at_the_end
from .resident import training_steps
from .store import FeatureStore, Sequence
from .validate import acceptance, denoised_hits


class DiffusionRun(DraftRun[DiffusionModel]):
    """Stage I, or stage II where there is an `alpha`.

    schedule: of the greedy drafting that is measured.
    """

    def __init__(
        self,
        folder: Path,
        model: DiffusionModel,
        frozen: FrozenTarget,
        recipe: Recipe,
        *,
        schedule: Schedule,
        alpha: float | None = None,
    ) -> None:
        super().__init__(folder, model, frozen, recipe)
        self.schedule, self.alpha = schedule, alpha

    def _maker(self) -> BatchMaker:
        decay = self.recipe.position_decay or float("inf")  # else masks alone decide how positions weigh
        return BatchMaker(self.model.config, self.model.vocab, device=self.frozen.head.device, decay=decay)

    def batches(self, store: FeatureStore, numbers: list[int], size: int) -> Iterator[MaskedStep]:
        recipe = self.recipe
        steps = training_steps(
            store, numbers, self._maker(), sequences=recipe.sequences, anchors=recipe.anchors, size=size,
            seed=recipe.seed, step=self.step,
        )  # fmt: skip
        for number, step in enumerate(steps, self.step):
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_033 + number)
            count = len(step.anchors)
            if self.alpha is None:
                masks = masked_anywhere(count, size, generator)
            else:
                masks = masked_at_the_end(count, size, self.alpha, generator)
            yield mask_blocks(step, *masks)

    def learn(self, batch: MaskedStep) -> dict[str, torch.Tensor]:
        step, recipe = batch.step, self.recipe
        hidden = block_states(self.model, self.frozen, step, step.tokens[:, :-1], batch.revealed)
        loss_weights = recipe.losses(self.step)
        return learn_from(self.model, self.frozen, step, hidden, loss_weights, alpha_conf=recipe.alpha_conf)

    def acceptance(self, sequences: Iterable[Sequence]) -> Acceptance:
        maker = self._maker()
        return acceptance(denoised_hits(self.model, self.frozen, maker.columns, self.schedule), maker, sequences)
