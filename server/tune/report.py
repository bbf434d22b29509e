"""What a measurement found, for people: a line, tables, pictures."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from outrider.profiles.plots import plot_steps_per_second
from outrider.profiles.store import Profile
from outrider.scheduler.calibration.model import Calibration
from outrider.scheduler.calibration.plot import plot_reliability
from outrider.scheduler.calibration.records import Records
from outrider.server import pictures


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured profile with what the calibration was judged on."""

    profile: Profile
    calibration: Calibration
    held_out: Records

    @property
    def summary(self) -> str:
        """One line for people."""
        before, after = (
            statistics.mean(errors) for errors in (self.calibration.ece_before, self.calibration.ece_after)
        )
        return (
            f"{len(self.profile.points)} step times, calibration error {before:.1%} before, {after:.1%} after "
            f"({self.calibration.method})"
        )

    def table(self) -> str:
        """Step times by shape, and the calibration by position."""
        times = {(p.requests, p.tokens, p.context): p for p in self.profile.points if not p.drafted}
        lines = [f"{'requests':>8} {'tokens':>7} {'context':>8} {'step ms':>8} {'spread':>7} {'draft ms':>9}"]
        cost = self.profile.cost()
        for (requests, tokens, context), point in times.items():
            draft = f"{cost.draft_seconds(requests) * 1e3:9.1f}"
            lines.append(
                f"{requests:>8} {tokens:>7} {context:>8.0f} {point.median * 1e3:8.1f} {point.spread:7.0%} {draft}"
            )
        c = self.calibration
        lines += ["", f"{'position':>8} {'temperature':>12} {'shift':>6} {'ECE before':>11} {'after':>6} {'AUC':>6}"]
        for k in range(c.gamma):
            area = "-" if c.auc[k] is None else f"{c.auc[k]:.3f}"
            lines.append(
                f"{k + 1:>8} {c.temperatures[k]:12.2f} {c.shifts[k]:6.2f} {c.ece_before[k]:11.1%}"
                f" {c.ece_after[k]:6.1%} {area:>6}"
            )
        lines.append(f"{c.method}, judged on {len(self.held_out)} drafts to prompts held out")
        return "\n".join(lines)

    def draw(self, folder: Path) -> None:
        """Save steps-per-second.png and reliability.png; needs matplotlib."""
        folder.mkdir(parents=True, exist_ok=True)
        with pictures.figure(folder / "steps-per-second.png") as figure:
            plot_steps_per_second(self.profile.cost(), figure)
        with pictures.figure(folder / "reliability.png") as figure:
            plot_reliability(self.held_out, self.calibration, figure)
