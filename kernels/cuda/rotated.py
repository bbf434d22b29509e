"""Norms and rotation of a draft layer's queries and keys, and writing keys and values to the cache, in one launch.

`drafters/block/layers.py` has the same in torch, in fourteen launches.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["last"], do_not_specialize_on_alignment=["positions", "slots"])
def rotate_kernel(
    x, table, positions, slots, q_weight, k_weight, q, keys, values, stride, last, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Program (row, head): one head of queries, then of keys, then of values."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, WIDE)
    inside, pair = i < DIM, (i + DIM // 2) % DIM
    at, slot = x + row.to(tl.int64) * stride + head * DIM, tl.load(slots + row).to(tl.int64)
    own = tl.load(at + i, mask=inside, other=0.0)
    if head >= HEADS + KV_HEADS:
        tl.store(values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + i, own, mask=inside)
        return
    a, b = own.to(tl.float32), tl.load(at + pair, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        weight = k_weight
        if head < HEADS:
            weight = q_weight
        scale = tl.rsqrt(tl.sum(a * a) / DIM + eps)
        a *= scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
        b *= scale * tl.load(weight + pair, mask=inside, other=0.0).to(tl.float32)
    turn = table + tl.minimum(tl.load(positions + row), last).to(tl.int64) * (2 * DIM)
    cos, sin = tl.load(turn + i, mask=inside, other=0.0), tl.load(turn + DIM + i, mask=inside, other=0.0)
    out = (a * cos.to(tl.float32) + b * sin.to(tl.float32)).to(own.dtype)
    if head < HEADS:
        tl.store(q + (row.to(tl.int64) * HEADS + head) * DIM + i, out, mask=inside)
    else:
        tl.store(keys + (slot * KV_HEADS + head - HEADS) * DIM + i, out, mask=inside)


def rotate_and_store(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return q [N, Hq, D], normed and rotated; write the N rows' keys and values [slots, Hkv, D] at their slots [N].

    x: [N, (Hq + 2 Hkv) D] projected queries, keys and values; Hq may be 0. table: of `layers.Rotary`, [P, 2 D].
    positions: [N]; beyond the table its last row applies. q_weight, k_weight: [D] of the norms; None: no norms.
    """
    kv_heads, dim = keys.shape[1:]
    heads = x.shape[1] // dim - 2 * kv_heads
    q = x.new_empty(len(x), heads, dim)
    if len(x):
        normed = k_weight is not None
        rotate_kernel[(len(x), heads + 2 * kv_heads)](
            x, table, positions, slots, q_weight if normed else x, k_weight if normed else x, q if heads else x, keys,
            values, x.stride(0), len(table) - 1, eps, HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
            WIDE=triton.next_power_of_2(dim), NORMED=normed, num_warps=1,
        )  # fmt: skip
    return q
