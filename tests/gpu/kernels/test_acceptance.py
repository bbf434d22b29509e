"""Acceptance from logits: against torch on ragged batches, and the output's distribution enumerated on a small one."""

from fractions import Fraction

import kernel_probes
import pytest
import torch
from batches import some_rules, verification
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.acceptance import accept_logits
from outrider.kernels.cuda import acceptance, rules
from outrider.kernels.noise import torch_exponentials
from outrider.kernels.sampling import Rules, draw_tokens, reference_target_probs


@given(
    rows=st.sampled_from([1, 6]),
    width=st.sampled_from([2, 33, 1025, 9000]),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_four_numbers_say_the_distribution(rows, width, ties, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * 3
    logits = (logits.round() if ties else logits).to(dtype)
    logits[torch.rand(rows, width, generator=generator) < 0.2] = -torch.inf
    logits[:, 1] = 2.0
    given = some_rules(rows, width, generator)
    found = rules.statistics(logits, *given)
    expected = reference_target_probs(logits, *given)
    said, random = kernel_probes.probabilities(logits, given.temperatures, found), given.temperatures > 0
    torch.testing.assert_close(said[random], expected[random], rtol=2e-5, atol=1e-9)
    assert torch.equal(found.best.long(), logits.float().argmax(1))


def accept(arrays, keywords):
    """The operator, as `accept_logits` calls it, with padding that must not be read."""
    *others, logits, given = arrays
    logits = logits.clone()
    logits[int(arrays[2][-1]) :] = torch.nan
    order = ("uniforms", "final_keys", "row_keys", "decided", "draft_probs", "vocab")
    return acceptance.accept(*others, logits, *given, *(keywords[name] for name in order))


@settings(max_examples=6)
@given(
    requests=st.sampled_from([1, 3, 6]),
    gamma=st.sampled_from([1, 4]),
    width=st.sampled_from([24, 1500]),
    q_kind=st.sampled_from(["full", "truncated", "point mass"]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_accepts_as_torch(requests, gamma, width, q_kind, dtype, seed):
    arrays, keywords = verification(requests, gamma, width, q_kind, dtype, seed)
    lens, out = accept(arrays, keywords)
    expected_lens, expected = accept_logits(*arrays, **keywords)
    assert torch.equal(lens, expected_lens)
    assert torch.equal(out, expected)


def test_fifteen_draft_tokens():
    arrays, keywords = verification(2, 15, 24, "full", torch.float32, 1)
    for found, expected in zip(accept(arrays, keywords), accept_logits(*arrays, **keywords), strict=True):
        assert torch.equal(found, expected)


def test_three_hundred_requests_without_a_draft():
    generator = torch.Generator().manual_seed(0)
    logits, keys = torch.randn(300, 24, generator=generator), torch.randint(2**62, (300,), generator=generator)
    given = Rules(torch.tensor([0.7] + [0.0] * 14).repeat(20))
    found = acceptance.accept(
        keys.new_empty(300, 0), torch.zeros_like(keys), torch.arange(301), torch.arange(300), logits, *given,
        torch.empty(300, 0).double(), keys, None, given.temperatures <= 0, None, None,
    )  # fmt: skip
    assert bool((found[0] == 1).all())
    assert torch.equal(found[1][:, 0], draw_tokens(logits, torch.arange(300), given, keys))


# Enumeration. p and q have sixteenths, uniform numbers lie in the middle of each eighth, so that counting them gives
# the chance of acceptance as a fraction. The law of the last token is that of argmin E / w: for each of some keys the
# token must be the one of the true weights.

P = [Fraction(n, 16) for n in (8, 4, 2, 2)]
Q = [Fraction(n, 16) for n in (4, 8, 4, 0)]
STEPS, KEYS = 8, 6


def outcomes(fault=None):
    """(chance that each drafted token is kept, final tokens after its rejection [KEYS], bonus tokens [KEYS])."""
    p, q = (torch.tensor([float(x) for x in law]) for law in (P, Q))
    keys = torch.arange(KEYS) * 7919
    chances, finals, bonus = [], [], None
    for x in range(3):  # the fourth is never drafted
        count = STEPS + KEYS
        u = torch.cat([(torch.arange(STEPS) + 0.5) / STEPS, torch.full((KEYS,), 1 - 1e-12)]).double()[:, None]
        if fault == "too willing":
            u -= 1 / STEPS
        logits = p.log().repeat(2 * count, 1)
        given = Rules(torch.ones(count))
        arrays = (
            torch.full((count, 1), x),
            torch.ones(count).long(),
            2 * torch.arange(count + 1),
            torch.arange(count).repeat_interleave(2),
            logits,
            given,
        )
        keywords = {
            "uniforms": u,
            "final_keys": torch.cat([torch.arange(STEPS), keys]),
            "decided": torch.zeros(count, dtype=torch.bool),
            "row_keys": None,
            "draft_probs": (p if fault == "residual of another q" else q).expand(count, 1, 4).contiguous(),
            "vocab": None,
        }
        if fault == "residual of another q":  # the tests see q, the residual a point mass
            keywords["draft_probs"] = None
            keywords["uniforms"] = u * q[x]
        lens, out = accept(arrays, keywords)
        chances.append(Fraction(int((lens[:STEPS] == 2).sum()), STEPS))
        finals.append(out[STEPS:, 0])
        bonus = out[:STEPS, 1].where(lens[:STEPS] == 2, -1) if bonus is None else bonus
    return chances, finals, bonus


def law_of_output(fault=None):
    """Chance of each token to come out first, or None where a replacement is not drawn from max(0, p - q)."""
    chances, finals, bonus = outcomes(fault)
    noise = torch_exponentials(torch.arange(KEYS) * 7919, torch.arange(4))
    rest = [max(Fraction(0), p - q) for p, q in zip(P, Q, strict=True)]
    for x in range(3):
        if chances[x] < 1:
            weights = torch.tensor([float(w) for w in rest]).double()
            if not torch.equal(finals[x], (noise / weights).argmin(1)):
                return None
    drawn = (torch_exponentials(torch.arange(STEPS), torch.arange(4)) / torch.tensor([float(w) for w in P])).argmin(1)
    assert torch.equal(bonus, drawn)  # token 0 is always kept, what follows it is drawn from p
    chances.append(Fraction(0))
    lost = sum(q * (1 - chance) for q, chance in zip(Q, chances, strict=True))
    whole = sum(rest)
    return [q * c + lost * w / whole for q, c, w in zip(Q, chances, rest, strict=True)]


def test_the_output_is_distributed_as_the_target():
    assert law_of_output() == P


@pytest.mark.parametrize("fault", ["too willing", "residual of another q"])
def test_a_fault_changes_the_law(fault):
    assert law_of_output(fault) != P
