"""Compiled kernels beside plain torch: times of both and their ratio, one line per case.

The two take turns, round by round; the quartiles of the rounds' ratios follow the median. Times are processor time of
one thread by default, which a busy machine disturbs least; with --threads above 1 they are wall-clock time. Shapes are
those of SmolLM2-135M: attention, norms and activation, matrix products, sampling, and a whole decode step.

examples:
  outrider bench kernels --only attention
  outrider bench kernels --only "step 1x1" --threads 2 --json kernels.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median, quantiles

import torch

from outrider.kernels import attention, fused, int8, linear, noise, sampling
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch

from ...errors import UserError
from .. import harness
from .kernel_step import OURS, PLAIN, Model, Shape

Arm = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="only cases whose name contains this (default: all)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="above 1 wall-clock time is measured (default: 1)")
    add("--rounds", type=int, default=9, metavar="N", help="measurements of each case (default: %(default)s)")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "threads", "rounds")
    harness.check_outputs(args)
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(f"instruction set {native.instruction_set()}, {args.dtype}, {args.threads} thread(s)")
    print(f"{'case':34}{'torch ms':>10}{'ours ms':>10}{'torch/ours':>12}   quartiles")
    results = {}
    for name, plain, ours in cases(Shape(), getattr(torch, args.dtype), args.only):
        times = results[name] = measure({"torch": plain, "ours": ours}, args.rounds, clock)
        ratios = [a / b for a, b in zip(times["torch"], times["ours"], strict=True)]
        low, middle, high = quantiles(ratios, n=4) if args.rounds > 1 else ratios * 3
        columns = "".join(f"{median(arm):10.3f}" for arm in times.values())
        print(f"{name:34}{columns}{middle:12.2f}   {low:.2f} .. {high:.2f}", flush=True)
    if not results:
        raise UserError(f"no case here has {args.only!r} in its name")
    harness.write_json(args.json, results)
    return 0


def measure(arms: dict[str, Arm], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds per call, one per round; short arms are repeated to about a millisecond."""
    repeats = {}
    for name, arm in arms.items():
        arm()
        start = clock()
        arm()
        repeats[name] = max(1, int(1e-3 / max(clock() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in harness.rotated(list(arms), number):
            start = clock()
            for _ in range(repeats[name]):
                arms[name]()
            times[name].append((clock() - start) / repeats[name] * 1e3)
    return times


def cases(shape: Shape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    for make in (_attention_cases, _fused_cases, _linear_cases, _sampling_cases, _step_cases):
        yield from make(shape, dtype, only)


def _attention_cases(shape: Shape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    sizes = [(1, 1, 512), (1, 8, 512), (8, 1, 512), (8, 8, 512), (32, 1, 512), (1, 1, 4096), (1, 512, 512)]
    for requests, queries, context in sizes:
        name = f"attention {requests}x{queries} over {context}"
        if only not in name:
            continue
        slots = torch.randperm(requests * context).int().view(requests, context)
        indptr = torch.arange(0, requests * queries + 1, queries).int()
        batch = FlatBatch(indptr, torch.full((requests,), context).int(), torch.arange(requests), slots)
        q = torch.randn(requests * queries, shape.heads, shape.head_dim).to(dtype)
        k, v = torch.randn(2, requests * context, shape.kv_heads, shape.head_dim).to(dtype)
        plain, ours = (
            partial(attend, q, k, v, batch, scale=0.125)
            for attend in (attention.torch_attention, attention.flat_attention)
        )
        yield name, plain, ours


def _fused_cases(shape: Shape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    angles = torch.randn(8192, shape.head_dim)
    for rows in (1, 8, 64):
        x, residual, weight = (torch.randn(n, shape.hidden).to(dtype) for n in (rows, rows, 1))
        gate_up = torch.randn(rows, 2 * shape.mlp).to(dtype)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        q, k, v = torch.randn(rows, sum(heads), shape.head_dim).to(dtype).split(heads, dim=1)
        pools = torch.zeros(2, 4096, shape.kv_heads, shape.head_dim, dtype=dtype)
        places = torch.randperm(4096)[:rows]
        norm_args = (x, residual, weight[0], 1e-5)
        rope_args = (q, k, v, places, angles, pools[0], pools[1], places)
        for name, plain, ours, arguments in (
            ("add_rms_norm", fused.reference_add_rms_norm, fused.add_rms_norm, norm_args),
            ("silu_mul", fused.reference_silu_mul, fused.silu_mul, (gate_up,)),
            ("rope_write", fused.reference_rope_write, fused.rope_write, rope_args),
        ):
            if only in f"{name} {rows}":
                yield f"{name} {rows}", partial(plain, *arguments), partial(ours, *arguments)


def _linear_cases(shape: Shape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    """All products of eight layers, so that the weights come from memory as in a real step."""
    names = {
        f"{kind} {rows} (8 layers)": rows for rows in (1, 4, 8, 16, 32, 64, 512) for kind in ("linear", "int8 linear")
    }
    wanted = {name: rows for name, rows in names.items() if only in name}
    if not wanted or not native.available():
        return
    weights = [(torch.randn(size) * 0.03).to(dtype) for _ in range(8) for size in shape.weights]
    packed, codes = [linear.pack(w) for w in weights], [int8.pack_int8(w) for w in weights]
    for name, rows in wanted.items():
        x = {depth: torch.randn(rows, depth).to(dtype) for depth in {w.shape[1] for w in weights}}
        if name.startswith("int8"):
            ours = partial(_multiply, int8.int8_linear, x, codes)
        else:
            ours = partial(_multiply, linear.packed_linear, x, packed)
        yield name, partial(_multiply_plain, x, weights), ours


def _multiply_plain(x: dict[int, torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(x[weight.shape[1]], weight)


def _multiply(product: Callable, x: dict[int, torch.Tensor], weights: Sequence) -> None:
    for weight in weights:
        product(x[weight.depth], weight)


def _sampling_cases(shape: Shape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    for rows in (1, 64):
        logits, heat = torch.randn(rows, shape.vocab) * 3, torch.full((rows,), 0.8)
        rules = {"plain": (None, None), "top-p": (None, torch.full((rows,), 0.9)), "top-k": (heat.long() + 50, None)}
        for rule, (top_k, top_p) in rules.items():
            if only in f"sampling {rule} {rows}":
                yield (
                    f"sampling {rule} {rows}",
                    partial(sampling.torch_target_probs, logits, heat, top_k, top_p),
                    partial(sampling.target_probs, logits, heat, top_k, top_p),
                )
            if only in f"draw {rule} {rows}":
                every, keys = torch.arange(rows), torch.randint(2**62, (rows,))
                rules_of_all = sampling.Rules(heat, top_k, top_p)
                yield (
                    f"draw {rule} {rows}",
                    partial(_draw_plain, logits, rules_of_all, keys),
                    partial(sampling.draw_tokens, logits, every, rules_of_all, keys),
                )


def _draw_plain(logits: torch.Tensor, rules: sampling.Rules, keys: torch.Tensor) -> torch.Tensor:
    return noise.torch_gumbel_argmax(sampling.torch_target_probs(logits, *rules), keys)


def _step_cases(shape: Shape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    names = {f"step {r}x{t} over 300": (r, t) for r, t in ((1, 1), (1, 8), (8, 1), (8, 8), (32, 1))}
    wanted = {name: size for name, size in names.items() if only in name}
    if wanted:
        plain, ours = Model(shape, dtype, PLAIN), Model(shape, dtype, OURS)
        for name, size in wanted.items():
            yield name, plain.step(*size, context=300), ours.step(*size, context=300)
