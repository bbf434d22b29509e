"""The processor time that following a grammar may take, in its trial and in use."""

import time

BURST_SECONDS = 0.2
"""Processor time that a grammar may take at once."""
CALL_SECONDS = 0.001
"""Processor time that each further mask or token may take on average; ordinary grammars take a hundredth of it."""


class GrammarBudget:
    """Processor time of one grammar's masks and tokens, counted by thread: waiting for a core is free."""

    __slots__ = ("_begun", "calls", "seconds", "unlimited", "worst")

    def __init__(self, *, unlimited: bool = False) -> None:
        self.calls = 0
        self.seconds = self.worst = self._begun = 0.0
        self.unlimited = unlimited

    def __enter__(self) -> None:
        self._begun = time.thread_time()

    def __exit__(self, *_: object) -> None:
        took = time.thread_time() - self._begun
        self.calls += 1
        self.seconds += took
        self.worst = max(self.worst, took)

    @property
    def exceeded(self) -> bool:
        """True if the grammar has taken more than it may."""
        return not self.unlimited and self.seconds > BURST_SECONDS + CALL_SECONDS * self.calls
