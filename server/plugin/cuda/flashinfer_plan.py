"""FlashInfer's plan of a ragged verification: the rows and cached positions of each request.

FlashInfer's fa2 kernels cut a request's keys into chunks. Both the plan (on the host) and the kernel (from its own copy
of the lengths) count them to locate partial results: `PrefillSplitQOKVIndptr` of its scheduler.cuh, `num_kv_chunks` of
its prefill.cuh, 0.6.15. So an upper bound of a cached length is not enough: with more chunks in the plan than in the
kernel, it merges partial results of another chunk. Lengths are exact here.
"""

from dataclasses import dataclass

import numpy as np

PAGE = 1
"""Tokens of a page: SGLang passes single slots to FlashInfer, with any page size of its allocator."""

LARGE, MIDDLE, SMALL = 128, 64, 16
"""Rows of a FlashInfer tile: queries of one request times the heads that share a KV head."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A plan for R requests, laid out in S slots and T rows of queries.

    qo_indptr: [S + 1] int32, rows `qo_indptr[s]:qo_indptr[s + 1]` belong to slot s; the last is T.
    kv_indptr: [S + 1] int32, begin of each slot's cached positions in the list of all.
    kv_begins: [R] int32, the position that a request's list begins at: later ones follow, up to its last query's own.
    """

    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_begins: np.ndarray

    @property
    def kv_lens(self) -> np.ndarray:
        """Cached positions of each slot, [S] int32."""
        return np.diff(self.kv_indptr)


def plan_verify(
    query_lens: np.ndarray, seq_lens: np.ndarray, *, tokens: int, slots: int, window: int = -1
) -> FlashInferPlan:
    """Lay out a verification of query_lens [R] tokens after seq_lens [R] cached ones.

    tokens: rows of the forward. Rows that no request uses are padding and belong to the first free slot, because
    FlashInfer requires every row of q in `qo_indptr`. This slot sees as many positions as it has rows, since no query
    may lie before its first key. Further slots are empty.
    window: as in `kernels.attention.flat_attention`. The list omits positions before the first query's window. This
    only saves time: FlashInfer also applies the window itself.

    Raises ValueError if the requests do not fit.
    """
    count, padding = len(query_lens), tokens - int(query_lens.sum())
    if padding < 0 or count + (padding > 0) > slots:
        raise ValueError(
            f"{count} requests of {tokens - padding} tokens do not fit {tokens} rows and {slots} slots"
            + " with one for padding" * (padding > 0)
        )
    begins = np.maximum(seq_lens - window, 0) if window >= 0 else np.zeros_like(seq_lens)
    queries, cached = np.zeros((2, slots), dtype=np.int64)
    queries[:count], cached[:count] = query_lens, seq_lens + query_lens - begins
    if padding:
        queries[count] = cached[count] = padding
    return FlashInferPlan(_indptr(queries), _indptr(cached), begins.astype(np.int32))


def tile_rows(packed: int, head_dim: int) -> int:
    """Return FlashInfer's tile for requests of `packed` rows, as `FA2DetermineCtaTileQ` of its utils.cuh, for heads of
    less than 512 numbers."""
    if packed > MIDDLE and head_dim < 256:
        return LARGE
    return MIDDLE if packed > SMALL else SMALL


def slots_for_tile(tokens: int, slots: int, *, width: int, group: int, head_dim: int) -> int:
    """Return how many slots, at least `slots`, keep a graph's tiles as small as a request of `width` queries needs.

    FlashInfer does not know the longest possible request. For a graph it takes the tile for a request with all rows
    except one per remaining slot. Additional empty slots make that request shorter.
    group: heads that share a KV head.
    """
    needed = tile_rows(width * group, head_dim)
    if tile_rows((tokens - slots + 1) * group, head_dim) <= needed:
        return slots
    return tokens + 1 - needed // group


def _indptr(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], lens.cumsum()]).astype(np.int32)
