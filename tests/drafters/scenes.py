"""Small drafters of every network, and the texts that they read."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import tiny_eagle
import tiny_mtp
import torch
from margins import assert_near
from tiny_drafters import (
    CONFIGS,
    DIFFUSIONS,
    PATHS,
    TERMS,
    TINY,
    WIDE_PATHS,
    batch,
    check_history_is_forgotten,
    make_diffusion,
    make_drafter,
    make_target,
)

from outrider.drafters.base import DraftBatch, Features
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.diffusion.drafter import DiffusionDrafter
from outrider.drafters.eagle.drafter import EagleDrafter
from outrider.drafters.mtp.drafter import MtpDrafter
from outrider.drafters.training.batches import BatchMaker, TrainingStep
from outrider.drafters.training.store import Sequence

GAMMA, SLOTS, CONTEXT, VOCAB = TINY.gamma, 4096, 48, TINY.vocab_size
LENGTHS = (9, 30, 1)
"""Tokens of the texts that `Scene.observed` shows."""
BLOCKS = CONFIGS | PATHS | WIDE_PATHS
STEPS = (1, 2, 4)
DENOISERS = {f"{name} in {steps} steps": (config, steps) for name, config in DIFFUSIONS.items() for steps in STEPS}
HEADS = {f"eagle {layout}": layout for layout in tiny_eagle.LAYOUTS}
LAYERS = {f"mtp {layout}": layout for layout in tiny_mtp.LAYOUTS}
ENCODERS = [*DENOISERS, *HEADS, *LAYERS]
DEVICE = " on a device"
"""End of a scene's name with the drafter working as on a GPU."""


def text(row: int, length: int = CONTEXT) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(row))


def pages(rows: int = 4, context: int = CONTEXT, *, slots: int = SLOTS, seed: int = 5) -> torch.Tensor:
    """A page table with slots in random order; slot 0 is unused."""
    order = 1 + torch.randperm(slots - 1, generator=torch.Generator().manual_seed(seed))
    return order[: rows * context].view(rows, context).int()


def eagle_target(layout: str, **others: Any) -> Any:
    return _target(tiny_eagle.flat(layout)["hidden_size"], model_type="llama", **others)


def mtp_target(layout: str, **others: Any) -> Any:
    return _target(tiny_mtp.width_of(layout), **others)


def _target(size: int, **others: Any) -> Any:
    embedding, head = torch.randn(2, VOCAB, size, generator=torch.Generator().manual_seed(7))
    config = {"hidden_size": size, "num_hidden_layers": 6, "vocab_size": VOCAB} | others
    return make_target(SimpleNamespace(**config), embedding, head)


def make_denoiser(config: BlockConfig, steps: int = 1, slots: int = SLOTS) -> DiffusionDrafter:
    model = make_diffusion(config)
    embedding, head = torch.randn(2, config.vocab_size, config.hidden_size)
    made = DiffusionDrafter(model, embedding=embedding, head=0.5 * head, denoising_steps=steps)
    made.allocate(slots)
    return made


