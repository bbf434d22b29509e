"""Choose how much of the waiting prompts the next forward reads while other requests decode.

Answers stand still while a prompt is read. So a prompt is read in chunks, and decode steps run between them:

- a chunk is the largest whose predicted time keeps answers from standing still longer than a bound;
- after a chunk of a long prompt, answers have decode steps until they have had their share of the time, more where a
  service level needs more. The prompt's first token comes later by that, and by no more;
- prompts that fit whole into a chunk do not wait for that, unless a service level needs it;
- of several prompts the one whose turn is first is read first: short ones, until long ones have waited long enough.

All times come from `PrefillCost` and from steps that have run; nothing here reads a clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cost.prefill import PrefillCost, pairs_of
from .service_levels import MARGIN

SHARE = 0.36
"""Share of the time that answers have while a long prompt is read: its first token takes 1 / (1 - SHARE) as long."""
MOST_SHARE = 0.9
"""The same where service levels need more: prompts are read, however high these are."""
PATIENCE = 4
"""A prompt lets others pass that come while this many times its own tokens are read."""
SHORT, PASSING = 256, 5
"""A prompt of so few tokens passes a longer one whole, even if it takes this many times the bound: where reading is
slow, it would else wait until the longer one is read."""
ALONE = 2
"""A chunk takes this many times the bound while no answers are under way: the next request waits for it."""
STEP_RATE = 0.1
"""Weight of one decode step in the running average of their time."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that waits. tokens: still to be read. context: cached before them. turn: smaller ones are first."""

    tokens: int
    context: int
    turn: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """The share of prompts in the next forward. tokens: of all prompts, at most. unfinished: tokens of the prompt that
    was begun, at most; None: as many as there is room for."""

    tokens: int
    unfinished: int | None = None


def turn_of(arrival: int, tokens: int) -> float:
    """Turn of a prompt with `tokens` to be read, which came when `arrival` tokens of prompts had been read."""
    return arrival + PATIENCE * tokens


def level_share(levels: np.ndarray, speed: float) -> float:
    """Share of the time that decode steps need for the strictest level that they can keep at all; 0 without one.

    levels: [R] tokens per second; 0: none. speed: tokens per second of a request while nothing else runs.
    """
    shares = levels * MARGIN / max(speed, 1e-9)
    return float(np.minimum(shares[shares <= 1.0], MOST_SHARE).max(initial=0.0))


class Pauses:
    """Chooses chunks. bound: seconds of prefills between two decode steps. page: tokens of a page of the cache.
    in_turn: prompts wait by their turns, and others pass the one that was begun."""

    def __init__(self, bound: float, cost: PrefillCost, page: int = 1, *, in_turn: bool = True):
        self.bound, self.cost, self.page, self.in_turn = bound, cost, page, in_turn
        self.step = 0.0
        """Seconds of a decode step."""
        self.paused = 0.0
        """Seconds that answers will have stood still when what was launched is done."""
        self._owed = self._owed_to_levels = 0.0  # seconds of decode steps before the next long prompt, before any
        self._last = 0.0, 0.0, 0.0  # of the chunk launched last: its seconds, and what each of them owes

    def choose(self, queue: Sequence[Prompt], unfinished: Prompt | None, *, answering: bool = True) -> Chunk | None:
        """The next chunk; None: a decode step first.

        queue: prompts in the order in which they are read. unfinished: the one that was begun. answering: answers are
        under way.
        """
        if not answering:
            self.paused = self._owed = self._owed_to_levels = 0.0
            self._last = 0.0, 0.0, 0.0
        if self._owed_to_levels > 0:
            return None
        context = next((prompt.context for prompt in (unfinished, *queue) if prompt), 0)
        most = self.bound if answering else ALONE * self.bound
        room, least = most - self.paused, self.cost.least
        if not self.paused:  # answers have just had a step: a chunk smaller than that would be wasted
            room = max(room, self.cost.seconds(*_size(Prompt(least, context, 0))))
        whole, passing = self._whole(queue, unfinished, room)
        first = self.page if unfinished else None
        tokens = max(self.cost.largest(room, context) // self.page, 1) * self.page
        if self._owed > 0 or tokens < least - self.page:
            return Chunk(whole + (first or 0), first) if whole else None
        if unfinished is not None:
            return Chunk(max(tokens, whole + self.page), max(tokens - whole, self.page)) if whole else Chunk(tokens)
        # A prompt that fits into a chunk of its own is not cut to fill this one.
        cuts = passing < len(queue) and self.cost.seconds(*_size(queue[passing])) > most
        return Chunk(tokens if cuts or not whole else whole)

    def _whole(self, queue: Sequence[Prompt], unfinished: Prompt | None, room: float) -> tuple[int, int]:
        """Tokens and number of the first prompts that together take at most `room` seconds, before the turn of
        `unfinished`."""
        if unfinished is not None and not self.in_turn:
            return 0, 0
        tokens, pages, pairs = 0, 0, 0.0
        for number, prompt in enumerate(queue):
            more = _size(prompt)
            tokens, pairs = tokens + more[0], pairs + more[1]
            short = number == 0 and unfinished is not None and prompt.tokens <= SHORT and not self.paused
            most = max(room, PASSING * self.bound) if short else room
            if self.cost.seconds(tokens, pairs) > most or (unfinished is not None and prompt.turn > unfinished.turn):
                return pages, number
            pages += math.ceil(prompt.tokens / self.page) * self.page
        return pages, len(queue)

    def launch(self, seconds: float, *, long: bool, level_share: float) -> None:
        """A chunk is launched that will take `seconds`. long: one of its prompts is not finished by it."""
        share = max(SHARE, level_share) if long else 0.0
        self._last = seconds, share / (1 - share), level_share / (1 - level_share)
        self.paused += seconds
        self._owe(seconds)

    def _owe(self, seconds: float) -> None:
        _, owed, owed_to_levels = self._last
        self._owed += seconds * owed
        self._owed_to_levels += seconds * owed_to_levels

    def observe_chunk(self, tokens: int, pairs: float, seconds: float) -> None:
        """The chunk launched last took `seconds`; see `PrefillCost.seconds`."""
        self.cost.observe(tokens, pairs, seconds)
        self._owe(seconds - self._last[0])

    def stepped(self) -> None:
        """A decode step is launched."""
        self.paused = 0.0

    def observe_step(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        self.step += (STEP_RATE if self.step else 1.0) * (seconds - self.step)
        self._owed = max(self._owed - seconds, -self.step)  # a step's end seldom is the debt's
        self._owed_to_levels = max(self._owed_to_levels - seconds, -self.step)


def _size(prompt: Prompt) -> tuple[int, float]:
    """Tokens and pairs, see `PrefillCost.seconds`."""
    return prompt.tokens, pairs_of([prompt.tokens], [prompt.context])
