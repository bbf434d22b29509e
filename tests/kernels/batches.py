"""Random ragged batches for kernels and their references, and a decoder on them.

They are made on the host from a seed, so every machine gets the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from references import reference_target_probs

from outrider.kernels.decoder import Decoder, DecoderLayer, forward_by_operations
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.noise import torch_gumbel_argmax
from outrider.kernels.sampling import Rules


def ragged_attention(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (9, 3),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, FlatBatch]:
    """q, k_pool, v_pool and a batch with scattered slots; unused page-table entries point outside the
    pool."""
    generator = torch.Generator().manual_seed(seed)
    requests, slots = len(q_lens), sum(kv_lens) + 16
    free = torch.randperm(slots, generator=generator).int().split([*kv_lens, 16])
    page_table = torch.full((requests + 3, max(kv_lens) + 5), 2**30, dtype=torch.int32)
    rows = torch.randperm(requests + 3, generator=generator)[:requests]
    for row, owned in zip(rows, free, strict=False):
        page_table[row, : len(owned)] = owned
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).int()
    batch = FlatBatch(qo_indptr, torch.tensor(kv_lens).int(), rows, page_table)
    q, k_pool, v_pool = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((sum(q_lens), heads[0], dims[0]), (slots, heads[1], dims[0]), (slots, heads[1], dims[1]))
    )
    k_pool[free[-1].long()] = v_pool[free[-1].long()] = torch.nan
    return q, k_pool, v_pool, batch


def alone(batch: FlatBatch, token: int) -> FlatBatch:
    """The batch that decodes only query `token`."""
    row = batch.rows[batch.requests_of_tokens[token], None]
    indptr = torch.tensor([0, 1], dtype=torch.int32, device=row.device)
    return FlatBatch(indptr, batch.positions[token, None].int() + 1, row, batch.page_table)


def some_rules(rows: int, width: int, generator: torch.Generator) -> Rules:
    """Greedy, unfiltered, each filter alone, all filters, and filters that keep all tokens or one."""

    def choose(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    return Rules(
        choose([0.0, 0.7, 1.0, 1.0, 1.3]),
        choose([2**30, 2**30, 1, 2, 7, width]),
        choose([1.0, 1.0, 0.9, 0.5, 0.0, 0.99]),
        choose([0.0, 0.0, 0.05, 0.3, 1.0]),
    )


def flattening(
    requests: int, gamma: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first six arguments of `ragged.flatten_verify`: random lengths, scattered slots."""
    generator = torch.Generator().manual_seed(seed)
    context = 2 * gamma + 5
    lens = torch.randint(0, gamma + 1, (requests,), generator=generator)
    return (
        torch.randint(1000, (requests,), generator=generator),
        torch.randint(1000, (gamma, requests), generator=generator).T,  # strided, as a drafter may give them
        lens,
        torch.randint(context - gamma, (requests,), generator=generator),
        torch.randperm((requests + 3) * context, generator=generator).view(-1, context).int(),
        torch.randperm(requests + 3, generator=generator)[:requests],
    )


