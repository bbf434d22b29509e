"""Random anchors and their blocks (DSpark, section 3.3), packed.

A step takes some sequences whole, projects their context features once, and cuts many blocks from each. A sequence's
blocks are sorted by anchor and attended in tiles. A tile's context ends at its last anchor, plus up to `CONTEXT_ROWS -
1` empty rows, which no block sees.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..block.config import BlockConfig
from ..eagle.config import EagleConfig
from .loss import Labels, position_weights
from .store import FeatureStore, Sequence

T = TypeVar("T")

CPU_TILE, GPU_TILE = 64, 256
"""Blocks attended at a time: as many as a CPU's cache holds; enough to be worth a GPU's launches."""
CONTEXT_ROWS = 64
"""Context is padded to a multiple of this many rows: a CPU compiles the products of every new shape."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The same number of blocks for each of `sequences` contexts, stored one after the other, each of `length` rows.

    first: index of the tile's first block. start: index of its first context row.
    hidden: [sequences, blocks, length] bool, True where a block must not look (positions at or beyond its anchor).
    """

    first: int
    start: int
    hidden: torch.Tensor

    @property
    def blocks(self) -> slice:
        """Its blocks, as a slice of a step's."""
        sequences, blocks, _ = self.hidden.shape
        return slice(self.first, self.first + sequences * blocks)

    @property
    def context(self) -> slice:
        """Its context rows, as a slice of a step's."""
        sequences, _, length = self.hidden.shape
        return slice(self.start, self.start + sequences * length)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One training step: A blocks of `size` predictions over C context rows.

    context, features, positions: [C] token ids, [C, m*d], [C], zeros in empty rows. anchors: [A] token ids.
    anchor_positions: [A]. tokens: [A, size + 1] anchor and true continuation (0 beyond the end). valid: [A, size].
    rows: [N] int64, the labels' positions among all A * size: the valid ones, or all, with weight 0 for invalid ones.
    """

    context: torch.Tensor
    features: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    anchor_positions: torch.Tensor
    tokens: torch.Tensor
    valid: torch.Tensor
    rows: torch.Tensor
    labels: Labels
    tiles: list[Tile]


class BatchMaker:
    """Cuts steps from sequences for one drafter shape.

    decay: of the position weights exp(-(k - 1) / decay); None: the paper's, gamma.
    columns: [V] int64, the draft column of every target token, -1 where the draft vocabulary lacks it.
    columns_there: the same on the device.
    """

    def __init__(
        self,
        config: BlockConfig | EagleConfig,
        vocab: torch.Tensor,
        *,
        device: torch.device,
        decay: float | None = None,
        tile: int | None = None,
    ) -> None:
        self.config, self.device = config, device
        self.tile = tile or (CPU_TILE if device.type == "cpu" else GPU_TILE)
        self.decay = float(config.gamma) if decay is None else decay
        self.columns = torch.full((config.vocab_size,), -1, dtype=torch.int64)
        self.columns[vocab.cpu()] = torch.arange(len(vocab))
        self.columns_there = self.columns.to(device)

    def move(self, x: torch.Tensor) -> torch.Tensor:
        """Copy to the device, without waiting for a GPU."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def cut(self, sequences: list[Sequence], anchors: list[torch.Tensor], size: int) -> TrainingStep:
        """Cut blocks of `size` predictions that follow the given anchor positions of each sequence."""
        parts, tiles = [], []
        row = first = 0
        for s, at in zip(sequences, anchors, strict=True):
            at = at.sort().values
            last = int(at[-1])
            context = context_rows(last)
            before = _filled(s.tokens[:last], context), _filled(s.features[:last], context), torch.arange(context)
            reach = at[:, None] + torch.arange(size + 1)
            inside = reach < len(s.tokens)
            block = s.tokens[reach.clamp_max(len(s.tokens) - 1)] * inside
            answer = (reach[:, 1:] - s.prompt)[inside[:, 1:]]
            parts.append((*before, at, block, inside[:, 1:], s.top_ids[answer], s.top_probs[answer]))
            for piece in at.split(self.tile):
                hidden = torch.arange(context_rows(int(piece[-1]))) >= piece[:, None]
                tiles.append(Tile(first, row, self.move(hidden[None])))
                first += len(piece)
            row += context
        ids, features, positions, anchored, tokens, keep, tops, probs = map(torch.cat, zip(*parts, strict=True))
        weights = position_weights(size, self.decay).expand(len(keep), -1)[keep]
        places = torch.arange(size).expand(len(keep), -1)[keep]
        labels = Labels(
            token=self.move(self.columns[tokens[:, 1:][keep]]),
            top=self.move(self.columns[tops]),
            probs=self.move(probs),
            weight=self.move(weights),
            place=self.move(places),
            blocks=(places == 0).nonzero()[:, 0].tolist(),
        )
        return TrainingStep(
            context=self.move(ids),
            features=self.move(features),
            positions=self.move(positions),
            anchors=self.move(tokens[:, 0]),
            anchor_positions=self.move(anchored),
            tokens=self.move(tokens),
            valid=self.move(keep),
            rows=self.move(keep.flatten().nonzero()[:, 0]),
            labels=labels,
            tiles=tiles,
        )


def context_rows(rows: int) -> int:
    """Round up to a multiple of `CONTEXT_ROWS`."""
    return -(-rows // CONTEXT_ROWS) * CONTEXT_ROWS


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, ...]: `x`, then zeros."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def anchor_range(s: Sequence) -> tuple[int, int]:
    """Return the positions that can be an anchor, first and one past the last: answer tokens followed by a token."""
    return s.prompt, len(s.tokens) - 1


def prefetched(steps: Iterator[T]) -> Iterator[T]:
    """Yield the same steps; a thread makes the next one while one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, steps)
        while True:
            ready = coming.result()
            coming = pool.submit(next, steps)
            yield ready


def drawn_numbers(numbers: list[int], count: int, *, seed: int, step: int) -> Iterator[tuple[list[int], int]]:
    """Yield endless draws from step number `step` on: `count` of these numbers, all of them once an epoch, and a seed.
    TrainingStep i depends on (seed, i) alone, so a resumed run sees the same data as an uninterrupted one."""
    per_epoch, epoch, order = max(1, len(numbers) // count), -1, torch.empty(0)
    while True:
        if epoch != step // per_epoch:
            epoch = step // per_epoch
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed * 7 + epoch))
        at = (step % per_epoch) * count
        yield [numbers[i] for i in order[at : at + count].tolist()], seed * 1_000_003 + step
        step += 1


def random_steps(
    store: FeatureStore,
    numbers: list[int],
    maker: BatchMaker,
    *,
    sequences: int,
    anchors: int,
    size: int,
    seed: int,
    step: int,
) -> Iterator[TrainingStep]:
    """Yield steps of `drawn_numbers`, with up to `anchors` random anchors of each sequence."""
    for chosen, own_seed in drawn_numbers(numbers, sequences, seed=seed, step=step):
        drawn = [store[number] for number in chosen]
        generator, places = torch.Generator().manual_seed(own_seed), []
        for s in drawn:
            low, high = anchor_range(s)
            places.append(low + torch.randperm(high - low, generator=generator)[:anchors])
        yield maker.cut(drawn, places, size)
