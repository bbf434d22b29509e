"""Training batches: finished rows of some answers, their blocks with random masks, and the labels of each row.

Every block of an answer is masked `streams` times over the same finished rows, which never see an open block. A step's
sequences go through the model in packs of bounded size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..training.batches import CPU_TILE, GPU_TILE, Tile, drawn_numbers
from ..training.loss import Labels
from ..training.store import FeatureStore, Sequence
from .layout import Layout

CPU_ROWS, GPU_ROWS = 1024, 32768
"""Rows of a pack: enough to fill the products on a CPU, and as many as fit a GPU's memory."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences that go through the model together: C finished rows, A open blocks of B.

    ids: [C]. spans: first row and length of each sequence. starts: [A] positions. block_ids: [A, B] the true tokens.
    masked: [A, B] bool.
    rows: [N] the row that predicts each label: a finished row or, from C on, one of the A * B open ones.
    labels: `labels.place` is the column of the block that is predicted.
    whole: [A] bool, blocks without a prompt's token.
    """

    ids: torch.Tensor
    spans: list[tuple[int, int]]
    starts: torch.Tensor
    block_ids: torch.Tensor
    masked: torch.Tensor
    tiles: list[Tile]
    rows: torch.Tensor
    labels: Labels
    whole: torch.Tensor
    before: torch.Tensor
    """[A] the finished row before each block."""


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """The packs of one optimiser step; `anchors` are its blocks."""

    packs: list[Pack]

    @property
    def anchors(self) -> range:
        return range(sum(len(pack.starts) for pack in self.packs))


def rising_masks(blocks: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return [blocks, size] bool: column c is masked with probability 1 - (1 - t)^(c + 1), at least one column per
    block.

    Each block has its own t, spread evenly over 0 .. 1. Later columns are masked more often, as in decoding. At size 4,
    two blocks in five are masked whole, as at the start of decoding.
    """
    t = (torch.randperm(blocks, generator=generator) + torch.rand(blocks, generator=generator)) / max(1, blocks)
    chance = 1 - (1 - t[:, None]) ** (1 + torch.arange(size))
    masked = torch.rand(blocks, size, generator=generator) < chance
    masked[~masked.any(1), -1] = True
    return masked


def usable(store: FeatureStore, number: int, layout: Layout) -> bool:
    """Return True if an answer has a whole block after its prompt and contains no mask."""
    entry = store.entries[number]
    long_enough = entry.length // layout.block_size * layout.block_size > entry.prompt > 0
    return long_enough and layout.mask_token_id not in store[number].tokens


