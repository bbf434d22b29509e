"""Stage 3: the training loop, resumable after a kill."""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from tqdm import tqdm

from outrider.storage.replacing import replacing

from ..block.config import BlockConfig
from ..block.model import BlockModel, DraftModel, TrainedModel
from ..diffusion.denoise import Schedule
from ..eagle.model import EagleModel
from ..networks import network_of
from .batches import BatchMaker, TrainingStep
from .deadline import NEVER, Deadline
from .forward import FrozenTarget, hidden_states
from .loss import LossWeights, draft_loss
from .optimise import Optimiser, learning_rate
from .paths import path_loss
from .resident import training_steps
from .store import FeatureStore
from .validate import acceptance, hits_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("step", "anchors", "seconds", "loss", "ce", "tv", "kl", "confidence", "accept", "first", "norm", "rate")
LOG_EVERY = 20
"""Steps per row of losses.csv."""
SEEN = ", trained on"
"""Suffix of the second column of `TrainingRun.measured`."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of a training run.

    short_block, short_steps: the first steps train blocks of `short_block` predictions, which shows the drafter more
        than twice as many anchors in the same time.
    decay_steps: the last steps, over which the learning rate falls to 0.
    decay_minutes: the same by the clock, before the run's deadline.
    alpha_ce, alpha_tv, alpha_conf: equation 12. The cross entropy starts at `alpha_ce_start` and reaches `alpha_ce`
        after `alpha_ce_steps`: total variation alone has almost no gradient while the draft distribution is flat.
    alpha_kl, kl_falloff, survival: as in `LossWeights`; the divergence rises from 0 in the same steps.
    position_decay: of the position weights exp(-(k - 1) / position_decay); None: gamma, as in the paper.
    ema: measure and save running means of the weights, which forget with this factor a step; 0: the last weights.
    """

    steps: int
    sequences: int = 4
    anchors: int = 64
    lr: float = 1.5e-3
    weight_decay: float = 0.01
    warmup: int = 100
    decay_steps: int = 500
    decay_minutes: float = 0.0
    short_block: int = 3
    short_steps: int = 0
    alpha_ce: float = 0.1
    alpha_ce_start: float = 1.0
    alpha_ce_steps: int = 500
    alpha_tv: float = 0.9
    alpha_kl: float = 0.0
    kl_falloff: float = 0.0
    survival: bool = False
    position_decay: float | None = None
    ema: float = 0.0
    alpha_conf: float = 1.0
    seed: int = 0
    validate_every: int = 500
    save_seconds: float = 120.0

    def block(self, step: int, gamma: int) -> int:
        """Return the predictions per block at a step."""
        return min(self.short_block, gamma) if step < self.short_steps else gamma

    def losses(self, step: int) -> LossWeights:
        done = min(1.0, step / self.alpha_ce_steps) if self.alpha_ce_steps else 1.0
        return LossWeights(
            ce=self.alpha_ce_start * (1 - done) + self.alpha_ce * done,
            tv=self.alpha_tv,
            kl=self.alpha_kl * done,
            kl_falloff=self.kl_falloff,
            survival=self.survival,
        )


