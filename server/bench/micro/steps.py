"""Time of one engine step by shape (requests x tokens), beside the matrix products that it cannot avoid.

A step is what a user waits for between two pieces of a stream: SGLang's scheduler, drafting (here without a model),
the target's forward, acceptance and the way back to the HTTP process. The floor is the same products in the same type,
by plain torch or by our kernels, whichever is faster. All take turns, round by round; the ratio of the step to the
floor is what carries over to another machine.
With --breakdown torch profiles one more turn of each shape: a trace with every operator and Python function.
With --beside, the same step also takes its turn while other processes keep as many processors busy.

examples:
  outrider bench micro steps --shapes 1x1,8x8 --breakdown traces
  outrider bench micro steps --shapes 8x1,8x8 --beside 1,2
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.kernels.linear import pack, packed_linear

from ...errors import UserError
from ...plugin.options import RequestOptions
from ...processes import session
from ...settings.declared import MEASURING_DRAFTER
from ...settings.flags import add_engine_flags, settings_of
from ...settings.resolve import Resolved, resolve
from .. import harness, record
from .kernels import ModelShape

if TYPE_CHECKING:
    from ...processes.engine import Engine

DEFAULT_SHAPES = "1x1,1x8,8x1,8x8,32x1"
STEPS = 24
"""Steps timed per request and round; the first few, while requests still join, are left out."""
WARM_STEPS = 4

Results = dict[str, dict[str, list[float]]]
"""Milliseconds of each round: {shape: {"torch": […], "ours": […], "step": […], "step beside 1": […]}}."""
ARMS = ("torch", "ours", "step")


@dataclass(frozen=True, slots=True)
class Shape:
    """requests: R. tokens: per request and step, the anchor and its drafts."""

    requests: int
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            requests, tokens = (int(part) for part in text.lower().split("x"))
        except ValueError:
            raise UserError(f"a shape is REQUESTSxTOKENS, like 8x4, not {text!r}") from None
        if requests < 1 or not 1 <= tokens <= 65:
            raise UserError(f"a shape needs at least one request and 1..65 tokens, not {text!r}")
        return cls(requests, tokens)

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=False)
    add = parser.add_argument
    add("--shapes", default=DEFAULT_SHAPES, metavar="LIST", help="REQUESTSxTOKENS,… (default: %(default)s)")
    add("--context", type=int, default=128, metavar="N", help="prompt tokens (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="measurements of each shape (default: %(default)s)")
    add("--breakdown", type=Path, metavar="FOLDER", help="also profile each shape's steps, and write traces there")
    add("--beside", default="", metavar="LIST", help="also the step beside so many busy processes, like 1,2")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    shapes = [Shape.parse(part) for part in args.shapes.split(",") if part]
    if not shapes:
        raise UserError("--shapes is empty")
    harness.check_positive(args, "context", "rounds")
    harness.check_outputs(args)
    counts = harness.positive_integers("--beside", args.beside) if args.beside else []
    beside = {f"step beside {count}": count for count in counts}
    largest = max(shape.requests for shape in shapes)
    gamma = max(shape.tokens for shape in shapes) - 1
    settings = settings_of(
        args,
        drafter=MEASURING_DRAFTER,
        gamma=max(gamma, 1),
        max_total_tokens=largest * (args.context + 4 * (STEPS + 1) * 2 + 4 * (gamma + 1)) + 1024,
        disable_radix_cache=True,
    )

    resolved = resolve(settings)

    async def measurement(engine: Engine) -> Results:
        return await _measure(engine, resolved, shapes, args, beside)

    results = session.run(resolved, measurement)
    _report(results)
    record.write(args.json, "micro steps", results, resolved=resolved)
    return 0


async def _measure(
    engine: Engine,
    resolved: Resolved,
    shapes: Sequence[Shape],
    args: argparse.Namespace,
    beside: dict[str, int],
) -> Results:
    manager, settings = engine.tokenizer_manager, resolved.settings
    dtype = getattr(torch, settings.resolved_dtype) if settings.resolved_dtype != "auto" else torch.bfloat16
    if settings.resolved_threads:
        torch.set_num_threads(settings.resolved_threads)
    products = Products(resolved.model.path, dtype, "cuda" if settings.resolved_device == "cuda" else "cpu")
    arms = (*ARMS, *beside)
    results: Results = {str(shape): {arm: [] for arm in arms} for shape in shapes}
    for _ in range(2):  # compiled code, caches and thread pools come to rest
        await _steps(manager, shapes[0], args.context)
    for _, shape, arm in harness.alternate_arms(args.rounds, shapes, arms):
        times = results[str(shape)][arm]
        if arm in beside:
            with harness.busy_processes(beside[arm]):
                times.append(await _steps(manager, shape, args.context))
        elif arm == "step":
            times.append(await _steps(manager, shape, args.context))
        else:
            times.append(products.milliseconds(arm, shape.requests * shape.tokens))
    for shape in shapes if args.breakdown else ():
        await _trace(manager, shape, args)
    return results


async def _trace(manager: Any, shape: Shape, args: argparse.Namespace) -> None:
    """Write torch's profile of the scheduler's process while it makes steps of that shape."""
    from sglang.srt.managers.io_struct import ProfileReq

    await manager.start_profile(ProfileReq(output_dir=str(args.breakdown.absolute()), profile_prefix=str(shape)))
    await _steps(manager, shape, args.context)
    await manager.stop_profile()


async def _steps(manager: Any, shape: Shape, context: int) -> float:
    """Median milliseconds between two pieces of a stream while `shape.requests` requests run."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    options = RequestOptions(enabled=shape.tokens > 1, gamma=shape.tokens - 1)
    budget = STEPS * 2  # a step may by chance keep a draft
    gaps: list[float] = []

    async def one(index: int) -> None:
        request = GenerateReqInput(
            input_ids=_prompt(index, context),
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": budget,
                "ignore_eos": True,
                "custom_params": options.to_custom_params(),
            },
            stream=True,
        )
        last, pieces = 0.0, 0
        async for _ in manager.generate_request(request):
            now = time.perf_counter()
            pieces += 1
            if index == 0 and WARM_STEPS < pieces <= STEPS:
                gaps.append((now - last) * 1e3)
            last = now

    await asyncio.gather(*(one(index) for index in range(shape.requests)))
    return statistics.median(gaps)


