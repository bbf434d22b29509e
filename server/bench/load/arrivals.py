"""Arrival times of requests, in seconds from the start: pure arithmetic, and the times of a trace."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import UserError
from .scenario import Bursts, Rate


def times(arrivals: Rate | Bursts, rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless arrival times; `rate` requests per second in the mean."""
    if isinstance(arrivals, Bursts):
        for burst in itertools.count():
            yield from itertools.repeat(burst * arrivals.size / rate, arrivals.size)
    elif arrivals.kind == "fixed":
        for number in itertools.count():
            yield number / rate
    else:
        now = 0.0
        while True:
            now += float(rng.exponential(1 / rate))
            yield now


@dataclass(frozen=True, slots=True)
class Traced:
    """One request of a trace. at: seconds from its first.

    input_tokens: of made-up text, where `prompt` is empty. blocks: ids of its text's pieces of BLOCK_TOKENS; the same
    id is the same text, so that prefixes are shared as they were.
    """

    at: float
    prompt: str
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


BLOCK_TOKENS = 512
"""Tokens per id in Mooncake traces, whose format this is."""


def read_trace(path: Path) -> list[Traced]:
    """Requests in the order of their times; raises UserError with the line that is wrong.

    One JSON object a line: timestamp (milliseconds), output_length, and input_length (with hash_ids, if there are) or
    prompt.
    """
    found = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"the trace {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, length = row.get("prompt", ""), int(row.get("input_length", 0))
            if not isinstance(prompt, str) or bool(prompt) == (length > 0):
                raise ValueError("give input_length or prompt")
            ids = tuple(int(block) for block in row.get("hash_ids", ()))
            traced = Traced(float(row["timestamp"]) / 1e3, prompt, length, int(row["output_length"]), ids)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}:{number}: {error}") from None
        except KeyError as error:
            raise UserError(f"{path}:{number}: {error} is missing") from None
        found.append(traced)
    if not found:
        raise UserError(f"the trace {path} holds no requests")
    found.sort(key=lambda traced: traced.at)
    first = found[0].at
    return [Traced(t.at - first, t.prompt, t.input_tokens, t.output_tokens, t.blocks) for t in found]