def admission(
    requests: int, gamma: int, seed: int, *, hurried: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Confidences [R, gamma] with ties and NaN, drafted lengths [R], and with `hurried` the urgent requests [R]
    bool."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.tensor([0.0, 0.25, 0.5, 0.5, 0.9, 1.0, 1.5, -1.0, torch.nan])
    confidence = confidence[torch.randint(9, (gamma, requests), generator=generator)].T
    confidence = torch.where(torch.rand(confidence.shape, generator=generator) < 0.5, 0.8, confidence)
    draft_lens = torch.randint(gamma + 1, (requests,), generator=generator)
    return confidence, draft_lens, torch.rand(requests, generator=generator) < 0.3 if hurried else None


def verification(
    requests: int, gamma: int, width: int, q_kind: str, dtype: torch.dtype, seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a verification with three rows of padding: tokens, verify_lens, qo_indptr, request, logits and
    rules; the rest by name.

    q_kind: "full", "truncated" (every second token) or "point mass".
    """
    generator = torch.Generator().manual_seed(seed)
    verify_lens = torch.randint(0, gamma + 1, (requests,), generator=generator)
    qo_indptr = torch.nn.functional.pad((verify_lens + 1).cumsum(0), (1, 0))
    total = int(qo_indptr[-1]) + 3
    logits = (torch.randn(total, width, generator=generator) * 2).to(dtype)
    request = torch.searchsorted(qo_indptr[1:].contiguous(), torch.arange(total), right=True).clamp(max=requests - 1)
    given = some_rules(requests, width, generator)
    decided = torch.rand(requests, generator=generator) < 0.4
    vocab = torch.arange(0, width, 2) if q_kind == "truncated" else None
    q = (torch.randn(requests, gamma, width if vocab is None else len(vocab), generator=generator) * 2).softmax(-1)

    def keys(count: int) -> torch.Tensor:
        return torch.randint(2**62, (count,), generator=generator)

    tokens = torch_gumbel_argmax(q.flatten(0, 1), keys(requests * gamma)).view(requests, gamma)
    tokens = tokens if vocab is None else vocab[tokens]
    row_keys, probs = keys(total), reference_target_probs(logits, *given.of(request))
    # In decided requests, most drafts are the wanted tokens.
    wanted = torch_gumbel_argmax(probs.nan_to_num(1.0), row_keys)
    agree = wanted[qo_indptr[:-1, None] + torch.arange(gamma).clamp(max=verify_lens[:, None])]
    lucky = torch.rand(tokens.shape, generator=generator) < 0.7
    tokens = agree.where(lucky & (decided | (given.temperatures <= 0))[:, None], tokens)
    tokens = tokens.where(torch.arange(gamma) < verify_lens[:, None], 10**9)
    keywords = {
        "uniforms": torch.rand(requests, gamma, generator=generator, dtype=torch.float64), "final_keys": keys(requests),
        "decided": decided, "row_keys": row_keys, "draft_probs": None if q_kind == "point mass" else q, "vocab": vocab,
    }  # fmt: skip
    return (tokens, verify_lens, qo_indptr, request, logits, given), keywords


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    whole = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


def check_rows_are_independent(
    multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, counts: Sequence[int]
) -> None:
    """Check that the first rows of x, and the last, have the same bits without the others."""
    together = multiply(x)
    for rows in counts:
        assert same_bits(multiply(x[:rows]), together[:rows]), f"{rows} rows"
        assert same_bits(multiply(x[-rows:]), together[-rows:]), f"last {rows} rows"


def assert_same_bits(layers: list[DecoderLayer], dtype: torch.dtype, batches: dict[str, tuple]) -> None:
    """Check that a decoder of these layers has the bits of its single operations.

    batches: queries and cached positions of each request, by name. Widths are multiples of 32; keys and values have one
    width.
    """
    qkv, out = layers[0].weights[:2]
    hidden, heads = qkv.depth, (out.depth // 32, (qkv.outputs - out.depth) // 64)
    norm, cos_sin = torch.linspace(0.5, 2, hidden).to(dtype), torch.randn(1200, 32)
    for name, (q_lens, kv_lens) in batches.items():
        _, k_pool, v_pool, batch = ragged_attention(q_lens, kv_lens, heads=heads, dims=(32, 32))
        slots = batch.page_table[batch.rows[batch.requests_of_tokens], batch.positions].long()
        x = torch.randn(batch.tokens, hidden).to(dtype)
        captures = [([], True)] if len(layers) < 3 else [([], True), ([1], False), ([1, 2], True)]
        for captured, causal in captures:
            results = []
            for run in (Decoder.forward, forward_by_operations):
                pools = [(k_pool.to(dtype, copy=True), v_pool.to(dtype, copy=True)) for _ in layers]
                decoder, residual = Decoder(layers, pools, norm, cos_sin), x.clone()
                normed, kept = run(decoder, residual, batch.positions, slots, batch, captured, causal)
                results.append((normed, kept, residual, *(pool for pair in pools for pool in pair)))
            assert results[0][1].shape == (batch.tokens, len(captured), hidden)
            for read in (batch.qo_indptr[1:].long() - 1, torch.arange(0, batch.tokens, 3)) if causal else ():
                pools = [(k_pool.to(dtype, copy=True), v_pool.to(dtype, copy=True)) for _ in layers]
                decoder = Decoder(layers, pools, norm, cos_sin)
                some = decoder.forward(x.clone(), batch.positions, slots, batch, captured, read=read)
                all_rows = results[0][0][read], results[0][1], *results[0][3:]
                assert_equal((*some, *(pool for pair in pools for pool in pair)), all_rows, f"{name}, read {read}")
            assert_equal(*results, f"{name}, captured {captured}, causal {causal}")


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], case: str) -> None:
    """Check for equal bits; unused slots hold NaN."""
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert ((got == wanted) | (got.isnan() & wanted.isnan())).all(), case