def _prompt(index: int, tokens: int) -> list[int]:
    return [(7 * index + 31 * k) % 1000 + 100 for k in range(tokens)]


class Products:
    """The matrix products of one forward of a dense decoder, on weights of the model's own shapes."""

    def __init__(self, model_path: str, dtype: torch.dtype, device: str):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
        heads = config.num_attention_heads
        shape = ModelShape(
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            mlp=config.intermediate_size,
        )
        shapes = shape.weights * config.num_hidden_layers + [(config.vocab_size, config.hidden_size)]
        self.device = device
        weights = [torch.randn(size, device=device).to(dtype) for size in shapes]
        self.arms: dict[str, tuple[Callable, list]] = {
            "torch": (torch.nn.functional.linear, weights),
            "ours": (packed_linear, [pack(weight) for weight in weights]),
        }
        self.depths = [depth for _, depth in shapes]
        self.inputs = {depth: torch.randn(4096, depth, device=device).to(dtype) for depth in self.depths}

    def milliseconds(self, arm: str, tokens: int, repetitions: int = 5) -> float:
        """Median time of all products for `tokens` rows."""
        multiply, weights = self.arms[arm]
        times = []
        for _ in range(repetitions + 1):
            start = time.perf_counter()
            for depth, weight in zip(self.depths, weights, strict=True):
                multiply(self.inputs[depth][:tokens], weight)
            if self.device == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[1:])


def _report(results: Results) -> None:
    print(f"{'shape':>8} {'step ms':>9} {'torch ms':>9} {'ours ms':>9} {'ratio':>7}  spread of the ratio to the faster")
    for shape, times in results.items():
        floor = min(times["torch"], times["ours"], key=statistics.median)
        found = harness.ratio(times["step"], floor)
        columns = "".join(f" {statistics.median(times[arm]):9.1f}" for arm in ("step", "torch", "ours"))
        print(f"{shape:>8}{columns} {found.median:7.2f}  {found.spread}")
    for shape, times in results.items():
        for arm in times.keys() - {*ARMS}:
            print(f"{shape:>8} {arm}, over the step alone: {harness.ratio(times[arm], times['step']).cell}")
