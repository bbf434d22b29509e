"""The likeliest tokens of a row, and paths drawn through them, against plain torch."""

import pytest
import torch
from instruction_sets import EACH_SET

from outrider.drafters.base import DraftBatch
from outrider.drafters.block.sampling import sample_path
from outrider.kernels.cpu import native
from outrider.kernels.sampling import likeliest

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")


@EACH_SET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "count"), [(16, 16), (17, 1), (1000, 16), (4099, 40)])
def test_likeliest_tokens_as_by_a_stable_sort(
    instruction_set: str, dtype: torch.dtype, columns: int, count: int
) -> None:
    logits = torch.randn(3, 5, columns, generator=torch.Generator().manual_seed(columns)).mul(3).round().to(dtype)
    logits[0, 0] = torch.arange(columns).to(dtype)
    logits[0, 1] = -torch.inf
    values, ids = likeliest(logits, count)
    wanted, order = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, wanted[..., :count])
    assert torch.equal(ids, order[..., :count])


def test_nan_is_never_likely() -> None:
    logits = torch.full((1, 40), torch.nan)
    logits[0, 30] = 1.0
    assert likeliest(logits, 3)[1][0, 0] == 30
    assert len(set(likeliest(logits, 40)[1][0].tolist())) == 40
    with pytest.raises(RuntimeError, match="with 41 columns or more"):
        likeliest(logits, 41)


@EACH_SET
@pytest.mark.parametrize("filtered", [False, True])
def test_a_path_equals_plain_torch(instruction_set: str, filtered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, positions, candidates, vocab = 40, 6, 16, 300
    draw = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(vocab, generator=draw)[:candidates] for _ in range(requests * positions)])
    ids = ids.view(requests, positions, candidates)
    scores = torch.randn(requests, positions, candidates, candidates, generator=draw) * 2
    scores[:, 0] = scores[:, 0, :1]
    pick = lambda *values: torch.tensor(values).repeat(requests)[:requests]  # noqa: E731
    filters = {"top_ks": pick(2, 5, 2**30), "top_ps": pick(1.0, 0.6), "min_ps": pick(0.0, 0.0, 0.0, 0.2)}
    batch = DraftBatch(
        anchors=torch.zeros(requests, dtype=torch.int64), seq_lens=torch.ones(requests, dtype=torch.int64),
        page_table=torch.zeros(1, 9).int(), rows=torch.zeros(requests, dtype=torch.int64),
        temperatures=pick(0.0, 0.7, 1.0, 1.9), keys=torch.randint(2**62, (requests, positions + 1), generator=draw),
        **(filters if filtered else {}),
    )  # fmt: skip
    ours = sample_path(ids, scores, batch, vocab_size=vocab)
    monkeypatch.setattr(native, "fits", lambda *tensors: False)
    plain = sample_path(ids, scores, batch, vocab_size=vocab)
    assert torch.equal(ours[0], plain[0])
    sampled = batch.temperatures > 0
    torch.testing.assert_close(ours[1][sampled], plain[1][sampled], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours[2], plain[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1][sampled].sum(-1), torch.ones(int(sampled.sum()), positions))
