"""Flatten and commit against torch, and the whole of torch's against the version without padding."""

import torch
from batches import flattening
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.cuda import ragged
from outrider.kernels.ragged import torch_commit, torch_flatten_bucket, torch_flatten_verify


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
    found = ragged.flatten(*batch, total + padding)
    expected = torch_flatten_bucket(*batch, total + padding)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for name, one, other in zip("ipsqrk", expected, torch_flatten_verify(*batch), strict=True):
        assert torch.equal(one if name == "q" else one[:total], other)
        assert name in "qrk" or not one[total:].any()

    generator = torch.Generator().manual_seed(seed)
    accept_lens = (torch.rand(requests, generator=generator) * (batch[2] + 1)).long() + 1
    tokens = torch.randint(1000, (requests, gamma + 1), generator=generator)
    arguments = accept_lens, tokens, batch[3], found[4], found[5], found[2] + 1
    got, wanted = ragged.commit(*arguments), torch_commit(*arguments)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    assert int((got[2] > 0).sum()) == int(accept_lens.sum())  # every accepted one, no padding
