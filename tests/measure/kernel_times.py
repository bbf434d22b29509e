"""Times compiled kernels and plain torch, with their ratio, one line per case.

The two take turns, round by round; the least and largest ratios of the rounds follow the median. Shapes are from
SmolLM2-135M: attention, norms and activation, matrix products, sampling.

examples:
  python tests/measure/kernel_times.py --only attention
  python tests/measure/kernel_times.py --only "linear 8" --threads 2 --json kernels.json
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import clock as clocks
import script
import torch
from clock import Arm

from outrider.kernels import attention, fused, int8, linear, noise, sampling
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch
from outrider.server.bench import harness, record
from outrider.server.bench.micro.steps import ModelShape
from outrider.server.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="only cases whose name contains this (default: all)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="number format (default: %(default)s)")
    clocks.add_flags(parser, threads=1)


def run(args: argparse.Namespace) -> int:
    clock = clocks.start(args, args.dtype)
    print(f"{'case':34}{'torch':>10}{'ours':>10}{'torch/ours':>20}")
    results = {}
    for name, plain, ours in cases(ModelShape(), getattr(torch, args.dtype), args.only):
        times = results[name] = clocks.measure({"torch": plain, "ours": ours}, args.rounds, clock)
        columns = "".join(f"{median(arm):10.3f}" for arm in times.values())
        print(f"{name:34}{columns}{harness.ratio(times['torch'], times['ours']).cell:>20}", flush=True)
    if not results:
        raise UserError(f"no case here has {args.only!r} in its name")
    record.write(args.json, "micro kernels", results)
    return 0


def cases(shape: ModelShape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    for make in (_attention_cases, _fused_cases, _linear_cases, _sampling_cases):
        yield from make(shape, dtype, only)


def _attention_cases(shape: ModelShape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
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


def _fused_cases(shape: ModelShape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
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


def _linear_cases(shape: ModelShape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
    """All products of eight layers, so that weights come from memory as in a real step."""
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
        product, weighed = (int8.int8_linear, codes) if name.startswith("int8") else (linear.packed_linear, packed)
        yield name, partial(_multiply, torch.nn.functional.linear, x, weights), partial(_multiply, product, x, weighed)


def _multiply(product: Callable, x: dict[int, torch.Tensor], weights: Sequence) -> None:
    for weight in weights:
        product(x[weight.shape[1] if isinstance(weight, torch.Tensor) else weight.depth], weight)


def _sampling_cases(shape: ModelShape, dtype: torch.dtype, only: str) -> Iterator[tuple[str, Arm, Arm]]:
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


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
