"""The conversion's training run: KL to the frozen target along its own answers, resumable like the drafters' runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..training.batches import prefetched
from ..training.forward import FrozenTarget
from ..training.loop import Recipe, TrainingRun
from ..training.loss import LossWeights, draft_loss
from ..training.store import FeatureStore
from .blocks import ConversionStep, Pack, PackMaker, random_steps, rising_masks, usable, whole_blocks
from .denoise import agreement
from .model import ConvertedModel

KL = LossWeights(ce=0.0, tv=0.0, kl=1.0)


class ConversionRun(TrainingRun[ConvertedModel]):
    """streams: how often each block is masked in a step; stops: tokens that end an answer."""

    measured = "agreement"

    def __init__(
        self,
        folder: Path,
        model: ConvertedModel,
        frozen: FrozenTarget,
        recipe: Recipe,
        *,
        streams: int,
        stops: set[int],
    ) -> None:
        super().__init__(folder, model, frozen, recipe)
        self.streams, self.stops = streams, stops
        self.maker = PackMaker(model.layout, model.config.vocab_size, device=frozen.embedding.device)

    def shape(self) -> dict[str, Any]:
        return {**super().shape(), "layout": self.model.layout.name, "rank": self.model.rank}

    def batches(self, store: FeatureStore, numbers: list[int], size: int) -> Iterator[ConversionStep]:
        kept = [number for number in numbers if usable(store, number, self.model.layout)]
        if not kept:
            raise ValueError("no training answer reaches into a whole block after its prompt")
        steps = random_steps(
            store, kept, self.maker, self.stops, sequences=self.recipe.sequences, streams=self.streams,
            seed=self.recipe.seed, step=self.step,
        )  # fmt: skip
        return prefetched(steps) if self.frozen.head.device.type == "cuda" else steps

    def states(self, pack: Pack) -> torch.Tensor:
        """Return the states [N, d] of the rows that predict."""
        model, embedding = self.model, self.frozen.embedding
        hidden, cache = model.read_finished(embedding[pack.ids], pack.spans)
        inputs = model.inputs(embedding, pack.block_ids, pack.masked)
        opened = model.read_open(inputs, pack.starts, cache, pack.tiles)
        return torch.cat([hidden, opened.flatten(0, 1)])[pack.rows]

    def learn(self, batch: ConversionStep) -> dict[str, torch.Tensor]:
        self.model.merge()
        total = sum(len(pack.rows) for pack in batch.packs)
        kl, accept, first = (torch.zeros((), device=self.frozen.head.device) for _ in range(3))
        firsts = torch.zeros((), device=self.frozen.head.device, dtype=torch.int64)
        for pack in batch.packs:
            loss, parts, kept, _ = draft_loss(self.states(pack), None, self.frozen.head, None, pack.labels, KL)
            (loss / total).backward()
            kl += parts[2]
            accept += kept.sum()
            first += (kept * (pack.labels.place == 0)).sum()
            firsts += (pack.labels.place == 0).sum()
        return {"loss": kl / total, "kl": kl / total, "accept": accept / total, "first": first / firsts.clamp_min(1)}

    @torch.no_grad()
    def validate(self, store: FeatureStore, numbers: list[int], which: str) -> float:
        """Print the KL on greedy answers, by column for wholly masked blocks, and shares of tokens that unmask to the
        target's.

        Returns the share at one token a step.
        """
        size = self.model.layout.block_size
        sums, counts = torch.zeros(2, size, dtype=torch.float64), torch.zeros(2, size, dtype=torch.float64)
        right, tokens = [0, 0], 0
        with self.optimiser.averaged():
            self.model.merge()
            chosen = [whole_blocks(store[i], size, self.stops) for i in numbers if usable(store, i, self.model.layout)]
            for number, s in enumerate(chosen):
                generator = torch.Generator().manual_seed(number)
                blocks = self.maker.blocks(s)
                for kind, masks in enumerate((torch.ones(blocks, size) > 0, rising_masks(blocks, size, generator))):
                    pack = self.maker.make([s], [masks[None]])
                    values = self._divergences(pack)
                    sums[kind].index_add_(0, pack.labels.place.cpu(), values.cpu().double())
                    counts[kind] += pack.labels.place.bincount(minlength=size).cpu()
                for i, per_step in enumerate((1, size // 2)):
                    correct, tried = agreement(self.model, self.frozen, pack, per_step)
                    right[i] += correct
                tokens += tried
        self.model.merge()
        overall = float(sums[1].sum() / counts[1].sum())
        shown = " ".join(f"{v:.2f}" for v in (sums[0] / counts[0]).tolist())
        shares = [r / max(1, tokens) for r in right]
        tqdm.write(
            f"step {self.step}, {which}: KL {overall:.3f}, of whole blocks by position {shown}; "
            f"as the target: {shares[0]:.3f} at 1 token a step, {shares[1]:.3f} at {size // 2}"
        )
        return shares[0]

    def _divergences(self, pack: Pack) -> torch.Tensor:
        """Return [N] the KL to the target's stored tokens."""
        out = []
        states = self.states(pack)
        for rows in torch.arange(len(states)).split(512):
            logs = (states[rows] @ self.frozen.head.T).float().log_softmax(-1)
            top = pack.labels.top[rows]
            probs = pack.labels.probs[rows] * (top >= 0)
            out.append((torch.xlogy(probs, probs) - probs * logs.gather(1, top.clamp_min(0))).sum(-1))
        return torch.cat(out)
