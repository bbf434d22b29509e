"""An attention layer of SGLang's over its paged KV cache on a CPU, and batches for its backends."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from references import reference_attention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.ragged import flatten_verify
from outrider.server.plugin.hooks.platform import OutriderCpuPlatform
from outrider.server.plugin.spec_inputs import indptr, ragged_layout, verify_input

CONTEXT = 512


class Paged:
    """Requests with cached tokens in slots far apart; unused slots hold NaN, except slot 0 for padding."""

    def __init__(
        self, lens: Sequence[int], *, heads: tuple[int, int], dim: int, dtype: torch.dtype = torch.float32,
        window: int = -1, cap: float = 0.0, room: int = 16, seed: int = 0,
    ):  # fmt: skip
        """lens: cached tokens. room: tokens that may follow."""
        self.random = torch.Generator().manual_seed(seed)
        self.lens, self.heads, self.dim, self.dtype = list(lens), heads, dim, dtype
        slots = sum(lens) + room * len(lens) + 40
        self.requests = ReqToTokenPool(len(lens) + 4, CONTEXT, "cpu", enable_memory_saver=False)
        pool = OutriderCpuPlatform().get_kv_pool_cls(kind="mha")
        assert pool is not None
        self.cache = pool(slots, 1, dtype, heads[1], dim, 1, "cpu", False, enable_alt_stream=False)
        self.layer = RadixAttention(
            heads[0], dim, dim**-0.5, heads[1], 0, logit_cap=cap, sliding_window_size=window if window >= 0 else -1
        )
        self.rows = torch.randperm(len(lens) + 4, generator=self.random)[: len(lens)] + 1
        free = torch.randperm(slots, generator=self.random) + 1
        keys, values = self.cache.get_key_buffer(0), self.cache.get_value_buffer(0)
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
        keys[0] = values[0] = 0
        for row, length in zip(self.rows, lens, strict=True):
            owned, free = free[: length + room], free[length + room :]
            self.requests.req_to_token[row, : length + room] = owned.int()
            keys[owned[:length]] = self._draw(length, heads[1])
            values[owned[:length]] = self._draw(length, heads[1])

    def _draw(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.dim, generator=self.random).to(self.dtype)

    def runner(self, **more: Any) -> Any:
        return SimpleNamespace(req_to_token_pool=self.requests, token_to_kv_pool=self.cache, **more)

    def rows_of(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (self._draw(tokens, self.heads[0]).flatten(1), *(self._draw(tokens, self.heads[1]) for _ in range(2)))

    def verify(self, query_lens: Sequence[int], *, tokens: int, width: int) -> ForwardBatch:
        """Verify query_lens tokens after the cached ones, in a bucket of `tokens`."""
        lens, seq_lens, count = torch.tensor(query_lens), torch.tensor(self.lens), len(query_lens)
        nothing = torch.zeros(count, dtype=torch.int64), torch.zeros((count, width - 1), dtype=torch.int64)
        table = self.requests.req_to_token
        flat = flatten_verify(*nothing, lens - 1, seq_lens, table, self.rows, tokens)
        spec = verify_input(flat.positions, ragged_layout(flat.qo_indptr, tokens), width, False)
        return self._batch(ForwardMode.TARGET_VERIFY, flat.slots, seq_lens, spec_info=spec, positions=flat.positions)

    def extend(self, extend_lens: Sequence[int]) -> ForwardBatch:
        lens, before = torch.tensor(extend_lens), torch.tensor(self.lens)
        pairs = zip(self.rows, self.lens, extend_lens, strict=True)
        slots = torch.cat([self.requests.req_to_token[row, start : start + more] for row, start, more in pairs])
        return self._batch(
            ForwardMode.EXTEND, slots.long(), before + lens, extend_seq_lens=lens, extend_prefix_lens=before,
            extend_seq_lens_cpu=list(extend_lens), extend_prefix_lens_cpu=self.lens,
        )  # fmt: skip

    def decode(self) -> ForwardBatch:
        seq_lens = torch.tensor(self.lens)
        slots = self.requests.req_to_token[self.rows, seq_lens].long()
        return self._batch(ForwardMode.DECODE, slots, seq_lens + 1)

    def _batch(self, mode: ForwardMode, slots: torch.Tensor, seq_lens: torch.Tensor, **more: Any) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=mode, batch_size=len(seq_lens), input_ids=torch.zeros_like(slots),
            req_pool_indices=self.rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens, out_cache_loc=slots,
            seq_lens_sum=int(seq_lens.sum()), **more,
        )  # fmt: skip

    def expected(self, q: torch.Tensor, query_lens: Sequence[int]) -> torch.Tensor:
        """The reference's results for rows with written keys and values."""
        lens = torch.tensor(query_lens)
        table = self.requests.req_to_token
        batch = FlatBatch(indptr(lens), (torch.tensor(self.lens) + lens).int(), self.rows, table)
        keys, values = self.cache.get_key_buffer(0).float(), self.cache.get_value_buffer(0).float()
        rows = q[: batch.tokens].view(-1, self.heads[0], self.dim).float()
        layer = self.layer
        return reference_attention(
            rows, keys, values, batch, scale=layer.scaling, window=layer.sliding_window_size, logit_cap=layer.logit_cap
        ).flatten(1)
