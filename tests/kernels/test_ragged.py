"""Flattening and page-table writes: compiled kernels against torch, both against loops."""

import pytest
import torch

from outrider.kernels.cpu import native
from outrider.kernels.ragged import flatten_verify, write_page_table

CONTEXT, GAMMA = 40, 7

needs_compiled = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")


def verify_batch(generator):
    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    requests = int(draw(9, 1)) + 1
    page_table = torch.randperm(12 * CONTEXT, generator=generator).view(12, CONTEXT).to(torch.int32)
    return (
        draw(1000, requests),
        draw(1000, GAMMA, requests).T,  # strided, as a drafter may give them
        draw(GAMMA + 1, requests),
        draw(CONTEXT - GAMMA - 1, requests),
        page_table,
        torch.randperm(12, generator=generator)[:requests],
    )


def rows_of(anchors, drafts, verify_lens, seq_lens, page_table, rows):
    """Each row's token, position, slot, request and step, one request after the other."""
    for request, last in enumerate(verify_lens.tolist()):
        for step in range(last + 1):
            position = int(seq_lens[request]) + step
            token = drafts[request, step - 1] if step else anchors[request]
            yield int(token), position, int(page_table[rows[request], position]), request, step


def test_flattened_as_by_a_loop():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        batch = verify_batch(generator)
        flat = flatten_verify(*batch, int((batch[2] + 1).sum()))
        columns = flat.input_ids, flat.positions, flat.slots, flat.request, flat.step
        assert list(zip(*(x.tolist() for x in columns), strict=True)) == list(rows_of(*batch))
        assert flat.qo_indptr.tolist() == [0, *(batch[2] + 1).cumsum(0).tolist()]


@needs_compiled
def test_flattened_as_by_torch():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        batch = verify_batch(generator)
        plain = flatten_verify(*batch, int((batch[2] + 1).sum()))
        for got, expected in zip(flatten_verify(*batch), plain, strict=True):
            assert got.dtype == torch.int64
            assert torch.equal(got, expected)


@needs_compiled
@pytest.mark.parametrize("index", [2, 3, 5], ids=["verify_lens", "seq_lens", "rows"])
@pytest.mark.parametrize("value", [-1, CONTEXT])
def test_no_number_outside_the_page_table_is_read(index, value):
    batch = list(verify_batch(torch.Generator().manual_seed(1)))
    batch[index] = batch[index].clone()
    batch[index][-1] = value
    with pytest.raises(RuntimeError, match=r"page table|verify_lens"):
        flatten_verify(*batch)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
@pytest.mark.parametrize("lens", [[3, 0, 2], [1], [0, 0]])
def test_page_table_writes(compiled, lens, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "available", lambda: False)
    table = torch.full((4, 10), -1, dtype=torch.int32)
    starts = torch.tensor([2, 0, 5][: len(lens)])
    rows = torch.tensor([3, 1, 0][: len(lens)])
    slots = torch.arange(100, 100 + sum(lens))
    write_page_table(table, rows, starts, starts + torch.tensor(lens), slots)
    expected = torch.full((4, 10), -1, dtype=torch.int32)
    done = 0
    for row, first, count in zip(rows.tolist(), starts.tolist(), lens, strict=True):
        expected[row, first : first + count] = slots[done : done + count].to(torch.int32)
        done += count
    assert torch.equal(table, expected)


@needs_compiled
@pytest.mark.parametrize(("first", "last", "slots"), [(8, 11, 3), (-1, 2, 3), (0, 3, 2), (3, 0, 3)])
def test_no_number_outside_the_page_table_is_written(first, last, slots):
    table = torch.full((2, 10), -1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="page table"):
        write_page_table(table, torch.tensor([1]), torch.tensor([first]), torch.tensor([last]), torch.arange(slots))
    assert bool((table == -1).all())
