"""Counters and histograms that buffer their increments and write them to Prometheus on `flush`.

prometheus_client writes every increment to a file; a dozen take one percent of a small model's step.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import product

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram

FLUSH_SECONDS = 0.25


class BufferedCounter:
    def __init__(self, counter: Counter):
        self.counter = counter
        self.amount = 0.0  # not counted yet
        self.total = 0.0  # counted

    def inc(self, amount: float = 1.0) -> None:
        self.amount += amount

    def flush(self) -> None:
        if self.amount:
            self.counter.inc(self.amount)
            self.total += self.amount
        self.amount = 0.0


class BufferedHistogram:
    def __init__(self, histogram: Histogram):
        self.histogram = histogram
        self.bounds = list(histogram._upper_bounds)
        self.counts = [0] * len(self.bounds)  # by bucket, not counted yet
        self.sum = 0.0
        self.total, self.total_count = 0.0, 0  # counted

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def flush(self) -> None:
        # As Histogram.observe, for several observations at once; Histogram has no public method for that.
        if self.sum:
            self.histogram._sum.inc(self.sum)
            self.total += self.sum
            self.total_count += sum(self.counts)
        for bucket, count in zip(self.histogram._buckets, self.counts, strict=True):
            if count:
                bucket.inc(count)
        self.counts, self.sum = [0] * len(self.bounds), 0.0


class BufferedTable:
    """Counters under the same labels.

    names: counter names and descriptions. labels: each label and its values. amounts: [counters, combinations of
    values], not counted yet; the last label changes fastest.
    """

    def __init__(self, names: dict[str, str], labels: dict[str, Sequence[str]], registry: CollectorRegistry):
        counters = [Counter(name, text, labels, registry=registry) for name, text in names.items()]
        combinations = list(product(*labels.values()))
        self.counters = [counter.labels(*values) for counter in counters for values in combinations]
        self.amounts = np.zeros((len(names), len(combinations)))
        self.totals = np.zeros_like(self.amounts)  # counted

    def flush(self) -> None:
        for counter, amount in zip(self.counters, self.amounts.ravel().tolist(), strict=True):
            if amount:
                counter.inc(amount)
        self.totals += self.amounts
        self.amounts[:] = 0


class BufferedMetrics:
    """Metrics that are written together: on `flush`, and at the first step after FLUSH_SECONDS."""

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.buffered: list[BufferedCounter | BufferedHistogram] = []
        self.flushed = time.monotonic()

    def counter(self, name: str, text: str) -> BufferedCounter:
        return self.add(Counter(name, text, registry=self.registry))

    def add(self, counter: Counter) -> BufferedCounter:
        """Buffer the increments of a counter that has labels already, or needs none."""
        self.buffered.append(metric := BufferedCounter(counter))
        return metric

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> BufferedHistogram:
        histogram = Histogram(name, text, buckets=buckets, registry=self.registry)
        self.buffered.append(metric := BufferedHistogram(histogram))
        return metric

    def flush_if_due(self) -> None:
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        for metric in self.buffered:
            metric.flush()
        self.flushed = time.monotonic()
