"""Small diffusion drafters that have observed three texts."""

import torch
from tiny_drafters import DIFFUSION, make_diffusion

from outrider.drafters.base import Features
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.diffusion.drafter import DiffusionDrafter

LENGTHS = (9, 30, 1)
GAMMA = DIFFUSION.gamma


def make(config: BlockConfig, steps: int = 1, slots: int = 4096) -> DiffusionDrafter:
    model = make_diffusion(config)
    embedding, head = torch.randn(2, config.vocab_size, config.hidden_size)
    made = DiffusionDrafter(model, embedding=embedding, head=0.5 * head, denoising_steps=steps)
    made.allocate(slots)
    return made


def text(length: int, seed: int) -> torch.Tensor:
    return torch.randint(96, (length,), generator=torch.Generator().manual_seed(seed))


def page_table(rows: int = 4, context: int = 48, seed: int = 5) -> torch.Tensor:
    order = 1 + torch.randperm(4095, generator=torch.Generator().manual_seed(seed))
    return order[: rows * context].view(rows, context).to(torch.int32)


def observe(to: DiffusionDrafter, table: torch.Tensor, row: int, ids: torch.Tensor, start: int, stop: int) -> None:
    positions = torch.arange(start, stop)
    to.observe(Features(None, ids[start:stop], positions, table[row, start:stop].long()))


def observed(config: BlockConfig, steps: int = 1) -> tuple[DiffusionDrafter, torch.Tensor]:
    made, table = make(config, steps), page_table()
    for row, length in enumerate(LENGTHS):
        observe(made, table, row, text(length, row), 0, length)
    return made, table
