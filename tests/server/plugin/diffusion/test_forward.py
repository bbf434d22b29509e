"""The layout of blocks and drafts in one forward, compared with a mask over each request's own sequence."""

import pytest
import torch

from outrider.kernels.attention import flat_attention
from outrider.server.plugin.diffusion.forward import PADDING_SLOT, OpenRows, flatten
from outrider.server.plugin.diffusion.target import DiffusionTarget

BLOCK, HEADS, KV_HEADS, WIDTH, CONTEXT = 4, 4, 2, 16, 32
TARGETS = {
    f"{context} context, {'shift' if shift else 'no shift'}": DiffusionTarget(
        block_size=BLOCK, mask_token_id=0, shift=shift, causal_context=context == "causal"
    )
    for context in ("block", "causal")
    for shift in (False, True)
}


class Batch:
    """Three requests with 16, 8 and 0 cached tokens. The first computes a final and an open block and two drafts of the
    latter, the second three final blocks, the third its first, open one. Then come a complete draft of the first one's
    open block and the next block."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        slots = 1 + torch.randperm(200, generator=draw)
        self.page_table = slots[: 3 * CONTEXT].view(3, CONTEXT).int()
        starts = [16, 20, 20, 20, 8, 12, 16, 0, 20, 24]
        self.tables = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 0, 0])
        self.starts = torch.tensor(starts)
        block_slots = self.page_table[self.tables[:, None], self.starts[:, None] + torch.arange(BLOCK)].long()
        block_slots[[2, 3, 8, 9]] = slots[3 * CONTEXT : 3 * CONTEXT + 4 * BLOCK].view(4, BLOCK)
        self.rows = OpenRows(
            tokens=torch.randint(1, 50, (10, BLOCK), generator=draw), starts=self.starts,
            before=torch.tensor([7, 7, 7, 7, 8, 8, 8, 0, 7, 9]), tables=self.tables, slots=block_slots,
            open=torch.tensor([False, True, True, True, False, False, False, True, False, True]),
            above=torch.tensor([-1] * 9 + [8]),
        )  # fmt: skip
        self.k, self.v = torch.randn(2, 201, KV_HEADS, WIDTH, generator=draw)

    def expected(self, q: torch.Tensor, row: int, place: int, causal: bool) -> torch.Tensor:
        """Softmax attention of the query at a place of a block, gathered slot by slot."""
        start, final = int(self.starts[row]), not bool(self.rows.open[row])
        end = start + place + 1 if causal and final else start + BLOCK
        before = self.page_table[self.tables[row], :start].tolist()
        if (above := int(self.rows.above[row])) >= 0:
            before[-BLOCK:] = self.rows.slots[above].tolist()
        slots = [*before, *self.rows.slots[row].tolist()][:end]
        keys, values = (pool[torch.tensor(slots)].repeat_interleave(HEADS // KV_HEADS, 1) for pool in (self.k, self.v))
        weights = (torch.einsum("hd,khd->hk", q, keys) * WIDTH**-0.5).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, values)


def some(rows: OpenRows, chosen: list[int]) -> OpenRows:
    return OpenRows(**{name: getattr(rows, name)[chosen] for name in OpenRows.__dataclass_fields__})


@pytest.mark.parametrize("chosen", [[*range(8)], [0, 1, 4, 5, 6, 7], [4, 5, 6], [1, 2]], ids=str)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_token_sees_its_block_and_earlier_ones(target: DiffusionTarget, chosen: list[int], compiled: None) -> None:
    batch = Batch()
    batch.rows, batch.starts, batch.tables = some(batch.rows, chosen), batch.starts[chosen], batch.tables[chosen]
    flat = flatten(batch.rows, target, batch.page_table)
    lens = flat.batch.qo_indptr.diff()
    assert flat.batch.tokens == len(flat.tokens)
    assert (lens <= flat.batch.kv_lens).all()
    q = torch.randn(len(flat.tokens), HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    output = flat_attention(q, batch.k, batch.v, flat.batch, scale=WIDTH**-0.5, causal=flat.causal)
    for row in range(len(batch.rows)):
        for place in range(BLOCK):
            at = row * BLOCK + place
            expected = batch.expected(q[at], row, place, target.causal_context)
            torch.testing.assert_close(output[at], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_rows_that_predict_each_position(target: DiffusionTarget) -> None:
    batch = Batch()
    rows, flat = batch.rows, flatten(batch.rows, target, batch.page_table)
    blocks = len(rows) * BLOCK
    block_rows = torch.arange(blocks).view(-1, BLOCK)
    assert torch.equal(flat.tokens[:blocks].view(-1, BLOCK), rows.tokens)
    assert torch.equal(flat.slots[:blocks].view(-1, BLOCK), rows.slots)
    assert torch.equal(flat.positions[:blocks].view(-1, BLOCK), rows.starts[:, None] + torch.arange(BLOCK))
    if not target.shift:
        assert torch.equal(flat.says, block_rows)
        assert len(flat.tokens) == blocks
        return
    assert torch.equal(flat.says[rows.open, 1:], block_rows[rows.open, :-1])
    assert flat.says[1:4, 0].tolist() == [BLOCK - 1] * 3  # the last row of the final block before it, for drafts too
    assert flat.says[7, 0] == -1  # no row comes before position 0
    assert len(flat.tokens) == blocks


def test_under_a_shift_the_token_before_is_computed_again_where_it_must_be() -> None:
    """It is computed once for an open block and its drafts, and its slot is unchanged."""
    batch, target = Batch(), TARGETS["causal context, shift"]
    flat = flatten(some(batch.rows, [1, 2, 3]), target, batch.page_table)
    assert flat.says[:, 0].tolist() == [3 * BLOCK] * 3
    assert (flat.tokens[-1], flat.positions[-1], flat.slots[-1]) == (7, 19, PADDING_SLOT)
    assert flat.batch.host_kv_lens[-1] == 20
    assert len(flat.tokens) == 3 * BLOCK + 1
