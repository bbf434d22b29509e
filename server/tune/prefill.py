"""Measures the cost of reading prompts: several lengths, alone, timed inside the scheduler chunk by chunk."""

import secrets
import time
from functools import partial
from typing import Any

from outrider.scheduler.cost.prefill import PrefillPoint

from ..plugin import worker_rpc
from ..processes import client
from .grid import Run, prompt_of

LENGTHS = (32, 128, 512, 2048, 4096)
"""Tokens of the prompts, in the order in which they are measured."""
GROWTH = 5
"""Factor by which the next length is expected to take longer."""


async def measure_prefills(manager: Any, longest: int, seconds: float, run: Run) -> list[PrefillPoint]:
    """Return the chunks of prompts of up to `longest` tokens, measured in about `seconds`; [] if SGLang alone cuts
    prompts."""
    await worker_rpc.command(manager, worker_rpc.FORGET)
    began = time.monotonic()
    for length in (length for length in LENGTHS if length <= longest):
        started = time.monotonic()
        await run(partial(_read, manager, length))
        now = time.monotonic()
        if now - began + GROWTH * (now - started) > seconds:
            break
    return [PrefillPoint.from_json(each) for each in (await worker_rpc.read(manager))["prefills"]]


async def _read(manager: Any, length: int) -> None:
    """Let the engine read a prompt that its cache does not know."""
    prompt = prompt_of(secrets.randbits(30), length, manager.model_config.vocab_size)
    await client.generate(manager, prompt, temperature=0.0, max_new_tokens=1)
