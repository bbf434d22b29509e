"""The learner: it trains the drafter on kept answers and offers candidates that pass the gate. `process.py` runs it.

It may be stopped and continued (SIGSTOP, SIGCONT) or killed at any point: every file is whole, and the next process
continues from them.
"""

import argparse
import contextlib
import json
import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.storage.replacing import replace

from .. import networks
from ..block.model import BlockModel, TrainedModel
from ..commands import shapes, train
from ..commands.arguments import DIFFUSION_STAGES
from ..training.loop import DraftRun, Means
from ..training.start import start_markov
from ..training.store import Sequence
from ..training.target import TargetModel
from .answers import Answer, AnswerReader, ServerState
from .drafters import Drafters, complete, mixed, next_name, offer, prune
from .gate import FIRST_GAIN, Followed, GateVerdict, Patience, compare, enough, gate_after, tau
from .progress import LearnerProgress
from .start import FROM_TARGET, first_drafter, settings
from .supply import MORE, PROMPTS, Item, Supply, general_answers

LEAST_ANSWERS = 24
GENERAL_EVERY, GENERAL_AFTER_LOSS, GENERAL_LOSS = 4, 2, 0.93
"""One step in GENERAL_EVERY trains on a general answer, or one in GENERAL_AFTER_LOSS after a gate where a candidate's
tau on them is below GENERAL_LOSS times the best drafter's. The gate refuses candidates that are much worse."""
MOST_SHARE, GENERAL_AIM, BISECTIONS = 0.75, 0.95, 3
"""A candidate is the first drafter moved by MOST_SHARE of the way to the trained weights, or less: BISECTIONS shares
are tried, to find the largest with GENERAL_AIM of the best drafter's tau on general answers."""
LOOK_EVERY = 20
"""Steps between looks at new answers and at the server's state."""
GATE_TOKENS = 4096
"""Answer tokens that the gate follows, the newest; more where they are of too few prompts."""
PATIENCE, BETTER, GROWTH = 6, 1.005, 1.1
"""After PATIENCE gates in a row with neither a candidate nor a tau of BETTER times the run's best, the learner waits
until its answers have grown by GROWTH."""
READ_AT_ONCE = 16
"""Answers that the target reads at a time."""
PAUSE = 0.5


class Forgotten(Exception):
    """The user deleted the learner's data: it starts anew."""


