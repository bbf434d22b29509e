"""Training runs of diffusion drafters, in either stage."""

import math
from pathlib import Path

import torch

from ..diffusion.denoise import Schedule
from ..diffusion.model import DiffusionModel
from .batches import TrainingStep
from .forward import FrozenTarget
from .loop import DraftRun, Recipe, learn_from
from .masked import MaskedStep, block_states, mask_blocks, masked_anywhere, masked_at_the_end


class DiffusionRun(DraftRun[DiffusionModel]):
    """Stage I, or stage II if `alpha` is given. Without a decay, masks alone weigh positions."""

    decay = math.inf

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

    def batch(self, step: TrainingStep, number: int) -> MaskedStep:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_033 + number)
        blocks, size = len(step.anchors), step.valid.shape[1]
        if self.alpha is None:
            return mask_blocks(step, *masked_anywhere(blocks, size, generator))
        return mask_blocks(step, *masked_at_the_end(blocks, size, self.alpha, generator))

    def learn(self, batch: MaskedStep) -> dict[str, torch.Tensor]:
        step, recipe = batch.step, self.recipe
        hidden = block_states(self.model, self.frozen, step, step.tokens[:, :-1], batch.revealed)
        loss_weights = recipe.losses(self.step)
        return learn_from(self.model, self.frozen, step, hidden, loss_weights, alpha_conf=recipe.alpha_conf)
