"""Flatten and commit against torch, and torch's against the version without padding."""

import pytest
import torch
from batches import flattening
from gpu_device import ON, differing, examples, moved
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cuda import ragged
from outrider.kernels.ragged import commit, flatten_verify, write_cached_slots


@examples()
@given(
    requests=st.sampled_from([1, 2, 5, 16, 17, 300]),
    gamma=st.sampled_from([1, 3, 7, 15]),
    padding=st.sampled_from([0, 1, 7, 300]),
    verified=st.sampled_from([None, 0]),
    seed=st.integers(0, 2**31),
)
def test_flattened_and_committed_as_by_torch(requests, gamma, padding, verified, seed):
    batch = flattening(requests, gamma, seed)
    if verified is not None:
        batch[2].fill_(verified)
    total = int((batch[2] + 1).sum())
    flat = ragged.flatten(*moved(batch), total + padding)
    expected = flatten_verify(*batch, total + padding)
    assert differing(flat, expected) == 0
    for name, one, other in zip("ipsqrk", expected, flatten_verify(*batch), strict=True):
        assert torch.equal(one if name == "q" else one[:total], other)
        assert name in "qrk" or not one[total:].any()

    generator = torch.Generator().manual_seed(seed)
    accept_lens = (torch.rand(requests, generator=generator) * (batch[2] + 1)).long() + 1
    tokens = torch.randint(1000, (requests, gamma + 1), generator=generator)
    arguments = accept_lens, tokens, batch[3], expected[4], expected[5], expected[2] + 1
    got = ragged.commit(*moved(arguments))
    assert differing(got, commit(*arguments)) == 0
    assert int((got[2] > 0).sum()) == int(accept_lens.sum())  # all accepted tokens, no padding


@examples()
@given(
    lens=st.lists(st.sampled_from([0, 1, 7, 63, 64, 65, 200, 700]), min_size=1, max_size=20),
    padding=st.sampled_from([0, 1, 130]),
    slots=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_cached_slots_are_listed_as_by_torch(lens, padding, slots, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 2**30, (len(lens) + 3, 2000), generator=generator, dtype=torch.int32)
    rows = torch.randperm(len(lens) + 3, generator=generator)[: len(lens)]
    begins = torch.randint(1000, (len(lens),), generator=generator, dtype=torch.int32)
    indptr = torch.tensor([0, *lens, padding, *[0] * slots], dtype=torch.int32).cumsum(0).int()
    expected = torch.empty(int(indptr[-1]), dtype=torch.int32)
    write_cached_slots(expected, table, rows, begins, indptr)
    listed = torch.full_like(expected, -1, device=ON)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "LIST_BLOCK", 64)  # splits short lists too
        ragged.cached_slots(listed, *moved((table, rows, begins, indptr)))
    assert differing(listed, expected) == 0
