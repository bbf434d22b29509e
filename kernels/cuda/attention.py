"""Flat attention of ragged queries over a paged cache. The host need not know its lengths; see `kernels/attention.py`.

The rows of a tile are queries of one request times the heads that share a KV head, so a key is read once for all of
them. 8 verified tokens of 4 grouped heads fill 32 rows, two tiles of a tensor core. A program reads keys and values
of its KV head and its share of the positions once: 4 * D bytes a position in half precision, plus 4 of page table. Rows
of D numbers are contiguous, so every load is 16 bytes wide though slots are scattered. Tensor cores multiply powers of
two: heads of other sizes are padded with zeros in registers, which takes no memory traffic.

Splits: a request's blocks of positions are cut into `splits` shares of at least LEAST positions, so that
R * Hkv * splits programs fill the processor; each writes its rows' sums (4 * (D + 2) bytes a row), which a second
kernel merges. The number depends on shapes alone. In float32, which serves exactness, requests are not
split: every query adds up the same blocks in the same order, independent of its request and batch.
"""

import torch
import triton
import triton.language as tl

PROGRAMS = 528
"""Least programs wanted: four for each of an H100's 132 multiprocessors, so that their loads overlap."""
LEAST = 512
"""Least positions of a split: 256 KB of keys and values at D = 128. The partial sums of 64 rows, 33 KB written and read
again, are a quarter of that."""
MOST_SPLITS = 32
MOST_SUMS = 64 * 128
"""Most numbers of a tile's sums, to stay in registers; further queries take another tile and read keys from L2."""
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-1.0e30)  # score of masked positions: finite, so that an empty block yields no NaN


@triton.jit
def of_head(mask, d, DIM: tl.constexpr, WIDE: tl.constexpr):
    """The mask without the columns d that fill a head's DIM numbers up to WIDE."""
    if WIDE != DIM:
        mask = mask & (d < DIM)
    return mask