def whole_blocks(s: Sequence, size: int, stops: set[int]) -> Sequence:
    """Return the answer up to a multiple of the block size: padded with its stop token if it has ended, else cut."""
    last = int(s.tokens[-1])
    if last not in stops:
        return s.first(len(s.tokens) // size * size)
    missing, answer = -len(s.tokens) % size, len(s.top_ids)
    ids, probs = (F.pad(x, (0, 0, 0, missing)) for x in (s.top_ids, s.top_probs))
    ids[answer:, 0], probs[answer:, 0] = last, 1.0
    return replace(s, tokens=F.pad(s.tokens, (0, missing), value=last), top_ids=ids, top_probs=probs)


class PackMaker:
    """Makes packs for one layout; vocab_size: V of the target."""

    def __init__(self, layout: Layout, vocab_size: int, *, device: torch.device, tile: int | None = None) -> None:
        self.layout, self.device = layout, device
        self.tile = tile or (CPU_TILE if device.type == "cpu" else GPU_TILE)
        self.columns = torch.arange(vocab_size)
        self.columns[layout.mask_token_id :] -= 1
        self.columns[layout.mask_token_id] = -1

    def make(self, sequences: list[Sequence], masks: list[torch.Tensor]) -> Pack:
        """Make one pack; masks: [streams, blocks, B] bool of each sequence. Prompt tokens are never masked."""
        size, shift = self.layout.block_size, self.layout.shift
        finished = sum(len(s.tokens) for s in sequences)
        spans, tiles, row, first = [], [], 0, 0
        parts: dict[str, list[torch.Tensor]] = {
            n: [] for n in ("starts", "block_ids", "masked", "whole", "before", "rows", "answer", "token", "place")
        }
        for s, drawn in zip(sequences, masks, strict=True):
            streams, length = drawn.shape[0], len(s.tokens)
            starts = torch.arange(s.prompt // size * size, length, size).repeat_interleave(streams)
            reach = starts[:, None] + torch.arange(size)
            answer = reach >= s.prompt
            masked = drawn.transpose(0, 1).reshape(-1, size) & answer
            wanted = masked.clone()
            number = first + torch.arange(len(starts))
            predicts = finished + number[:, None] * size + torch.arange(size)
            if shift:
                predicts = torch.cat([row + starts[:, None] - 1, predicts[:, :-1]], 1)
                wanted[:, 0] = answer[:, 0] & (torch.arange(len(starts)) % streams == 0)  # once, whatever is masked
            for key, value in (
                ("starts", starts), ("block_ids", s.tokens[reach]), ("masked", masked), ("whole", answer.all(1)),
                ("before", row + starts - 1), ("rows", predicts[wanted]), ("token", s.tokens[reach[wanted]]),
                ("place", torch.arange(size).expand_as(reach)[wanted]),
            ):  # fmt: skip
                parts[key].append(value)
            parts["answer"].append(reach[wanted] - s.prompt)
            for piece in starts.split(self.tile):
                hidden = (torch.arange(int(piece[-1])) >= piece[:, None]).to(self.device)
                tiles.append(Tile(first, row, hidden[None]))
                first += len(piece)
            spans.append((row, length))
            row += length
        answers, tokens = parts.pop("answer"), torch.cat(parts.pop("token"))
        tops = torch.cat([s.top_ids[at] for s, at in zip(sequences, answers, strict=True)])
        probs = torch.cat([s.top_probs[at] for s, at in zip(sequences, answers, strict=True)])
        joined = {name: torch.cat(values).to(self.device) for name, values in parts.items()}
        labels = Labels(
            token=self.columns[tokens].to(self.device),
            top=self.columns[tops].to(self.device),
            probs=probs.to(self.device),
            weight=torch.ones(len(tops), device=self.device),
            place=joined.pop("place"),
            blocks=list(range(len(tops))),
        )
        ids = torch.cat([s.tokens for s in sequences]).to(self.device)
        return Pack(ids=ids, spans=spans, tiles=tiles, labels=labels, **joined)

    def packs(self, sequences: Iterable[Sequence], masks: Iterable[torch.Tensor]) -> list[Pack]:
        """Make packs of at most CPU_ROWS or GPU_ROWS rows, unless one sequence alone is longer."""
        most = CPU_ROWS if self.device.type == "cpu" else GPU_ROWS
        packs: list[tuple[list[Sequence], list[torch.Tensor]]] = []
        used = most
        for s, drawn in zip(sequences, masks, strict=True):
            rows = len(s.tokens) + drawn.numel()
            if used + rows > most:
                packs.append(([], []))
                used = 0
            packs[-1][0].append(s)
            packs[-1][1].append(drawn)
            used += rows
        return [self.make(*pack) for pack in packs]

    def blocks(self, s: Sequence) -> int:
        """Count the blocks that contain a part of an answer."""
        return len(s.tokens) // self.layout.block_size - s.prompt // self.layout.block_size


def random_steps(
    store: FeatureStore, numbers: list[int], maker: PackMaker, stops: set[int], *, sequences: int, streams: int,
    seed: int, step: int,
) -> Iterator[ConversionStep]:  # fmt: skip
    """Yield steps of `drawn_numbers`, in which each block is masked `streams` times."""
    size = maker.layout.block_size
    for chosen, own_seed in drawn_numbers(numbers, sequences, seed=seed, step=step):
        whole = [whole_blocks(store[number], size, stops) for number in chosen]
        generator = torch.Generator().manual_seed(own_seed)
        masks = [rising_masks(streams * maker.blocks(s), size, generator).view(streams, -1, size) for s in whole]
        yield ConversionStep(maker.packs(whole, masks))
