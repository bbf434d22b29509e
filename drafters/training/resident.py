"""Training sequences in a GPU's memory, and steps cut there without the host.

Cutting a step of many sequences on the host takes longer than learning from it on a GPU. Here every column of the store
is one tensor on the device. A step is a grid: equally many anchors of every sequence, contexts padded to one length.
"""

from collections.abc import Iterator

import numpy as np
import torch

from .batches import BatchMaker, Tile, TrainingStep, context_rows, drawn_numbers, prefetched, random_steps
from .loss import Labels, position_weights
from .store import FeatureStore

SHARE_OF_MEMORY = 0.7
"""Share of the free memory that a store may take, leaving room for weights, gradients and logits."""
READ_BYTES = 1 << 28


class ResidentStore:
    """All columns of a store on one device; `numbers` as in the store. tokens: [N] int32. features: [N, m*d] bfloat16.
    top_ids, top_probs: [M, K] of the M answer rows."""

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self.entries = list(store.entries)
        columns = {name: _column(store, name, device) for name in store.widths}
        self.tokens, self.top_ids, self.top_probs = (columns[k] for k in ("tokens", "top_ids", "top_probs"))
        kept = columns.get("features", self.tokens.new_empty(len(self.tokens), 0, dtype=torch.int16))
        self.features = kept.view(torch.bfloat16)

    @staticmethod
    def fits(store: FeatureStore, device: torch.device) -> bool:
        """Return True if the device is a GPU that has room for all columns."""
        return device.type == "cuda" and store.bytes < SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]

    def cut(self, numbers: list[int], points: torch.Tensor, maker: BatchMaker, size: int) -> TrainingStep:
        """Cut blocks of `size` predictions that follow the anchors of these S sequences.

        points: [S, A] in [0, 1), the place of the anchor in each of A equal parts of an answer; an answer of less than
            A tokens has some anchors twice. Rows beyond an answer's end have weight 0.
        """
        device, (sequences, blocks) = self.tokens.device, points.shape
        entries = [self.entries[i] for i in numbers]
        long = context_rows(max(e.length for e in entries) - 2)
        places = torch.tensor([[e.start, e.length, e.prompt, e.top] for e in entries])
        start, length, prompt, top = (x[:, None] for x in maker.move(places).unbind(1))
        part = (torch.arange(blocks, device=device) + points) / blocks
        at = torch.minimum(prompt + (part * (length - 1 - prompt)).long(), length - 2)
        rows = torch.arange(long, device=device)
        read = (start + torch.minimum(rows, length - 1)).flatten()
        reach = at[..., None] + torch.arange(size + 1, device=device)
        inside = reach < length[..., None]
        there = torch.minimum(reach, length[..., None] - 1)
        tokens = (self.tokens[(start[..., None] + there).flatten(), 0].view_as(there) * inside).flatten(0, 1).long()
        valid = inside[..., 1:].flatten(0, 1)
        answer = (top[..., None] + there[..., 1:] - prompt[..., None]).flatten()
        columns = maker.columns_there
        weights = position_weights(size, maker.decay, device)
        labels = Labels(
            token=columns[tokens[:, 1:]].flatten(),
            top=columns[self.top_ids[answer].long()],
            probs=self.top_probs[answer].float(),
            weight=(weights * valid).flatten(),
            place=torch.arange(size, device=device).repeat(len(tokens)),
            blocks=list(range(0, len(tokens) * size, size)),
        )
        hidden = rows >= at[..., None]
        return TrainingStep(
            context=self.tokens[read, 0].long(),
            features=self.features[read],
            positions=rows.repeat(sequences),
            anchors=tokens[:, 0],
            anchor_positions=at.flatten(),
            tokens=tokens,
            valid=valid,
            rows=torch.arange(len(tokens) * size, device=device),
            labels=labels,
            tiles=[Tile(0, 0, hidden)],
        )

    def steps(
        self, numbers: list[int], maker: BatchMaker, *, sequences: int, anchors: int, size: int, seed: int, step: int
    ) -> Iterator[TrainingStep]:
        """Yield steps of `drawn_numbers`."""
        generator = torch.Generator(self.tokens.device)
        for chosen, own_seed in drawn_numbers(numbers, sequences, seed=seed, step=step):
            generator.manual_seed(own_seed)
            points = torch.rand(len(chosen), anchors, generator=generator, device=self.tokens.device)
            yield self.cut(chosen, points, maker, size)


def _column(store: FeatureStore, name: str, device: torch.device) -> torch.Tensor:
    """Copy a column of the store to a device, in pieces."""
    dtype, width, length = store.columns[name][0], store.widths[name], store.length_of(name)
    column = torch.empty(length, width, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)
    piece = max(1, READ_BYTES // (width * dtype.itemsize))
    for start in range(0, length, piece):
        stop = min(length, start + piece)
        column[start:stop] = store.read(name, start, stop).to(device)
    return column


def training_steps(store: FeatureStore, numbers: list[int], maker: BatchMaker, **asked: int) -> Iterator[TrainingStep]:
    """Yield endless steps as `random_steps`: cut on a GPU if the store fits, else made ahead by a thread."""
    if ResidentStore.fits(store, maker.device):
        return ResidentStore(store, maker.device).steps(numbers, maker, **asked)
    steps = random_steps(store, numbers, maker, **asked)
    return steps if maker.device.type == "cpu" else prefetched(steps)
