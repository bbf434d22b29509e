"""At temperature 1, what a speculating server says is distributed as the target says it should be."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from asking import accepted_tokens, complete, complete_all, tokens
from chi_square import p_value
from metrics_page import metric
from scipy import stats

from outrider.server.engine.target import plain_folder

# Texts that repeat themselves, so that lookups draft from them, often rightly and often not. Most of these tests is
# prefill in float32, so the text is short; behind the shorter one the models draft wrongly.
PROMPT, LETTERS = "ha ha ha", "a b c a b d a b"
SAMPLES = 2400
CHOICES = 12


@pytest.fixture(scope="module")
def target():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = plain_folder(None)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)

    @torch.inference_mode()
    def next_probs(continuation: tuple[int, ...], temperature: float, prompt: str = PROMPT) -> np.ndarray:
        ids = tokenizer(prompt)["input_ids"]
        logits = model(torch.tensor([[*ids, *continuation]])).logits[0, -1]
        return torch.softmax(logits.double() / temperature, -1).numpy()

    return next_probs


def samples(server, speculate, count=SAMPLES, prompt=PROMPT, **body):
    answers = complete_all(
        server,
        [prompt] * (count // CHOICES),
        4,
        speculate=speculate,
        chat=False,
        max_tokens=3,
        n=CHOICES,
        ignore_eos=True,
        **body,
    )
    return [tuple(c["token_ids"]) for a in answers for c in a["choices"]]


def filtered(probs: np.ndarray, top_k: int | None, top_p: float) -> np.ndarray:
    """Top-k and top-p as SGLang applies them: on the sorted, not renormalised probabilities."""
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    keep = (np.cumsum(ranked) - ranked) <= top_p
    if top_k is not None:
        keep &= np.arange(len(probs)) < top_k
    out = np.zeros_like(probs)
    out[order[keep]] = ranked[keep]
    return out / out.sum()


@pytest.mark.parametrize(
    ("served", "prompt", "temperature", "rules", "accepted"),
    [
        ("exact_server", PROMPT, 1.0, {}, 0.05),
        ("exact_server", PROMPT, 0.8, {"top_k": 20, "top_p": 0.9}, 0.05),
        ("planned_server", PROMPT, 1.0, {}, 0.05),
        ("dspark_server", LETTERS, 1.0, {}, 0.05),
        ("denoising_server", LETTERS, 1.0, {}, 0.025),  # of random weights
        ("dflash_server", LETTERS, 1.0, {}, 0.05),
        ("deer_server", LETTERS, 1.0, {}, 0.025),
        ("specdiff_server", LETTERS, 1.0, {}, 0.025),
    ],
    ids=["plain", "top-k and top-p", "planned", "dspark", "denoising", "dflash", "deer", "specdiff"],
    indirect=["served"],
)
def test_first_two_tokens_against_the_exact_distribution(target, served, prompt, temperature, rules, accepted):
    def probs(continuation):
        return filtered(target(continuation, temperature, prompt), rules.get("top_k"), rules.get("top_p", 1.0))

    before = accepted_tokens(served)
    drawn = samples(served, True, prompt=prompt, temperature=temperature, **rules)
    assert len(drawn) == SAMPLES
    assert accepted_tokens(served) - before > SAMPLES * accepted  # drafts were accepted, and some were not

    first = probs(())
    assert p_value(Counter(t[0] for t in drawn), dict(enumerate(first)), SAMPLES) > 1e-4
    pairs = {}
    for token in np.argsort(-first)[:12]:
        for second, p in enumerate(probs((int(token),))):
            pairs[int(token), second] = first[token] * p
    assert p_value(Counter(t[:2] for t in drawn), pairs, SAMPLES) > 1e-4


def test_the_check_would_see_drafts_accepted_too_often(target):
    """Power: an acceptance that keeps a fifth of the wrong drafts fails the same check on second tokens.

    Shifts of one percent are for tests/kernels/test_acceptance.py, which can afford the samples.
    """
    first = target((), 1.0)
    pairs, wrong = {}, {}
    for token in np.argsort(-first)[:12]:
        second = target((int(token),), 1.0)
        shifted = second * 0.8
        shifted[int(second.argmax())] += 0.2
        for other in range(len(second)):
            pairs[int(token), other] = first[token] * second[other]
            wrong[int(token), other] = first[token] * shifted[other]
    generator = np.random.default_rng(0)
    keys, weights = list(wrong), np.array(list(wrong.values()))
    drawn = Counter(keys[i] for i in generator.choice(len(keys), SAMPLES, p=weights / weights.sum()))
    assert p_value(drawn, pairs, SAMPLES) < 1e-4


def test_third_token_with_and_without_speculation(exact_server):
    """Behind a verified block: two samples of the same size, compared with each other."""
    drafted = Counter(t[2] for t in samples(exact_server, True, SAMPLES // 2, temperature=1.0))
    without = Counter(t[2] for t in samples(exact_server, False, SAMPLES // 2, temperature=1.0))
    common = [t for t, n in (drafted + without).most_common() if n >= 16]
    table = [[c[t] for t in common] + [sum(c.values()) - sum(c[t] for t in common)] for c in (drafted, without)]
    assert stats.chi2_contingency(table).pvalue > 1e-4


SEEDED = [{"temperature": 1.0, "seed": 7}, {"temperature": 0.7, "top_p": 0.9, "seed": 8}]
TOKENS = 64
MANY = 32
"""Requests of so many tokens that are more than the cache holds."""


@pytest.fixture(scope="module")
def seeded(exact_server, prompts):
    """Answers of seeded requests that have the server to themselves, without speculation."""
    body = {"max_tokens": TOKENS, "ignore_eos": True}
    alone = [tokens(complete(exact_server, prompts[i], speculate=False, **body, **SEEDED[i])) for i in range(2)]
    other = tokens(complete(exact_server, prompts[0], speculate=False, **body, **(SEEDED[0] | {"seed": 9})))
    assert other != alone[0]
    return alone


@pytest.mark.parametrize(
    ("served", "others"),
    [
        ("exact_server", 0),
        ("exact_server", 16),
        ("exact_server", 32),
        ("planned_server", 0),
        ("planned_server", 16),
        ("planned_server", 32),
        ("denoising_server", 16),
        ("dspark_server", 16),
        ("dflash_server", 16),
        ("deer_server", 16),
        ("specdiff_server", 16),
    ],
    indirect=["served"],
)
def test_a_seed_decides_the_answer(served, others, seeded, prompts):
    """With speculation, by whichever drafter, in whatever company; the other servers are also other starts."""
    longer = {"max_tokens": 2 * TOKENS} if others == 32 else {}  # more than the cache holds
    company = [
        {},
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "speculation": {"enabled": False}},
    ]
    asked = [(prompts[i], SEEDED[i]) for i in range(2)]
    asked += [(prompts[2 + i], company[i % len(company)] | longer) for i in range(others)]
    asked = asked[2:12] + asked[:2] + asked[12:]  # in the midst of the others
    body = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    with ThreadPoolExecutor(len(asked)) as pool:
        ask = lambda one: tokens(complete(served, one[0], speculate=True, **(body | one[1])))  # noqa: E731
        answers = list(pool.map(ask, asked))
    first = min(10, others)
    assert answers[first : first + 2] == seeded


def test_an_answer_is_the_same_after_a_retraction(exact_server, prompts):
    """More requests get in than the cache holds; some lose their place, and are prefilled again with what they had."""
    body = {"max_tokens": 2 * TOKENS, "min_tokens": 2 * TOKENS, "ignore_eos": False}
    kinds = [SEEDED[0], SEEDED[1], {"temperature": 0}]
    alone = [tokens(complete(exact_server, prompts[i], speculate=False, **(body | kinds[i]))) for i in range(3)]
    before = metric(exact_server.url, "sglang:num_retracted_requests_total")
    with ThreadPoolExecutor(MANY) as pool:
        ask = lambda i: tokens(complete(exact_server, prompts[i % 3], speculate=True, **(body | kinds[i % 3])))  # noqa: E731
        answers = list(pool.map(ask, range(MANY)))
    assert metric(exact_server.url, "sglang:num_retracted_requests_total") > before
    assert answers == [alone[i % 3] for i in range(MANY)]


def test_without_a_seed_answers_differ(exact_server, prompts):
    body = {"max_tokens": 24, "temperature": 1.0, "n": 4}
    answer = complete(exact_server, prompts[0], speculate=True, **body)
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) == 4


def test_choices_of_one_seeded_request_differ_and_come_again(exact_server, prompts):
    body = {"max_tokens": 24, "temperature": 1.0, "n": 3, "seed": 11}
    once, again = (
        [tuple(c["token_ids"]) for c in complete(exact_server, prompts[0], speculate=True, **body)["choices"]]
        for _ in range(2)
    )
    assert once == again
    assert len(set(once)) == 3
    one = tokens(complete(exact_server, prompts[0], speculate=False, **(body | {"n": 1})))
    assert once[0] == tuple(one)
    twice = complete(exact_server, [PROMPT, PROMPT], speculate=True, chat=False, **(body | {"n": 2}))
    assert len({tuple(choice["token_ids"]) for choice in twice["choices"]}) == 4


def test_logprobs_of_sampled_tokens(exact_server, target):
    """Logprobs are of the distribution the token was drawn from, drafted or not."""
    answer = complete(
        exact_server,
        PROMPT,
        speculate=True,
        chat=False,
        max_tokens=6,
        temperature=0.7,
        logprobs=1,
        seed=3,
        ignore_eos=True,
    )
    ids = tokens(answer)
    for k, logprob in enumerate(answer["choices"][0]["logprobs"]["token_logprobs"]):
        assert logprob == pytest.approx(math.log(target(tuple(ids[:k]), 0.7)[ids[k]]), abs=2e-3)
