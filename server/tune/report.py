"""The result of a measurement in a line and in tables, for people."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from outrider.profiles.store import Profile
from outrider.scheduler.calibration.classes import CLASSES
from outrider.scheduler.calibration.table import CalibrationTable
from outrider.scheduler.spiffy.calibration import NodeCounts, steps_ahead
from outrider.scheduler.spiffy.graph import ROOT, DraftGraph


@dataclass(frozen=True, slots=True)
class Tuned:
    """A measured profile. held_out: drafts that its calibration was judged on."""

    profile: Profile
    calibration: CalibrationTable
    held_out: int

    @property
    def summary(self) -> str:
        """One line for people."""
        times, weights = len(self.profile.points), [sum(fit.samples) for fit in self.calibration.by_class]
        if not any(weights):
            return f"{times} step times; no drafts for the prompts held out, confidences stay as they are"
        before, after, by_chance = (
            np.average([statistics.mean(getattr(fit, key)) for fit in self.calibration.by_class], weights=weights)
            for key in ("ece_before", "ece_after", "ece_by_chance")
        )
        return (
            f"{times} step times, calibration error {before:.1%} before, {after:.1%} after, "
            f"of which {by_chance:.1%} comes of counting {self.held_out} drafts"
        )

    def table(self) -> str:
        """Return step times by shape, and the calibration by position, as text."""
        times = {(p.requests, p.tokens, p.context): p for p in self.profile.points if p.tokens}
        lines = [f"{'requests':>8} {'tokens':>7} {'context':>8} {'step ms':>8} {'spread':>7} {'draft ms':>9}"]
        cost = self.profile.cost()
        for (requests, tokens, context), point in times.items():
            draft = f"{cost.draft_seconds(requests) * 1e3:9.1f}"
            lines.append(
                f"{requests:>8} {tokens:>7} {context:>8.0f} {point.median * 1e3:8.1f} {point.spread:7.0%} {draft}"
            )
        lines += ["", "Calibration error (ECE) of prefix survival on prompts held out, by position"]
        fits = zip(CLASSES, self.calibration.by_class, strict=True)
        for case, fit in ((case, fit) for case, fit in fits if max(fit.samples)):
            kept = "raw confidences are kept" if fit.is_identity else "calibrated"
            lines.append(f"{case}: {max(fit.samples)} drafts, {kept}")
            rows = {"before": fit.ece_before, "after": fit.ece_after, "by chance": fit.ece_by_chance}
            for title, errors in rows.items():
                lines.append(f"{title:>12} " + " ".join(f"{error:6.1%}" for error in errors))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class TunedGraphs:
    """A measured profile with the counts from which its draft graphs were chosen. block: tokens of a block. graphs,
    counts: by temperature class. untuned: the graph without a profile."""

    profile: Profile
    block: int
    graphs: Mapping[str, DraftGraph]
    untuned: DraftGraph
    counts: Mapping[str, NodeCounts]

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{len(self.profile.points)} step times, " + ", ".join(self._ahead(name) for name in self.graphs)

    def _ahead(self, name: str) -> str:
        counts = self.counts[name]
        if not counts.roots:
            return f"no states to count {name}"
        chosen, untuned = (steps_ahead(graph, counts) for graph in (self.graphs[name], self.untuned))
        return f"{chosen:.2f} steps ahead {name} ({untuned:.2f} by the untuned graph)"

    def table(self) -> str:
        """Return the times of rounds by shape, and the draft graphs."""
        lines = [f"{'requests':>8} {'states':>7} {'context':>8} {'round ms':>9} {'spread':>7}"]
        for point in self.profile.points:
            states = point.tokens // self.block
            lines.append(
                f"{point.requests:>8} {states:>7} {point.context:>8.0f} {point.median * 1e3:9.1f} {point.spread:7.0%}"
            )
        lines += ["", "Draft graphs: pairs (rank of the masked position, rank of its token), and how often base"]
        lines += ["decoding comes to each state from one that a forward begins with"]
        for name, graph in self.graphs.items():
            counts = self.counts[name]
            lines.append(f"{name}, {counts.roots} states counted: {self._ahead(name)} at most")
            for number, node in enumerate(graph.nodes):
                pairs = " ".join(f"{i},{j}" for i, j in sorted(node))
                behind = " ".join("root" if parent == ROOT else str(parent + 1) for parent in graph.parents[number])
                share = counts.nodes[node] / max(counts.roots, 1)
                lines.append(f"{number + 1:>4} {share:6.1%} behind {behind:<14} {pairs}")
        return "\n".join(lines)
