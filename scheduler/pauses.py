"""Choose how many prompt tokens the next forward reads while other requests decode.

A prompt is read in chunks, and decode steps run between them:

- a chunk is the largest with a predicted time within the bound on pauses between decode steps; within twice the bound
  while no request decodes, since only the next request to come would wait for it;
- after a chunk of a long prompt answers decode until they have had their share of the time, or more where a service
  level needs more;
- a prompt that fits whole into a chunk skips that wait, unless a service level needs it; a short one waits for service
  levels no longer than twice the bound;
- the prompt with the smallest turn is read first: the shortest, until a longer one has waited long enough.

All times come from `PrefillCost` and from earlier steps; this module reads no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from .cost.prefill import PrefillCost, pairs_of
from .service_levels import MARGIN

SHARE = 0.36
"""Share of the time for decode steps while one long prompt is read: its first token takes 1 / (1 - SHARE) as long. With
n waiting prompts the share is SHARE / n²: steps for few answers waste time, and all n prompts wait for them."""
SHORT = 256
"""Most tokens of a short prompt. It passes a longer one even if it breaks the bound: SGLang cuts one prompt at a time,
so the short one would wait for all chunks of the long one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A waiting prompt. tokens: still to be read. context: cached tokens before them. turn: the smallest is first."""

    tokens: int
    context: int
    turn: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bounds of the next forward. tokens: of all prompts. unfinished: of the prompt that is partly read; None: no bound
    but `tokens`."""

    tokens: int
    unfinished: int | None = None


def turn_of(arrival: int, tokens: int) -> float:
    """Turn of a prompt with `tokens` to read that came after `arrival` tokens of prompts had been read.

    Shorter prompts pass it until 8 times its tokens have been read, short ones until 32,768 more have been.
    """
    return arrival + 8 * tokens + (32768 if tokens > SHORT else 0)


def level_share(levels: np.ndarray, speed: float) -> float:
    """Share of the time, at most 0.9, that decode steps need for the strictest level that they can keep; 0 without one.

    levels: [R] tokens per second; 0: none. speed: tokens per second of a request while no prompt is read.
    """
    shares = levels * MARGIN / max(speed, 1e-9)
    return float(np.minimum(shares[shares <= 1.0], 0.9).max(initial=0.0))


class Pauses:
    """Chooses chunks. bound: seconds of a pause. page: tokens of a page of the cache. in_turn: prompts wait by turn
    and pass the partly read one."""

    def __init__(self, bound: float, cost: PrefillCost, page: int = 1, *, in_turn: bool = True):
        self.bound, self.cost, self.page, self.in_turn = bound, cost, page, in_turn
        self.step = 0.0
        """Seconds of a decode step, a running mean."""
        self.paused = 0.0
        """Predicted seconds of the chunks launched since the last decode step."""
        # Seconds of decode steps due before the next chunk of a long prompt, and before any chunk.
        self._owed = self._owed_to_levels = 0.0
        self._decoded = 0.0  # seconds of decode steps since the latest chunk
        self._waiting = 0  # prompts, at the latest choice
        self._ratios = 0.0, 0.0  # seconds that a second of the latest chunk adds to each

    def choose(self, queue: Sequence[Prompt], unfinished: Prompt | None, *, answering: bool = True) -> Chunk | None:
        """The next chunk; None: a decode step first.

        queue: prompts in the order of reading. unfinished: the one that is partly read. answering: requests decode.
        """
        if not answering:
            self.paused = self._owed = self._owed_to_levels = 0.0
        self._waiting = len(queue) + (unfinished is not None)
        if self._owed_to_levels > 0:
            if self._decoded < 2 * self.bound:
                return None
            queue = list(takewhile(lambda prompt: prompt.tokens <= SHORT, queue))
        context = next((prompt.context for prompt in (unfinished, *queue) if prompt), 0)
        most = self.bound if answering else 2 * self.bound
        room, least = most - self.paused, 2 * self.cost.forward
        if not self.paused:  # most of a shorter chunk would be the fixed cost of a forward
            room = max(room, least)
        whole, passing = self._whole(queue, unfinished, room)
        minimum = self.page if unfinished else 0  # every chunk also reads a page of the partly read prompt
        tokens = max(self.cost.largest(room, context) // self.page, 1) * self.page
        if max(self._owed, self._owed_to_levels) > 0 or room < least:
            return Chunk(whole + minimum, minimum or None) if whole else None
        if unfinished is not None:
            return Chunk(max(tokens, whole + self.page), max(tokens - whole, self.page)) if whole else Chunk(tokens)
        # A prompt that fits whole into the next chunk is not cut to fill this one.
        cuts = passing < len(queue) and self.cost.seconds(*_size(queue[passing])) > most
        return Chunk(tokens if cuts or not whole else whole)

    def _whole(self, queue: Sequence[Prompt], unfinished: Prompt | None, room: float) -> tuple[int, int]:
        """Tokens, in whole pages, and number of the first prompts of `queue` that may be read before `unfinished` and
        together take at most `room` seconds."""
        if unfinished is not None and not self.in_turn:
            return 0, 0
        tokens, pages, pairs = 0, 0, 0.0
        for number, prompt in enumerate(queue):
            more = _size(prompt)
            tokens, pairs = tokens + more[0], pairs + more[1]
            short = number == 0 and unfinished is not None and prompt.tokens <= SHORT and not self.paused
            fits = short or self.cost.seconds(tokens, pairs) <= room
            if not fits or (unfinished is not None and prompt.turn > unfinished.turn):
                return pages, number
            pages += math.ceil(prompt.tokens / self.page) * self.page
        return pages, len(queue)

    def launch(self, seconds: float, *, long: bool, level_share: float) -> None:
        """A chunk is launched that will take `seconds`. long: it leaves a prompt unfinished."""
        share = max(SHARE / max(self._waiting, 1) ** 2, level_share) if long else 0.0
        self._ratios = share / (1 - share), level_share / (1 - level_share)
        self.paused += seconds

    def observe_chunk(self, tokens: int, pairs: float, seconds: float) -> None:
        """The latest chunk took `seconds`; see `PrefillCost.seconds`."""
        self.cost.observe(tokens, pairs, seconds)
        self._decoded = 0.0
        self._owed += seconds * self._ratios[0]
        self._owed_to_levels += seconds * self._ratios[1]

    def stepped(self) -> None:
        """A decode step is launched."""
        self.paused = 0.0

    def observe_step(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        self._decoded += seconds
        self.step += (0.1 if self.step else 1.0) * (seconds - self.step)
        self._owed = max(self._owed - seconds, -self.step)  # a step may end later than the debt: the next chunk pays
        self._owed_to_levels = max(self._owed_to_levels - seconds, -self.step)


def _size(prompt: Prompt) -> tuple[int, float]:
    """Tokens and pairs, see `PrefillCost.seconds`."""
    return prompt.tokens, pairs_of([prompt.tokens], [prompt.context])
