import pytest
import torch
from references import reference_target_probs

from outrider.kernels.cpu import native
from outrider.kernels.noise import gumbel_argmax
from outrider.kernels.sampling import Rules, argmax, draw_tokens, target_probs, torch_target_probs

ALL, HEAD = 2**30, 1024  # off; a rank that few rows reach
SMALLEST = 1e-36  # an exponential below may be 0


def rules(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    pick = lambda values: torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]  # noqa: E731
    return Rules(
        pick([0.0, 0.3, 1.0, 1.7]),
        pick([1, 2, 50, HEAD, HEAD + 1, ALL]),
        pick([0.01, 0.5, 0.9, 1.0]),
        pick([0.0, 0.02, 0.5, 1.0]),
    )


def decided(logits, temperatures, top_ps):
    """Rows where rounding does not decide top_p."""
    heat = temperatures.where(temperatures > 0, 1).double()
    reached = (logits.double() / heat[:, None]).softmax(-1).sort(descending=True).values.cumsum(-1)
    return ((reached - top_ps[:, None].double()).abs() > 1e-6).all(-1) | (top_ps == 1)


PROBS = pytest.mark.parametrize("probs_of", [target_probs, torch_target_probs])


@PROBS
@pytest.mark.parametrize("vocab", [17, 3000, 2 * HEAD])
@pytest.mark.parametrize("ties", [False, True])
def test_target_probs_equals_reference(vocab, ties, probs_of):
    logits = torch.randn(300, vocab, generator=torch.Generator().manual_seed(1)) * 3
    if ties:
        logits = logits.round()
    logits[:, vocab // 2] = -torch.inf
    settings = rules(300)
    got, expected = probs_of(logits, settings), reference_target_probs(logits, *settings)
    rows = decided(logits, settings.temperatures, settings.top_ps)
    assert rows.float().mean() > 0.9
    got, expected = got[rows], expected[rows]
    assert torch.equal(got > SMALLEST, expected > SMALLEST)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(got.sum(-1), torch.ones(len(got)))


@PROBS
def test_a_flat_distribution_keeps_many_tokens(probs_of):
    logits = torch.randn(4, 4 * HEAD, generator=torch.Generator().manual_seed(2)) * 1e-3
    settings = Rules(
        torch.ones(4), torch.full((4,), ALL), torch.tensor([0.9, 0.1, 1.0, 0.5]), torch.tensor([0.0, 0, 0.999, 0]),
    )  # fmt: skip
    got = probs_of(logits, settings)
    assert torch.equal(got > 0, reference_target_probs(logits, *settings) > 0)
    assert int((got[0] > 0).sum()) > HEAD


@PROBS
def test_no_filter_is_softmax_and_rules_may_be_missing(probs_of):
    logits = torch.randn(5, 100, dtype=torch.bfloat16)
    off = torch.full((5,), ALL), torch.ones(5), torch.zeros(5)
    expected = (logits.float() / 0.7).softmax(-1)
    torch.testing.assert_close(probs_of(logits, Rules(torch.full((5,), 0.7), *off)), expected)
    torch.testing.assert_close(probs_of(logits, Rules(torch.full((5,), 0.7))), expected)


def test_rules_need_one_value_per_row():
    with pytest.raises(ValueError, match="one value per row"):
        target_probs(torch.zeros(3, 8), Rules(torch.ones(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_is_the_first_of_the_best(dtype):
    logits = torch.randn(20, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, 700] = logits[3, 20] = 9
    logits[4] = -torch.inf
    assert torch.equal(argmax(logits), (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))
    assert argmax(logits[:, :900])[3] == 20


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_drawn_from_the_targets_distribution(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "available", lambda: False)
    generator = torch.Generator().manual_seed(3)
    logits, rows = torch.randn(50, 3000, generator=generator) * 3, torch.randperm(50, generator=generator)[:40]
    settings, keys = rules(40), torch.randint(2**62, (40,), generator=generator)
    drawn = draw_tokens(logits, rows, settings, keys)
    assert torch.equal(drawn, gumbel_argmax(target_probs(logits[rows], settings), keys))
    greedy = settings.temperatures == 0
    assert 0 < int(greedy.sum()) < 40
    assert torch.equal(drawn[greedy], logits[rows[greedy]].argmax(-1))
    alone = [draw_tokens(logits, rows[i, None], settings.of(torch.tensor([i])), keys[i, None]) for i in range(40)]
    assert torch.equal(drawn, torch.cat(alone))
