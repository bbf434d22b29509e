"""Acceptance from logits: ragged batches against the reference."""

import kernel_probes
import pytest
import torch
from batches import some_rules, verification
from gpu_device import INTERPRETED, TYPES, differing, examples, moved
from hypothesis import given
from hypothesis import strategies as st
from references import reference_accept, reference_target_probs

from outrider.kernels.acceptance import Verification, with_point_masses
from outrider.kernels.cuda import acceptance, rules
from outrider.kernels.noise import torch_gumbel_argmax
from outrider.kernels.sampling import Rules, draw_tokens

VOCABULARY = [] if INTERPRETED else [151_936]
FAR = 1e-5 if INTERPRETED else 1e-4
"""Total variation by rounding alone, in float32."""


@examples()
@given(
    rows=st.sampled_from([1, 6]),
    width=st.sampled_from([2, 33, 1025, 9000, *VOCABULARY]),
    ties=st.booleans(),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**31),
)
def test_four_numbers_determine_the_distribution(rows, width, ties, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * 3
    logits = (logits.round() if ties else logits).to(dtype)
    logits[torch.rand(rows, width, generator=generator) < 0.2] = -torch.inf
    logits[:, 1] = 2.0
    given = some_rules(rows, width, generator)
    statistics = rules.statistics(moved(logits), *moved(given))
    said = kernel_probes.probabilities(moved(logits), moved(given.temperatures), statistics).cpu()
    expected, random = reference_target_probs(logits, *given), given.temperatures > 0
    assert bool(((said - expected)[random].double().abs().sum(1) / 2 <= FAR).all())
    if INTERPRETED:  # otherwise rounding may move another token to a filter's edge
        torch.testing.assert_close(said[random], expected[random], rtol=2e-5, atol=1e-9)
    assert differing(statistics.best.long(), logits.float().argmax(1)) == 0


def accept(arrays, keywords, by_block=True, points=None):
    """The operator, with padding that must not be read."""
    *others, logits, given = moved(arrays)
    logits[int(arrays[2][-1]) :] = torch.nan
    order = ("uniforms", "final_keys", "row_keys", "decided", "draft_probs", "vocab")
    others_moved = (moved(keywords[name]) for name in order)
    accepted = acceptance.accept(*others, logits, *given, *others_moved, moved(points), by_block)
    return [x.cpu() for x in accepted]


def reference(arrays, keywords, by_block=True):
    """By definition, one token at a time."""
    tokens, verify_lens, qo_indptr, request, logits, given = arrays
    probs = reference_target_probs(logits, *given.of(request))
    others = {name: keywords[name] for name in ("uniforms", "final_keys", "draft_probs", "vocab")}
    decided = keywords["decided"] | (given.temperatures <= 0)
    wanted = torch_gumbel_argmax(probs.nan_to_num(1.0), keywords["row_keys"])
    return reference_accept(
        Verification(
            tokens, verify_lens, qo_indptr, wanted=wanted, probs=probs, decided=decided, by_block=by_block, **others
        )
    )


@examples()
@given(
    requests=st.sampled_from([1, 3, 6]),
    gamma=st.sampled_from([1, 4]),
    width=st.sampled_from([24, 1500]),
    q_kind=st.sampled_from(["full", "truncated", "point mass"]),
    dtype=st.sampled_from(TYPES),
    by_block=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_accepts_as_the_reference(requests, gamma, width, q_kind, dtype, by_block, seed):
    batch = verification(requests, gamma, width, q_kind, dtype, seed)
    assert differing(accept(*batch, by_block), reference(*batch, by_block)) == 0


@examples()
@given(
    requests=st.sampled_from([1, 3, 6]),
    width=st.sampled_from([24, 1500]),
    q_kind=st.sampled_from(["full", "truncated"]),
    longer=st.integers(0, 2),
    by_block=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_point_masses_among_q(requests, width, q_kind, longer, by_block, seed):
    """Lookups may be longer than a model's drafts; q also has rows of absent requests."""
    tokens, lens, *others = verification(requests, 4, width, q_kind, torch.float32, seed)[0]
    keywords = verification(requests, 4, width, q_kind, torch.float32, seed)[1]
    points = torch.rand(requests, generator=torch.Generator().manual_seed(seed)) < 0.5
    most = 4 - longer
    points |= lens > most
    q = keywords["draft_probs"]
    arrays = (tokens, lens, *others)
    batch = Verification(tokens, lens, others[0], draft_probs=q, vocab=keywords["vocab"], points=points)
    spread = with_point_masses(batch, width)
    expected = reference(arrays, keywords | {"draft_probs": spread.draft_probs, "vocab": None}, by_block)
    wide = torch.nn.functional.pad(q[:, :most], (0, 0, 0, 0, 0, 2), value=torch.nan).contiguous()
    wide[:requests][points] = torch.nan
    assert differing(accept(arrays, keywords | {"draft_probs": wide}, by_block, points), expected) == 0


def test_undeclared_point_masses_change_the_output():
    requests = 6 if INTERPRETED else 24
    arrays, keywords = verification(requests, 4, 24, "full", torch.float32, 1)
    arrays = (*arrays[:5], Rules(torch.ones(requests)))
    keywords["decided"][:] = False
    everyone = torch.ones(requests, dtype=torch.bool)
    batch = Verification(*arrays[:3], draft_probs=keywords["draft_probs"], points=everyone)
    expected = reference(arrays, keywords | {"draft_probs": with_point_masses(batch, 24).draft_probs})
    assert differing(accept(arrays, keywords, points=everyone), expected) == 0
    assert differing(accept(arrays, keywords), expected) > 0


SHAPES = [(2, 15, 24, "full")]
LARGE = [(12, 7, 151_936, "full"), (3, 15, 32_000, "truncated"), (300, 7, 2000, "full"), (64, 15, 9000, "point mass")]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES if INTERPRETED else SHAPES + LARGE)
def test_accepts_large_batches_as_the_reference(shape, dtype):
    batch = verification(*shape, dtype, 1)
    assert differing(accept(*batch), reference(*batch)) == 0


def test_three_hundred_requests_without_a_draft():
    generator = torch.Generator().manual_seed(0)
    logits, keys = torch.randn(300, 24, generator=generator), torch.randint(2**62, (300,), generator=generator)
    given = Rules(torch.tensor([0.7] + [0.0] * 14).repeat(20))
    arrays = (
        keys.new_empty(300, 0), torch.zeros_like(keys), torch.arange(301), torch.arange(300), logits, *given,
        torch.empty(300, 0).double(), keys, None, given.temperatures <= 0, None, None, None, True,
    )  # fmt: skip
    lens, tokens = acceptance.accept(*moved(arrays))
    assert bool((lens == 1).all())
    assert differing(tokens[:, 0], draw_tokens(logits, torch.arange(300), given, keys)) == 0