@triton.jit
def share(kv_len, q_len, first, last, window, splits, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr):
    """Return (first block, end of visible positions, blocks of a split) for queries first..last of a request.

    Blocks begin at multiples of BLOCK_N, whatever the window.
    """
    end = kv_len
    if CAUSAL:
        end = kv_len - q_len + last + 1
    begin = end * 0
    if window >= 0:
        begin = tl.maximum(kv_len - q_len + first - window, 0)
    block = begin // BLOCK_N
    count = (end + BLOCK_N - 1) // BLOCK_N - block
    return block, end, tl.maximum((count + splits - 1) // splits, LEAST // BLOCK_N)


@triton.jit(do_not_specialize=["window", "splits"])
def attention_kernel(
    q, k_pool, v_pool, qo_indptr, kv_lens, rows, page_table, out, sums, scales, scale, cap, window, splits, q_stride,
    k_stride, v_stride, page_stride, out_stride, q_head, k_head, v_head, tiles, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Program (request * tiles + tile, KV head, split)."""
    r, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, split = tl.program_id(1), tl.program_id(2)
    start = tl.load(qo_indptr + r).to(tl.int64)
    q_len = (tl.load(qo_indptr + r + 1) - start).to(tl.int32)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if tile * BLOCK_M >= q_len * GROUP:
        return
    kv_len = tl.load(kv_lens + r).to(tl.int32)
    query, there = m // GROUP, m < q_len * GROUP
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    block, end, blocks = share(kv_len, q_len, tile * BLOCK_M // GROUP, last, window, splits, CAUSAL, BLOCK_N, LEAST)
    low = (block + split * blocks) * BLOCK_N
    high = tl.minimum(low + blocks * BLOCK_N, end)
    if low >= high:
        if split > 0:
            return
    d = tl.arange(0, WIDE)
    at = (start + query).to(tl.int64)
    heads = head * GROUP + m % GROUP
    filled = of_head(there[:, None], d[None, :], DIM, WIDE)
    queries = tl.load(q + (at * q_stride + heads * q_head)[:, None] + d[None, :], mask=filled, other=0.0)
    position = kv_len - q_len + query
    pages = page_table + tl.load(rows + r).to(tl.int64) * page_stride
    largest = tl.full([BLOCK_M], NONE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    for begin in range(low, high, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        inside = n < end
        slot = tl.load(pages + n, mask=inside, other=0).to(tl.int64)
        known = of_head(inside[None, :], d[:, None], DIM, WIDE)
        keys = tl.load(k_pool + (slot * k_stride + head * k_head)[None, :] + d[:, None], mask=known, other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if cap > 0:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))  # cap * tanh(scores / cap)
        seen = inside[None, :] & there[:, None]
        if CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
        if window >= 0:
            seen = seen & (n[None, :] >= position[:, None] - window)
        scores = tl.where(seen, scores * LOG2_E, NONE)
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - larger[:, None]), 0.0)
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        known = of_head(inside[:, None], d[None, :], DIM, WIDE)
        values = tl.load(v_pool + (slot * v_stride + head * v_head)[:, None] + d[None, :], mask=known, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        largest = larger
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLIT:
        place = (at * HEADS + heads) * splits + split
        tl.store(sums + place[:, None] * DIM + d[None, :], acc, mask=filled)
        tl.store(scales + place * 2, largest, mask=there)
        tl.store(scales + place * 2 + 1, total, mask=there)
    else:
        to = out + (at * out_stride + heads * DIM)[:, None] + d[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=["window", "splits"])
def merge_kernel(
    qo_indptr, kv_lens, out, sums, scales, window, splits, out_stride, queries, tiles, HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (request * queries + query, head): puts the splits of one row together, in their order."""
    r, query = tl.program_id(0) // queries, tl.program_id(0) % queries
    head = tl.program_id(1)
    start = tl.load(qo_indptr + r).to(tl.int64)
    q_len = (tl.load(qo_indptr + r + 1) - start).to(tl.int32)
    if query >= q_len:
        return
    kv_len = tl.load(kv_lens + r).to(tl.int32)
    tile = (query * GROUP + head % GROUP) // BLOCK_M
    last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    block, end, blocks = share(kv_len, q_len, tile * BLOCK_M // GROUP, last, window, splits, CAUSAL, BLOCK_N, LEAST)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    used = (split < splits) & ((split == 0) | ((block + split * blocks) * BLOCK_N < end))
    place = ((start + query) * HEADS + head) * splits + split
    largest = tl.load(scales + place * 2, mask=used, other=NONE)
    total = tl.load(scales + place * 2 + 1, mask=used, other=0.0)
    weights = total * tl.exp2(largest - tl.max(largest, 0))
    known = of_head(used[:, None], d[None, :], DIM, WIDE)
    parts = tl.load(sums + place[:, None] * DIM + d[None, :], mask=known, other=0.0)
    mean = tl.sum(parts * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(out + (start + query) * out_stride + head * DIM + d, mean.to(out.dtype.element_ty), mask=d < DIM)


def splits_for(requests: int, tiles: int, kv_heads: int, context: int, dtype: torch.dtype) -> int:
    """Return the number of splits, a power of two, from shapes alone."""
    if dtype == torch.float32:
        return 1
    wanted = triton.cdiv(PROGRAMS, max(1, requests * tiles * kv_heads))
    return min(MOST_SPLITS, triton.next_power_of_2(min(wanted, max(1, context // LEAST))))


def wide(dim: int) -> int:
    """Return a head's columns in a tile: `dim`, rounded up to a power of two of at least 16 for the tensor cores."""
    return max(16, triton.next_power_of_2(dim))


def tile_for(rows: int, dim: int, exact: bool) -> tuple[int, int]:
    """Return rows and cached positions of a tile. rows: of the request. dim: width of a head. exact: float32, which has
    one size for all batches, so that a query's sum is the same in each."""
    most = min(64, MOST_SUMS // wide(dim))  # of positions, too: keys and values being loaded fit shared memory
    if exact:
        return 16, max(16, min(32, most // 2))
    return min(most, max(16, triton.next_power_of_2(rows))), most


def warps_for(rows: int, dim: int) -> int:
    """Return the warps that keep a program's sums in registers (measured by `tests/support/compiled_kernels.py`)."""
    return 8 if rows * wide(dim) >= MOST_SUMS else 4


def attention(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, qo_indptr: torch.Tensor, kv_lens: torch.Tensor,
    rows: torch.Tensor, page_table: torch.Tensor, most_queries: int, scale: float, causal: bool, window: int,
    logit_cap: float,
) -> torch.Tensor:  # fmt: skip
    tokens, heads, dim = q.shape
    requests, kv_heads = len(kv_lens), k_pool.shape[1]
    group, exact = heads // kv_heads, q.dtype == torch.float32
    block_m, block_n = tile_for(most_queries * group, dim, exact)
    tiles = triton.cdiv(most_queries * group, block_m)
    splits = splits_for(requests, tiles, kv_heads, page_table.shape[1], q.dtype)
    out = q.new_zeros(tokens, heads, dim)  # rows that no request owns stay 0
    if not tokens or not requests:
        return out
    sums, scales = out, out
    if splits > 1:
        sums = torch.empty((tokens, heads, splits, dim), dtype=torch.float32, device=q.device)
        scales = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    shapes = {"HEADS": heads, "GROUP": group, "DIM": dim, "WIDE": wide(dim), "CAUSAL": causal}
    shapes |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    attention_kernel[(requests * tiles, kv_heads, splits)](
        q, k_pool, v_pool, qo_indptr, kv_lens, rows, page_table, out, sums, scales, scale, logit_cap, window, splits,
        q.stride(0), k_pool.stride(0), v_pool.stride(0), page_table.stride(0), out.stride(0), q.stride(1),
        k_pool.stride(1), v_pool.stride(1), tiles, **shapes, SPLIT=splits > 1, LEAST=LEAST,
        num_warps=warps_for(block_m, dim), num_stages=2 if exact else 3,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(requests * most_queries, heads)](
            qo_indptr, kv_lens, out, sums, scales, window, splits, out.stride(0), most_queries, tiles, **shapes,
            LEAST=LEAST, SPLITS=splits, num_warps=1 if splits <= 4 else 4,
        )  # fmt: skip
    return out