@dataclass(frozen=True)
class Scene:
    """create: creates a drafter. width: of the target's states that it reads; 0: it reads none. on_device: it works as
    on a GPU."""

    create: Callable[[], Any]
    width: int
    on_device: bool = False

    @classmethod
    def named(cls, name: str, folder: Path) -> Self:
        """name: a key of BLOCKS, DENOISERS, HEADS or LAYERS, with DEVICE or without. folder: for its checkpoint."""
        on_device, name = name.endswith(DEVICE), name.removesuffix(DEVICE)
        if name in BLOCKS:
            return cls.of_block(BLOCKS[name])
        if name in DENOISERS:
            return cls(partial(make_denoiser, *DENOISERS[name]), 0, on_device)
        if name in HEADS:
            target, saved = eagle_target(HEADS[name]), tiny_eagle.save_eagle(folder, HEADS[name])
            width = len(tiny_eagle.LAYER_IDS) * tiny_eagle.flat(HEADS[name])["hidden_size"]
            return cls(partial(EagleDrafter.load, target, saved, gamma=GAMMA), width, on_device)
        target, saved = mtp_target(LAYERS[name]), tiny_mtp.save_mtp(folder, LAYERS[name])
        return cls(partial(MtpDrafter.load, target, saved, gamma=GAMMA), target.config.hidden_size, on_device)

    @classmethod
    def of_block(cls, config: BlockConfig) -> Self:
        return cls(partial(make_drafter, config, slots=SLOTS), len(config.target_layers) * config.hidden_size)

    def make(self) -> Any:
        """A drafter without texts; the same each time."""
        made = self.create()
        made.allocate(SLOTS)
        return made

    def states(self, row: int) -> torch.Tensor:
        """The target's states [CONTEXT, width] for a text."""
        return torch.randn(CONTEXT, self.width, generator=torch.Generator().manual_seed(100 + row))

    def observe(self, to: Any, table: torch.Tensor, row: int, start: int, stop: int, of: int | None = None) -> None:
        """Show tokens start .. stop of text `of`, by default the row's own."""
        of = row if of is None else of
        hidden = self.states(of)[start:stop] if self.width else None
        ids, slots = text(of, max(stop, CONTEXT))[start:stop], table[row, start:stop].long()
        to.observe(Features(hidden, ids, torch.arange(start, stop), slots))

    def observed(self) -> tuple[Any, torch.Tensor]:
        """A drafter that has read texts of LENGTHS, and its page table."""
        made, table = self.make(), pages()
        for row, length in enumerate(LENGTHS):
            self.observe(made, table, row, 0, length)
        return made, table

    def asked(self, asking: DraftBatch) -> list[tuple[list[int], torch.Tensor]]:
        """Ids with the anchor, and the target's states, of the texts of `observed`."""
        ids = [[*text(row)[:n].tolist(), int(asking.anchors[row])] for row, n in enumerate(LENGTHS)]
        return [(each, self.states(row)[: len(each) - 1]) for row, each in enumerate(ids)]

    def check_drafts(self, reference: Any) -> None:
        """Check greedy drafts and the first q against `reference.draft`."""
        made, table = self.observed()
        asking = batch(table, [0, 1, 2], list(LENGTHS))
        draft = made.propose(asking)
        sampled = made.propose(dataclasses.replace(asking, temperatures=torch.full((3,), 0.7)))
        for row, (ids, states) in enumerate(self.asked(asking)):
            tokens, logits = reference.draft(ids, states, GAMMA)
            assert draft.tokens[row].tolist() == tokens
            assert_near(sampled.probs[row, 0], (logits[0] / 0.7).softmax(-1).float(), TERMS)

    def check_history_is_forgotten(self) -> None:
        def read(drafter: Any, table: torch.Tensor, life: int, row: int, start: int, stop: int) -> None:
            shared = 20 if row == 3 else 0
            if start < shared:
                self.observe(drafter, table, row, start, shared, of=10 * life)
            self.observe(drafter, table, row, max(start, shared), stop, of=10 * life + row)

        check_history_is_forgotten(pages().flatten(), self.make, read)


def drafted_steps(
    config: BlockConfig, temperature: float
) -> tuple[BlockDrafter, torch.Tensor, torch.Tensor | None, TrainingStep]:
    """A block drafter, its drafts and q after texts of several lengths, and a training step on these drafts; greedy
    ones are not in the step."""
    scene = Scene.of_block(config)
    drafter, table = scene.observed()
    asking = batch(table, [0, 1, 2], list(LENGTHS), temperature)
    draft, sequences, none = drafter.propose(asking), [], torch.zeros(config.gamma + 1, 2)
    for row, length in enumerate(LENGTHS):
        later = draft.tokens[row] if temperature else torch.zeros_like(draft.tokens[row])
        text = torch.cat([torch.zeros(length).long(), asking.anchors[row : row + 1], later])
        states = torch.nn.functional.pad(scene.states(row)[:length], (0, 0, 0, config.gamma + 1), value=100.0)
        sequences.append(Sequence(text, length, states, none.long(), none))
    maker = BatchMaker(config, drafter.model.vocab, device=torch.device("cpu"), tile=2)
    step = maker.cut(sequences, [torch.tensor([length]) for length in LENGTHS], config.gamma)
    return drafter, draft.tokens, draft.probs, step