def learn_from(
    model: TrainedModel, frozen: FrozenTarget, step: TrainingStep, hidden: torch.Tensor, loss_weights: LossWeights, *,
    alpha_conf: float
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Run backward from the hidden states [A, size, d] of a step's blocks; losses are means over weighted positions.

    A drafter that draws paths learns its candidates and its paths; the scalars are of the paths.
    Returns scalars that are still on the device, so that a step does not wait.
    """
    head, labels = model.markov_head, step.labels
    latent = head.latents(step.tokens[:, :-1], hidden).flatten(0, 1)[step.rows] if head else None
    kept = hidden.flatten(0, 1)[step.rows]
    w2 = head.w2.weight if head else None
    loss, parts, accept, weights = draft_loss(kept, latent, frozen.head, w2, labels, loss_weights)
    total = weights.sum()
    if isinstance(model, BlockModel) and model.selector is not None:
        of_path, parts, accept = path_loss(model, frozen, step, hidden, loss_weights)
        loss = loss + of_path
    conf = torch.zeros((), device=loss.device)
    if model.confidence_head is not None:
        previous = head.w1(step.tokens[:, :-1]).flatten(0, 1)[step.rows] if head else kept
        logits = model.confidence_head(kept, previous).float()
        losses = F.binary_cross_entropy_with_logits(logits, accept.clamp(0, 1), reduction="none")
        conf = (weights * losses).sum()  # equation 11
    ((loss + alpha_conf * conf) / total).backward()
    return {
        "loss": (loss + alpha_conf * conf).detach() / total,
        "ce": parts[0] / total,
        "tv": parts[1] / total,
        "kl": parts[2] / total,
        "confidence": conf.detach() / total,
        "accept": (accept * (labels.weight > 0)).sum() / (labels.weight > 0).sum(),
        "first": (accept * (labels.place == 0)).sum() / (labels.place == 0).sum().clamp_min(1),
    }


def checkpoint_model(path: Path) -> DraftModel:
    """Return the float32 drafter inside a run's checkpoint, for exporting a run that has not ended."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    config = BlockConfig.from_json(state["config"])
    model = network_of(config)(config, state["vocab"])
    with torch.no_grad():
        weights = state["optimiser"]["means"] or state["optimiser"]["masters"]
        for p, saved in zip(model.parameters(), weights, strict=True):
            p.copy_(saved)
    return model


Model = TypeVar("Model", bound=TrainedModel)


class TrainingRun(ABC, Generic[Model]):
    """State of a training run in `folder`: checkpoint.pt, losses.csv.

    measured: the column of losses.csv for the result of `validate` on held-out answers. The next column has the result
        on as many answers that are trained on: if the two diverge, more answers help more than more steps.
    """

    measured: str

    def __init__(self, folder: Path, model: Model, frozen: FrozenTarget, recipe: Recipe) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self.frozen, self.recipe = folder, model, frozen, recipe
        self.optimiser = Optimiser(model, lr=recipe.lr, weight_decay=recipe.weight_decay, ema=recipe.ema)
        self.step, self.anchors, self.seconds, self.deadline = 0, 0, 0.0, NEVER
        self.checkpoint, self.csv = folder / "checkpoint.pt", folder / "losses.csv"

    @abstractmethod
    def batches(self, store: FeatureStore, numbers: list[int], size: int) -> Iterator[Any]:
        """Yield steps from the present one on, of blocks of `size` predictions; each has `anchors`."""

    @abstractmethod
    def learn(self, batch: Any) -> dict[str, torch.Tensor]:
        """Compute the gradients of one step; return its logged scalars, still on the device."""

    @abstractmethod
    def validate(self, store: FeatureStore, numbers: list[int], which: str) -> float:
        """Return the quality of the weights that would be saved, on these answers; print details, and `which` they
        are."""

    def shape(self) -> dict[str, Any]:
        """Return the settings that a checkpoint shares with a run that resumes it."""
        return {"config": self.model.config.to_json()}

    def save(self, path: Path | None = None) -> None:
        """Write the checkpoint; it replaces the old one only when it is whole and on disk."""
        path = path or self.checkpoint
        state = {"optimiser": self.optimiser.state_dict(), "step": self.step, "anchors": self.anchors}
        with replacing(path, alone=True) as temporary:
            torch.save({**state, **self.shape(), "vocab": self.model.vocab.cpu(), "seconds": self.seconds}, temporary)

    def resume(self) -> bool:
        """Continue from the checkpoint if there is one; drop rows of the CSV beyond it."""
        if not self.checkpoint.exists():
            return False
        state: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if any(state.get(key) != value for key, value in self.shape().items()):
            raise ValueError(f"{self.checkpoint} is of a model of another shape; use another --out")
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.anchors, self.seconds = state["step"], state["anchors"], state["seconds"]
        if self.csv.exists():
            rows = list(csv.reader(self.csv.open(encoding="utf-8")))
            kept = rows[:1] + [r for r in rows[1:] if int(r[0]) <= self.step]
            with self.csv.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(kept)
        return True

    def log(self, row: dict[str, Any]) -> None:
        columns = (*COLUMNS, self.measured, f"{self.measured}{SEEN}")
        new = not self.csv.exists()
        with self.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(columns)
            writer.writerow([f"{v:.5g}" if isinstance(v, float) else v for v in (row.get(c, "") for c in columns)])

    def train(self, split: AnswerSplit, *, follow: bool = False, deadline: Deadline = NEVER) -> None:
        """Train up to `recipe.steps`, logging means over `LOG_EVERY` steps and keeping a checkpoint from before the
        decay.

        follow: from every checkpoint on, also train on answers that other processes have added to the store.

        Raises OutOfTime, with the checkpoint written, where the deadline comes first.
        """
        recipe, store, self.deadline = self.recipe, split.store, deadline
        if not split.training:
            raise ValueError("no training sequences: give more prompts, or a smaller --validation")
        batches, size, saved, means = None, 0, time.monotonic(), Means()
        config = self.model.config
        with tqdm(total=recipe.steps, initial=self.step, desc=f"train {config.kind}", unit="step") as progress:
            while self.step < recipe.steps:
                began = time.monotonic()
                if batches is None or size != recipe.block(self.step, config.gamma):
                    size = recipe.block(self.step, config.gamma)
                    batches = self.batches(store, split.training, size)
                means.add(self.update(next(batches)))
                self.seconds += time.monotonic() - began
                progress.update()
                if self.step % LOG_EVERY == 0:
                    self._report(means.take(), split, progress)
                if self.step == recipe.steps - recipe.decay_steps:
                    self.save(self.folder / "before-decay.pt")
                late = deadline.passed
                if late or time.monotonic() - saved > recipe.save_seconds or self.step == recipe.steps:
                    self.save()
                    saved = time.monotonic()
                    if follow and store.grow():
                        batches = None
                if late and self.step < recipe.steps:
                    deadline.check()

    def _rate(self, step: int) -> float:
        recipe = self.recipe
        rate = learning_rate(step, recipe.steps, warmup=recipe.warmup, decay_steps=recipe.decay_steps)
        return rate * min(1.0, self.deadline.minutes_left / recipe.decay_minutes) if recipe.decay_minutes else rate

    def update(self, batch: Any) -> dict[str, torch.Tensor]:
        """Train on one batch; return its logged scalars, still on the device."""
        row = self.learn(batch)
        row["norm"] = self.optimiser.step(self._rate(self.step))
        self.step += 1
        self.anchors += len(batch.anchors)
        return row

    def _report(self, means: dict[str, Any], split: AnswerSplit, progress: tqdm) -> None:
        """Log these means, and validate where it is due."""
        progress.set_postfix_str(f"first {means['first']:.3f} accept {means['accept']:.3f}")
        means |= {
            "step": self.step,
            "anchors": self.anchors,
            "seconds": self.seconds,
            "rate": self._rate(self.step - 1),
        }
        if self.step % self.recipe.validate_every == 0 or self.step == self.recipe.steps:
            for numbers, which, suffix in ((split.held_out, "held out", ""), (split.seen, "trained on", SEEN)):
                if numbers:
                    means[self.measured + suffix] = self.validate(split.store, numbers, which)
        self.log(means)


class AnswerSplit:
    """A store's sequences: held out by `rule`, trained on, and as many greedy ones of the latter (`seen`)."""

    def __init__(self, store: FeatureStore, rule: Callable[[FeatureStore], list[int]]) -> None:
        self.store, self._rule = store, rule
        self.seen = [i for i in self.training if store.entries[i].temperature == 0][: len(self.held_out)]

    @property
    def held_out(self) -> list[int]:
        return self._rule(self.store)

    @property
    def training(self) -> list[int]:
        hidden = set(self.held_out)
        return [i for i in range(len(self.store)) if i not in hidden]


class Means:
    """Means of logged scalars over some steps; the sums stay on the device."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.steps = 0

    def add(self, row: dict[str, torch.Tensor]) -> None:
        self.sums = {key: self.sums[key] + value if key in self.sums else value for key, value in row.items()}
        self.steps += 1

    def take(self) -> dict[str, Any]:
        """Return the means and start counting anew."""
        means = {key: float(total) / self.steps for key, total in self.sums.items()}
        self.sums, self.steps = {}, 0
        return means


class DraftRun(TrainingRun[Model]):
    """Training of a drafter.

    schedule: of the greedy drafting that is measured, where it denoises. decay: of the position weights, unless the
        recipe has one; None: gamma.
    """

    measured = "tau"
    schedule: Schedule | None = None
    decay: float | None = None

    def maker(self) -> BatchMaker:
        """Return the maker that cuts steps for this drafter."""
        decay = self.recipe.position_decay or self.decay
        return BatchMaker(self.model.config, self.model.vocab, device=self.frozen.head.device, decay=decay)

    def batch(self, step: TrainingStep, number: int) -> Any:
        """Return the batch that step `number` trains on, made of these blocks."""
        return step

    def batches(self, store: FeatureStore, numbers: list[int], size: int) -> Iterator[Any]:
        recipe = self.recipe
        steps = training_steps(
            store, numbers, self.maker(), sequences=recipe.sequences, anchors=recipe.anchors, size=size,
            seed=recipe.seed, step=self.step
        )  # fmt: skip
        return (self.batch(step, number) for number, step in enumerate(steps, self.step))

    def validate(self, store: FeatureStore, numbers: list[int], which: str) -> float:
        """Return tau on greedy answers, of the weights that would be saved."""
        maker = self.maker()
        with self.optimiser.averaged():
            hits = hits_of(self.model, self.frozen, maker.columns, self.schedule)
            result = acceptance(hits, maker, (store[i] for i in numbers))
        shown = " ".join("-" if c is None else f"{c:.2f}" for c in result.conditional)
        tqdm.write(f"step {self.step}, {which}: tau {result.accepted_length:.3f}, by position {shown}")
        return result.accepted_length


Reader = TypeVar("Reader", bound=BlockModel | EagleModel)


class ReaderRun(DraftRun[Reader]):
    """Training of a drafter that reads the target's hidden states."""

    def learn(self, batch: TrainingStep) -> dict[str, torch.Tensor]:
        hidden = hidden_states(self.model, self.frozen, batch, batch.valid.shape[1])
        losses = self.recipe.losses(self.step)
        return learn_from(self.model, self.frozen, batch, hidden, losses, alpha_conf=self.recipe.alpha_conf)


def plot_losses(table: Path, figure: Figure) -> None:
    """Draw losses.csv: losses left, acceptance and validation right, over the anchors trained on."""
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure.set_size_inches(10, 4)
    axes = figure.subplots(1, 2)
    anchors = [int(r["anchors"]) for r in rows]
    for name in ("ce", "tv", "kl", "confidence"):
        if rows[0][name]:
            axes[0].plot(anchors, [float(r[name]) for r in rows], label=name)
    axes[0].set_ylabel("loss per position")
    axes[1].plot(anchors, [float(r["first"]) for r in rows], label="c* of the first position")
    axes[1].plot(anchors, [float(r["accept"]) for r in rows], label="mean c*")
    for measured in list(rows[0])[len(COLUMNS) :]:
        if points := [(int(r["anchors"]), float(r[measured])) for r in rows if r[measured]]:
            label = measured if measured.endswith(SEEN) else f"{measured}, held out"
            axes[1].plot(*zip(*points, strict=True), "o-", label=label)
    for axis in axes:
        axis.set_xlabel("anchors")
        axis.legend()