class Learner:
    """One learner's state. `training` is None before the run begins.

    general: folder of the general answers. patience: of an earlier turn. turn_over: called after every gate if several
    learners take turns; None: this one learns for ever.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        target: TargetModel,
        *,
        general: Path | None = None,
        patience: Patience | None = None,
        turn_over: Callable[[], bool] | None = None,
    ) -> None:
        self.args, self.target, self.folder = args, target, Path(args.folder)
        self.drafters = Drafters(args, target)
        self.patience, self.turn_over = patience or Patience(), turn_over
        for leftover in [*self.folder.glob(".learner.json.*"), *self.folder.glob("run/.lineage.json.*")]:
            leftover.unlink()
        self.progress = LearnerProgress(self.folder)
        self.reader = AnswerReader(self.folder)
        self.unread: list[Answer] = []
        self.training: DraftRun[Any] | None = None
        self.lineage: list[str | None] = []
        with contextlib.suppress(FileNotFoundError):
            self.lineage = json.loads(self._lineage_path.read_text(encoding="utf-8"))
        self.order: list[Item] = []
        self.general_every = GENERAL_EVERY
        self.means = Means()
        self.look_at, self.saved = 0, 0.0
        self.reading, self.stepping = 0.0, 0.0  # seconds of processor time in this process
        self.state = ServerState.read(self.folder)
        self.features = self.folder / "features"
        self.features.mkdir(mode=0o700, exist_ok=True)
        self.general_folder = general or self.features / "general"
        self.made = self.features.stat().st_ino

    def run(self) -> None:
        """Learn for ever, or until the turn is over or no work is left. Raises Forgotten."""
        try:
            self._open()
            self._learn()
        except Exception:
            self._check_forgotten()  # files that were being used are gone
            raise

    def _open(self) -> None:
        """Let the target write the general answers, and open the stored features."""
        self.progress.phase("reading")
        self._write_general()
        self.supply = Supply(self.features, self.target, self._layers(), self.args.most_feature_bytes)
        self.seen = len(self.supply.items)

    def _write_general(self, count: int = PROMPTS) -> None:
        layers, prompts = self._layers(), Path(self.args.general)
        self.general = general_answers(self.general_folder, self.target, layers, prompts, count)

    def _check_forgotten(self) -> None:
        """Raise Forgotten if the features were deleted."""
        if not self.features.exists() or self.features.stat().st_ino != self.made:
            raise Forgotten

    def _learn(self) -> None:
        while True:
            if self.training is None or self.training.step >= self.look_at:
                self._look()
            if reason := self._reason_to_wait():
                if self.progress.numbers.phase != "waiting":
                    self.progress.phase("waiting")
                    self.progress.event("waiting", reason=reason, answers=self.seen, needed=self.patience.wait_for)
                self.progress.tick()
                if self.turn_over is not None:
                    break
                self.look_at = 0
                time.sleep(PAUSE)
                continue
            self.training = self.training or self._begin()
            self.progress.phase("training")
            self._step(self.training)
            if gate_after(self.training.step):
                self._gate(self.training)
                if self.turn_over is not None and self.turn_over():
                    break
            self.progress.tick()
        if self.training is not None:
            self.training.save()

    @property
    def waits(self) -> bool:
        """True if there is no work until more answers come."""
        return self.progress.numbers.phase == "waiting"

    def _layers(self) -> tuple[int, ...]:
        folder = self.drafters.folder_of(self.state.in_use)
        if folder is None:
            return shapes.target_layers(self.args.kind, self.target)
        return networks.layers_of(folder, self.target.config.num_hidden_layers)

    def _look(self) -> None:
        """Read new answers, the newest first, and the server's state. Once a run can begin, reading takes at most as
        much time as training: a short answer takes longer to read than to train on."""
        self._check_forgotten()
        self.look_at = LOOK_EVERY + (self.training.step if self.training else 0)
        self.state = ServerState.read(self.folder)
        refused = bool(set(self.lineage) & set(self.state.refused))
        if self.lineage and (refused or self.state.in_use not in self.lineage):  # neither this run's work nor its start
            self.patience.wait_for = self._more_answers() if refused else 0
            self._drop_run()
        self.unread = self.supply.missing(self.unread + self.reader.read())
        while self.unread and (self.patience.wait_for or self._lacks() or self.reading <= self.stepping):
            self.progress.phase("reading")
            batch, self.unread = self.unread[-READ_AT_ONCE:], self.unread[:-READ_AT_ONCE]
            began, foreign = time.process_time(), self.supply.foreign
            for _ in self.supply.read(batch):
                self._count()
                self.progress.tick()
            self.seen += len(batch)
            self.reading += time.process_time() - began
            self.order = []  # new answers take part at once
            self.progress.event("features", answers=len(batch), foreign=self.supply.foreign - foreign)
        self._count()

    def _count(self) -> None:
        numbers, held = self.progress.numbers, self.supply.held_out
        numbers.held_out, numbers.answers = len(held), len(self.supply.items) - len(held)
        numbers.tokens = sum(item.entry.length for item in self.supply.items)

    def _more_answers(self) -> int:
        return int(self.seen * GROWTH) + 1

    def _lacks(self) -> str:
        """Say which answers a run or its next gate lacks; "" for none."""
        held = self.supply.held_out
        if len(self.supply.items) - len(held) < LEAST_ANSWERS:
            return "too few answers"
        if not enough(len({item.prompt for item in held}), self.progress.numbers.attempts + 1):
            return "too few held-out answers"
        return ""

    def _reason_to_wait(self) -> str:
        if lacks := self._lacks():
            return lacks
        if self.seen < self.patience.wait_for:
            return "no better drafter from these answers"
        if self.patience.wait_for:
            self.patience.wait_for = self.patience.fruitless = 0
            if self.drafters.folder_of(self.state.in_use):
                self._drop_run()  # it did not surpass the drafter in use
        return ""

    @property
    def _lineage_path(self) -> Path:
        """Names of the drafter that the run began with and of its candidates, a JSON list."""
        return self.folder / "run" / "lineage.json"

    def _set_lineage(self, names: list[str | None]) -> None:
        self.lineage = names
        replace({self._lineage_path: json.dumps(names)}, 0o600)

    def _drop_run(self) -> None:
        """Forget the run; the next one begins from the drafter in use."""
        self.training, self.lineage = None, []
        for name in ("checkpoint.pt", "lineage.json"):
            (self.folder / "run" / name).unlink(missing_ok=True)

    def _begin(self) -> DraftRun[Any]:
        """Resume the run, or begin one from the drafter in use."""
        folder = self.folder / "run"
        folder.mkdir(mode=0o700, exist_ok=True)
        if not (saved := folder / "checkpoint.pt").exists():
            self._set_lineage([self.state.in_use])
            self.patience.fruitless, self.patience.best_tau = 0, 0.0
        start = self.drafters.folder_of(self.lineage[0])
        args = settings(self.args.kind, self.target, str(start or FROM_TARGET))
        if start is None:
            start = folder / "start"
            if not (saved.exists() and (start / "config.json").exists()):
                saved.unlink(missing_ok=True)
                self.drafters.save(self._fresh(args), start)
        model = self.drafters.load(start, torch.float32).requires_grad_(True).train()
        model = model.to(device=self.target.device, dtype=self.target.embedding.dtype)
        # DEER's stage I only prepares for stage II, with which it goes on here.
        alpha = args.refine_alpha if "stage-2" in DIFFUSION_STAGES.get(args.kind, ()) else None
        recipe, schedule = train.make_recipe(args, args.kind), self.drafters.schedule(model)
        run = train.make_run(folder, model, self.target, recipe, schedule, alpha)
        run.resume()
        self.maker = run.maker()
        self.look_at, self.saved = run.step + LOOK_EVERY, time.process_time()
        return run

    def _fresh(self, args: argparse.Namespace) -> TrainedModel:
        """Return the drafter of the target's layers, its vocabulary and sequential head from the answers so far."""
        last = self.supply.training[-1]
        store = self.supply.segments[last.segment]
        numbers = [item.number for item in self.supply.training if item.segment == last.segment]
        size = self.target.config.vocab_size
        counts = store.token_counts(size, numbers) + self.general.store.token_counts(size, self.general.training)
        model = first_drafter(args, self.target, counts, self.supply[last].tokens)
        if isinstance(model, BlockModel):
            start_markov(model, store, numbers)
        return model

    def _step(self, run: DraftRun[Any]) -> None:
        began, anchors, size = time.process_time(), run.anchors, run.recipe.block(run.step, run.model.config.gamma)
        self.means.add(run.update(run.batch(self.maker.cut(*self._next_anchors(run), size), run.step)))
        numbers, now = self.progress.numbers, time.process_time()
        run.seconds += now - began
        self.stepping += now - began
        numbers.seconds += now - began
        numbers.steps += 1
        numbers.anchors += run.anchors - anchors
        if now - self.saved > run.recipe.save_seconds:
            run.save()
            self.saved = now

    def _next_anchors(self, run: DraftRun[Any]) -> tuple[list[Sequence], list[torch.Tensor]]:
        """Return answers and random anchors of each, where the server asks its model; as many answers as give half of
        the recipe's anchors."""
        generator, room = torch.Generator().manual_seed(run.step), run.recipe.anchors
        sequences: list[Sequence] = []
        places: list[torch.Tensor] = []
        while 2 * room > run.recipe.anchors:
            sequences.append(self._next_sequence(run.step, len(sequences)))
            asked = self.drafters.lookups.asked(sequences[-1], run.model.config.gamma)
            places.append(asked[torch.randperm(len(asked), generator=generator)[:room]])
            room -= len(places[-1])
        return sequences, places

    def _next_sequence(self, step: int, place: int) -> Sequence:
        """Return the answer of that place in a step."""
        every, general = self.general_every, self.general.training
        if step % every == every - 1 and general:
            return self.general.store[general[(step // every + place) % len(general)]]
        while True:
            if not self.order:
                self.order = self.supply.training
                random.Random(step).shuffle(self.order)
            if (item := self.order.pop()) in self.supply:
                return self.supply[item]

    def _gate(self, run: DraftRun[Any]) -> None:
        """Compare the run's present weights, as they would be served, with the drafter in use; offer them if better."""
        self.progress.phase("gate")
        numbers = self.progress.numbers
        numbers.attempts += 1  # on the disk before the comparison
        means = {name: round(value, 4) for name, value in self.means.take().items()}
        self.progress.event("training", steps=run.step, anchors=run.anchors, seconds=round(run.seconds, 1), **means)
        folder = self.folder / "run" / "candidate"
        share, forgets = self._write_candidate(run, folder)
        items = self._gate_items()
        drafts = self.drafters.follow(folder, (self.supply[item] for item in items))
        general = self.drafters.follow(folder, self.general.sequences(self.general.judging))
        verdict = self._judge(items, drafts, general)
        numbers.gates += 1
        numbers.in_use_tau, numbers.candidate_tau = verdict.in_use_tau, verdict.candidate_tau
        about = {"steps": run.step, "anchors": run.anchors, "share": share, "passed": verdict.passed}
        self.progress.event("gate", **about, **verdict.numbers())
        self.general_every = GENERAL_AFTER_LOSS if forgets else GENERAL_EVERY
        self._write_general(min(MORE, PROMPTS * (1 + numbers.gates)))
        patience = self.patience
        better = verdict.candidate_tau > patience.best_tau * BETTER
        undecided = self.lineage[-1] not in (None, self.state.in_use)  # then only a better one is offered
        if offers := verdict.passed and (better or not undecided):
            self._offer(run, folder, verdict, drafts + general)
        patience.fruitless = 0 if better or offers else patience.fruitless + 1
        patience.best_tau = max(patience.best_tau, verdict.candidate_tau)
        if patience.fruitless >= PATIENCE:
            patience.wait_for = self._more_answers()

    def _write_candidate(self, run: DraftRun[Any], folder: Path) -> tuple[float, bool]:
        """Write the run's present weights, mixed with the first drafter if there is one.

        Returns the share of the trained weights, and True if even this mixture loses too much on the choosing answers.
        """
        choosing, first = self.general.choosing, self.drafters.folder_of(None)
        answers = self.general.sequences(choosing)
        shutil.rmtree(folder, ignore_errors=True)
        with run.optimiser.averaged():
            self.drafters.save(run.model, folder)
        self.state = ServerState.read(self.folder)
        before = max(self._general_tau(name, choosing) for name in (self.state.in_use, None))
        if first is None:
            return 1.0, tau(self.drafters.follow(folder, answers)) < GENERAL_LOSS * before
        trained, low, high = self.drafters.load(folder, torch.float32), 0.0, MOST_SHARE

        def write(share: float) -> None:
            self.drafters.save(mixed(self.drafters.load(first, torch.float32), trained, share), folder)

        write(MOST_SHARE)
        kept = tau(self.drafters.follow(folder, answers)) / before
        if kept >= GENERAL_AIM:
            return MOST_SHARE, False
        for _ in range(BISECTIONS):
            write(share := (low + high) / 2)
            reached = tau(self.drafters.follow(folder, answers)) >= GENERAL_AIM * before
            low, high = (share, high) if reached else (low, share)
        write(low)
        return low, kept < GENERAL_LOSS

    def _general_tau(self, name: str | None, numbers: list[int]) -> float:
        """Return tau on these general answers, of a drafter or of none."""
        return tau(self._follow_general(name, numbers))

    def _follow_general(self, name: str | None, numbers: list[int]) -> list[Followed]:
        kept = self.general.store
        return self.drafters.follow_once(name, {kept.entries[i].digest: partial(kept.__getitem__, i) for i in numbers})

    def _gate_items(self) -> list[Item]:
        """Return the newest held-out answers, as `GATE_TOKENS` says."""
        chosen: list[Item] = []
        room = GATE_TOKENS
        for item in reversed(self.supply.held_out):
            room -= item.answer_tokens
            if room < 0 and enough(len({earlier.prompt for earlier in chosen}), self.progress.numbers.attempts):
                break
            chosen.append(item)
        return chosen

    def _judge(self, items: list[Item], drafts: list[Followed], general: list[Followed]) -> GateVerdict:
        """Compare with the server's drafter in use."""
        self.state = ServerState.read(self.folder)
        for name in self.drafters.followed.keys() - {None, self.state.in_use}:
            del self.drafters.followed[name]
        held = {item.entry.digest: partial(self.supply.__getitem__, item) for item in items}
        in_use, judging = self.drafters.follow_once(self.state.in_use, held), self.general.judging
        least = 1.0 if self.drafters.folder_of(self.state.in_use) else FIRST_GAIN
        return compare(
            drafts, in_use, [item.prompt for item in items], general, self._follow_general(self.state.in_use, judging),
            self._general_tau(None, judging), attempt=self.progress.numbers.attempts, least=least,
        )  # fmt: skip

    def _offer(self, run: DraftRun[Any], folder: Path, verdict: GateVerdict, drafts: list[Followed]) -> None:
        """Make a numbered folder of the candidate, for the server to use."""
        name = next_name(self.folder)
        complete(folder, {**verdict.numbers(), "steps": run.step}, drafts)
        self._set_lineage([*self.lineage, name])
        self._check_forgotten()
        self.progress.numbers.attempts = 0
        self.progress.write()
        offer(folder, self.folder / "drafters", name)
        self.progress.numbers.candidates += 1
        self.progress.event("candidate", candidate=name, **verdict.numbers())
        run.save()
        self.saved = time.process_time()
        prune(self.folder / "drafters", self.state, name, keep=self.lineage[0])
