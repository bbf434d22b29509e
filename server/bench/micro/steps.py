"""Time of one engine step by shape (requests x tokens), compared with its matrix products alone.

A step lasts until the next one starts, as in `outrider tune`: SGLang's scheduler, drafting (here without a model), the
target's forward, acceptance. The floor is the step's matrix products in the same type, by plain torch or our kernels,
whichever is faster. All take turns, round by round; the ratio of step to floor carries over to other machines.
--breakdown: torch profiles one more turn of each shape, with every operator and Python function.
--beside: the step is also measured while other processes keep that many processors busy.

examples:
  outrider bench micro steps --shapes 1x1,8x8 --breakdown traces
  outrider bench micro steps --shapes 8x1,8x8 --beside 1,2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.kernels.linear import pack, packed_linear

from ...errors import UserError
from ...processes import session
from ...settings.flags import add_engine_flags, settings_of
from ...settings.resolve import Resolved, resolve
from ...tune.effort import Shape
from ...tune.measure import measure_shape
from .. import harness, record

if TYPE_CHECKING:
    from ...processes.engine import Engine

DEFAULT_SHAPES = "1x1,1x8,8x1,8x8,32x1"
STEPS = 24
"""Steps timed per request and round."""

Results = dict[str, dict[str, list[float]]]
"""Milliseconds of each round: {shape: {"torch": […], "ours": […], "step": […]}}, and the arms with busy processes."""
ARMS = ("torch", "ours", "step")


def parse(text: str, context: int) -> Shape:
    """The shape of REQUESTSxTOKENS; tokens: per request and step, the anchor and its drafts."""
    try:
        requests, tokens = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise UserError(f"a shape is REQUESTSxTOKENS, like 8x4, not {text!r}") from None
    if requests < 1 or not 1 <= tokens <= 65:
        raise UserError(f"a shape needs at least one request and 1..65 tokens, not {text!r}")
    return Shape(requests, requests * tokens, context)


def name_of(shape: Shape) -> str:
    return f"{shape.requests}x{shape.tokens // shape.requests}"


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
    shapes = [parse(part, args.context) for part in args.shapes.split(",") if part]
    if not shapes:
        raise UserError("--shapes is empty")
    harness.check_positive(args, "context", "rounds")
    harness.check_outputs(args)
    counts = harness.positive_integers("--beside", args.beside) if args.beside else []
    beside = {f"step beside {count}": count for count in counts}
    largest = max(shape.requests for shape in shapes)
    gamma = max(shape.drafted(0) for shape in shapes)
    settings = settings_of(
        args,
        drafter="ngram",  # it finds no drafts here: the worker fills up each step
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
    engine: Engine, resolved: Resolved, shapes: Sequence[Shape], args: argparse.Namespace, beside: dict[str, int]
) -> Results:
    manager, settings = engine.tokenizer_manager, resolved.settings
    dtype = getattr(torch, settings.resolved_dtype) if settings.resolved_dtype != "auto" else torch.bfloat16
    if settings.resolved_threads:
        torch.set_num_threads(settings.resolved_threads)
    products = Products(resolved.model.path, dtype, "cuda" if settings.resolved_device == "cuda" else "cpu")
    arms = (*ARMS, *beside)
    results: Results = {name_of(shape): {arm: [] for arm in arms} for shape in shapes}
    for _ in range(2):  # warm up compiled code, caches and thread pools
        await _step(manager, shapes[0])
    for _, name, arm in harness.alternate_arms(args.rounds, list(results), arms):
        times, shape = results[name][arm], parse(name, args.context)
        if arm in beside:
            with harness.busy_processes(beside[arm]):
                times.append(await _step(manager, shape))
        elif arm == "step":
            times.append(await _step(manager, shape))
        else:
            times.append(products.milliseconds(arm, shape.tokens))
    for shape in shapes if args.breakdown else ():
        await _trace(manager, shape, args.breakdown)
    return results


async def _trace(manager: Any, shape: Shape, folder: Path) -> None:
    """Write torch's profile of the scheduler's process during steps of that shape."""
    from sglang.srt.managers.io_struct import ProfileReq

    await manager.start_profile(ProfileReq(output_dir=str(folder.absolute()), profile_prefix=name_of(shape)))
    await _step(manager, shape)
    await manager.stop_profile()


async def _step(manager: Any, shape: Shape) -> float:
    """Median milliseconds of a step of that shape, from its start to the next step's."""
    points = await measure_shape(manager, shape, STEPS)
    if not points:
        raise UserError(f"no step of {name_of(shape)} ran")
    return points[0].median * 1e3


class Products:
    """The matrix products of one forward of a dense decoder, with weights in the model's shapes."""

    def __init__(self, model_path: str, dtype: torch.dtype, device: str):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
        heads, hidden, mlp = config.num_attention_heads, config.hidden_size, config.intermediate_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head = getattr(config, "head_dim", None) or hidden // heads
        layer = [((heads + 2 * kv_heads) * head, hidden), (hidden, heads * head), (2 * mlp, hidden), (hidden, mlp)]
        shapes = layer * config.num_hidden_layers + [(config.vocab_size, hidden)]  # [outputs, depth]
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
