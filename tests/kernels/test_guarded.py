"""No byte past a buffer is read or written: each buffer ends at an inaccessible page.

Sanitizers miss loads of tiles and masked vectors. Runs every instruction set, both types, and sizes that no vector
divides.
"""

import pytest
import torch
from batches import ragged_attention
from instruction_sets import EACH_SET, before_a_guard

from outrider.kernels import noise, sampling
from outrider.kernels.blocks import ACTIVATIONS, KINDS, block_depth, pack_blocks
from outrider.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def check(operation, *arguments) -> None:
    """Check that results and arguments are the same when buffers end at guard pages."""
    plain = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    behind = [before_a_guard(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    expected, got = operation(*plain), operation(*behind)
    for a, b in zip(_tensors([expected, plain]), _tensors([got, behind]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def _tensors(x) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for part in x for t in _tensors(part)] if isinstance(x, (list, tuple)) else []


@EACH_SET
@TYPES
@pytest.mark.parametrize("queries", [1, 2, 5, 40], ids="{} queries".format)
def test_attention(instruction_set, dtype, queries):
    """The pool's last slot is used, and q ends with the last query."""
    for dims in ((64, 64), (32, 48), (16, 16)):
        length = queries + 29
        q, k, v, batch = ragged_attention([queries, 1], [length, 17], dims=dims, dtype=dtype)
        k, v = k[: length + 17].nan_to_num(), v[: length + 17].nan_to_num()
        rows, page_table = torch.tensor([1, 0]), torch.zeros(2, length, dtype=torch.int32)
        page_table[1], page_table[0, :17] = torch.arange(17, length + 17), torch.arange(17)
        check(
            torch.ops.outrider.flat_attention, q, k, v, batch.qo_indptr, batch.kv_lens, rows, page_table,
            0.2, True, -1, 0.0,
        )  # fmt: skip


@EACH_SET
@TYPES
def test_rows(instruction_set, dtype):
    x, residual = torch.randn(2, 5, 48).to(dtype)
    check(torch.ops.outrider.rms_norm, x, residual, torch.rand(48).to(dtype), 1e-5)
    check(torch.ops.outrider.silu_mul, torch.randn(3, 96).to(dtype))
    q, k, v = torch.randn(4, 3, 64).to(dtype), torch.randn(4, 1, 64).to(dtype), torch.randn(4, 1, 48).to(dtype)
    pools = torch.zeros(9, 1, 64).to(dtype), torch.zeros(9, 1, 48).to(dtype)
    positions, slots = torch.tensor([6, 0, 3, 6]), torch.tensor([8, 0, 3, 1])
    check(torch.ops.outrider.rope, q, k, v, positions, torch.randn(7, 64), *pools, slots)


@EACH_SET
@TYPES
@pytest.mark.parametrize("rows", [1, 7, 17])
def test_products(instruction_set, dtype, rows):
    for outputs, depth in ((100, 70), (17, 96), (64, 256), (577, 34), (1, 2)):
        weight, x = torch.randn(outputs, depth).to(dtype), torch.randn(rows, depth).to(dtype)
        bias = torch.randn(-(-outputs // 64) * 64)
        check(torch.ops.outrider.packed_linear, x, torch.ops.outrider.pack_linear(weight), -1, bias, outputs)
        check(torch.ops.outrider.pack_linear, weight)


@EACH_SET
@pytest.mark.parametrize("kind", KINDS)
def test_blocks(instruction_set, kind):
    outputs, depth = 70, 3 * block_depth(kind)
    raw = torch.randint(0x10, 0x30, (outputs, depth // block_depth(kind) * KINDS[kind]), dtype=torch.uint8)
    number = list(KINDS).index(kind)
    check(torch.ops.outrider.pack_blocks, raw, number)
    check(torch.ops.outrider.expand_rows, raw, torch.tensor([69, 0, 69]), number)
    for activations in ACTIVATIONS:
        packed = pack_blocks(raw, kind, outputs, depth, activations=activations)
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 7, 17):
                x = torch.randn(rows, depth).to(dtype)
                check(torch.ops.outrider.packed_linear, x, packed.panels, packed.kind, None, outputs)


@EACH_SET
@TYPES
@pytest.mark.parametrize("columns", [1, 15, 16, 100])
def test_sampling(instruction_set, dtype, columns):
    logits = torch.randn(3, columns).to(dtype)
    rules = torch.tensor([0.0, 0.7, 1.0]), torch.tensor([1, 5, 2**30]), torch.tensor([1.0, 0.8, 1.0]), torch.zeros(3)
    keys = torch.tensor([3, 4, 5])
    check(sampling.argmax, logits)
    check(torch.ops.outrider.target_probs, logits, *rules)
    check(noise.gumbel_argmax, logits.float().softmax(-1), keys)
    check(noise.gumbel_argmax, logits.float().softmax(-1), keys, torch.arange(columns) * 3)
