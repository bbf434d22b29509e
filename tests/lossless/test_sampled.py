"""Sampled answers of a speculating server have the target's distribution.

Under `top_k` all answers of the small target are enumerated, by independent rules (`exact_answers.py`).
`test_planted_faults.py` shows the check's power.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from asking import complete, tokens
from chi_square import THRESHOLD
from exact_answers import PROMPT, RULES, SAMPLES, Answer, Rules, answer_probs, answers_p_value
from metrics_page import MetricsPage, metric, until_retracted
from running import Server
from small_mtp import SmallMtp
from small_target import SPECIAL, VOCAB, SmallTarget

LENGTH = 5
"""The first token is the prefill's; a step then drafts up to three."""
CHOICES = 16
"""Choices of a request. Four requests run at once, and the cache has room for all."""
ACCEPTED = 0.2
"""Least share of accepted drafts, half of it at each position, so that faults could show."""


@pytest.fixture(scope="module")
def fresh(small_target: SmallTarget) -> list[int]:
    """A prompt without repetition: the model drafts."""
    return small_target.tokenizer(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def repeating(small_target: SmallTarget, prompts: list[str]) -> list[int]:
    """A beginning and an answer, twice, and the beginning again: lookups draft the answer, which is then likely."""
    for text in prompts:
        begun: list[int] = small_target.tokenizer(text)["input_ids"][:6]
        answer: list[int] = []
        for _ in range(4):
            prompt, likeliest, chances = [*begun, *answer] * 2 + begun, [], []
            for place in range(LENGTH):
                (logits,) = small_target.logits([[*prompt, *(answer[:place] or likeliest)]])
                likeliest.append(int(logits.argmax()))
                chances += [float(RULES.probs(logits, ())[token]) for token in answer[place : place + 1]]
            if answer and min(chances) > 0.3 and sum(chances) < 0.75 * LENGTH:  # often right, and often wrong
                return prompt
            answer = likeliest
    pytest.fail("no answer is likely to be repeated")


@pytest.fixture(scope="module")
def exact(small_target: SmallTarget) -> Callable[..., dict[Answer, float]]:
    """Exact distributions, computed once. It keeps the rules alive, so that their id is not reused."""
    known: dict[Any, tuple[Rules, dict[Answer, float]]] = {}

    def find(prompt: list[int], length: int = LENGTH, rules: Rules = RULES) -> dict[Answer, float]:
        key = *prompt, length, id(rules)
        if key not in known:
            known[key] = rules, answer_probs(small_target.logits, prompt, length, rules)
        return known[key][1]

    return find


def sample(
    server: Server, prompt: list[int], count: int, seeds: bool = False, *, speculate: bool = True, **body: Any
) -> list[Answer]:
    """`count` answers, four requests at a time, each of CHOICES choices. seeds: one per request."""

    def ask(number: int) -> list[Answer]:
        seed = {"seed": 1000 + number} if seeds else {}
        answer = complete(server, prompt, speculate=speculate, n=CHOICES, ignore_eos=True, **body, **seed)
        return [tuple(choice["token_ids"]) for choice in answer["choices"]]

    with ThreadPoolExecutor(4) as pool:
        return [answer for part in pool.map(ask, range(count // CHOICES)) for answer in part]


def observed(before: MetricsPage, after: MetricsPage, **labels: str) -> list[tuple[float, float]]:
    """Observed and accepted drafts at positions 1, 2 and 3."""

    def count(name: str, position: int) -> float:
        labels["position"] = str(position)
        return after.value(name, **labels) - before.value(name, **labels)

    names = ("outrider_verified_position_total", "outrider_accepted_position_total")
    return [(count(names[0], k), count(names[1], k)) for k in (1, 2, 3)]


def check_depth(positions: list[tuple[float, float]], count: int = SAMPLES) -> None:
    """Check that several tokens per draft were verified, and often accepted."""
    (first, _), (second, _), _ = positions
    assert first > count / 4, positions
    assert second > first / 8, positions
    verified, accepted = map(sum, zip(*positions, strict=True))
    assert accepted > ACCEPTED * verified, positions
    assert all(right > ACCEPTED / 2 * seen for seen, right in positions if seen > first / 8), positions


PROMPTS = {"model": "fresh", "lookup": "repeating"}
"""Fixtures of the prompts for which each source drafts."""
BODY = {"max_tokens": LENGTH, "temperature": RULES.temperature, "top_k": RULES.top_k}


@pytest.fixture
def source(request: pytest.FixtureRequest) -> str:
    """The parameter. Lookup does not depend on the model, so three servers stand for all."""
    seeded = "seeds" in request.node.name
    others = ("lattice_server",) if seeded else ("lattice_server", "eagle_server", "late_server")
    repeats = request.param == "lookup" and request.node.callspec.params["served"] in others
    if repeats and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive looks up on this server, too")
    return request.param


def check_answers(
    server: Server, prompt: list[int], exact: dict[Answer, float], *, source: str = "model", seeds: bool = False,
    length: int = LENGTH,
) -> None:  # fmt: skip
    """Check the distribution of answers, of which a source has drafted several tokens at once."""
    before = MetricsPage(server.url)
    drawn = sample(server, prompt, SAMPLES, seeds, **BODY | {"max_tokens": length})
    after = MetricsPage(server.url)
    check_depth(observed(before, after, sampling="seeded" if seeds else "sampled", source=source))
    assert answers_p_value(drawn, exact) > THRESHOLD


@pytest.mark.parametrize("source", ["model", "lookup"], indirect=True)
@pytest.mark.parametrize(
    "served",
    ["exact_server", "planned_server", "eagle_server", "late_server", "path_server", "lattice_server"],
    indirect=True,
)
def test_whole_answers_have_the_exact_distribution(
    served: Server, source: str, request: pytest.FixtureRequest, exact: Callable[..., dict[Answer, float]]
) -> None:
    prompt = request.getfixturevalue(PROMPTS[source])
    check_answers(served, prompt, exact(prompt), source=source)


@pytest.mark.parametrize("source", ["model", "lookup"])
def test_seeded_answers_have_the_exact_distribution(
    exact_server: Server, source: str, request: pytest.FixtureRequest, exact: Callable[..., dict[Answer, float]]
) -> None:
    prompt = request.getfixturevalue(PROMPTS[source])
    check_answers(exact_server, prompt, exact(prompt), source=source, seeds=True)


COMPARED = 512


@pytest.fixture(scope="module")
def undrafted(exact_server: Server) -> Callable[[list[int], int], list[Answer]]:
    """Seeded answers without drafts, requested once per length."""

    @cache
    def ask(prompt: tuple[int, ...], length: int) -> list[Answer]:
        body = BODY | {"max_tokens": length}
        return sample(exact_server, [*prompt], COMPARED, seeds=True, speculate=False, **body)

    return lambda prompt, length: ask((*prompt,), length)


@pytest.mark.parametrize(
    ("served", "source", "length"),
    [
        *((f"{name}_server", "model", LENGTH) for name in ("planned", "eagle", "late", "path", "lattice")),
        *((f"{name}_server", "lookup", LENGTH) for name in ("planned", "eagle", "late", "path", "lattice")),
        ("denoising_server", "model", LENGTH + 1),
    ],
    indirect=["served", "source"],
)
def test_seeded_answers_equal_those_without_drafts(
    served: Server, source: str, length: int, request: pytest.FixtureRequest, undrafted: Callable[..., list[Answer]]
) -> None:
    prompt = request.getfixturevalue(PROMPTS[source])
    before = MetricsPage(served.url)
    drawn = sample(served, prompt, COMPARED, seeds=True, **BODY | {"max_tokens": length})
    after = MetricsPage(served.url)
    check_depth(observed(before, after, sampling="seeded", source=source), COMPARED)
    assert drawn == undrafted(prompt, length)


@pytest.mark.parametrize("seeds", [False, True], ids=["unseeded", "seeded"])
def test_a_target_with_an_mtp_layer(mtp_server: Server, small_mtp: SmallMtp, seeds: bool) -> None:
    prompt = small_mtp.tokenizer(PROMPT)["input_ids"]
    check_answers(mtp_server, prompt, answer_probs(small_mtp.logits, prompt, LENGTH, RULES), seeds=seeds)


def test_several_denoising_steps(
    denoising_server: Server, fresh: list[int], exact: Callable[..., dict[Answer, float]]
) -> None:
    """The model drafts from the third token on."""
    check_answers(denoising_server, fresh, exact(fresh, LENGTH + 1), length=LENGTH + 1)


def test_initial_tokens_are_not_drafted(denoising_server: Server, fresh: list[int]) -> None:
    """`--initial-tokens 2`: of three tokens only the last could be drafted."""
    drafts = "outrider_verified_position_total"
    before = metric(denoising_server.url, drafts, source="model")
    sample(denoising_server, fresh, 2 * CHOICES, **BODY | {"max_tokens": 3})
    assert metric(denoising_server.url, drafts, source="model") == before
    sample(denoising_server, fresh, 2 * CHOICES, **BODY | {"max_tokens": 8})
    assert metric(denoising_server.url, drafts, source="model") > before


def letters(small_target: SmallTarget, wanted: str) -> list[int]:
    """Tokens made of these letters alone, except special ones."""
    texts = small_target.tokenizer.batch_decode([[token] for token in range(VOCAB)])
    return [token for token, text in enumerate(texts) if token >= SPECIAL and {*text} <= {*wanted}]


def ruled(name: str, small_target: SmallTarget, fresh: list[int]) -> tuple[dict[str, Any], Rules]:
    """A request's fields, and their rules."""
    likely = small_target.logits([fresh])[0].topk(4).indices.tolist()
    fields: dict[str, dict[str, Any]] = {
        "min-p": {"min_p": 0.3, "temperature": 1.2},
        "top-p": {"top_p": 0.7},
        "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3},
        "bias": {"logit_bias": {str(likely[0]): -1.5, str(likely[3]): 1.0}},
        "grammar": {},
    }
    asked = {"top_k": 3, "temperature": 0.8} | fields[name]
    rules = asked | {"logit_bias": {int(token): bias for token, bias in asked.get("logit_bias", {}).items()}}
    if name == "grammar":  # too long to end
        allowed = letters(small_target, " ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
        return asked | {"regex": "[ A-Za-z]{200}"}, Rules(**rules, allowed=lambda answer: allowed)
    return asked, Rules(**rules)


@pytest.mark.parametrize("source", ["model", "lookup"])
@pytest.mark.parametrize("name", ["min-p", "top-p", "penalties", "bias", "grammar"])
def test_every_rule(
    planned_server: Server, name: str, source: str, small_target: SmallTarget, request: pytest.FixtureRequest,
    exact: Callable[..., dict[Answer, float]],
) -> None:  # fmt: skip
    """After the first choice, all prompts come from the cache.

    Lookups run with rules that depend on the answer so far; with the rest only if --exhaustive.
    """
    if source == "lookup" and name not in ("penalties", "grammar") and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive looks up with every rule")
    prompt = request.getfixturevalue(PROMPTS[source])
    body, rules = ruled(name, small_target, request.getfixturevalue("fresh"))
    before = metric(planned_server.url, "outrider_accepted_tokens_total")
    drawn = sample(planned_server, prompt, SAMPLES // 2, max_tokens=4, **body)
    assert metric(planned_server.url, "outrider_accepted_tokens_total") - before > SAMPLES / 20
    assert answers_p_value(drawn, exact(prompt, 4, rules)) > THRESHOLD


def test_an_experienced_planner_still_verifies_several(
    planned_server: Server, fresh: list[int], exact: Callable[..., dict[Answer, float]]
) -> None:
    """After thousands of answers it verifies second draft tokens, where a fault would show."""
    sample(planned_server, fresh, SAMPLES // 2, **BODY)
    check_answers(planned_server, fresh, exact(fresh))


SEEDED = [{"temperature": 1.0, "seed": 7}, {"temperature": 0.7, "top_p": 0.9, "seed": 8}]
TOKENS = 64


@pytest.fixture(scope="module")
def seeded(exact_server, prompts):
    """Seeded answers, each alone on the server, without speculation."""
    body = {"max_tokens": TOKENS, "ignore_eos": True}
    alone = [tokens(complete(exact_server, prompts[i], speculate=False, **body, **SEEDED[i])) for i in range(2)]
    reseeded = tokens(complete(exact_server, prompts[0], speculate=False, **body, **(SEEDED[0] | {"seed": 9})))
    assert reseeded != alone[0]
    return alone


@pytest.mark.parametrize(
    ("served", "others"),
    [
        *((name, others) for name in ("exact_server", "planned_server") for others in (0, 16, 32)),
        *((name, 16) for name in ("denoising_server", "eagle_server", "path_server")),
    ],
    indirect=["served"],
)
def test_a_seed_decides_the_answer(served, others, seeded, prompts):
    """The drafter, other requests and a restart do not matter."""
    longer = {"max_tokens": 2 * TOKENS} if others == 32 else {}  # more than the cache holds
    company = [{}, {"temperature": 0}, SEEDED[0], {"temperature": 1.0, "speculation": {"enabled": False}}]
    asked = [(prompts[i], SEEDED[i]) for i in range(2)]
    asked += [(prompts[2 + i], company[i % len(company)] | longer) for i in range(others)]
    asked = asked[2:12] + asked[:2] + asked[12:]
    body = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
    with ThreadPoolExecutor(len(asked)) as pool:
        ask = lambda case: tokens(complete(served, case[0], speculate=True, **(body | case[1])))  # noqa: E731
        answers = list(pool.map(ask, asked))
    first = min(10, others)
    assert answers[first : first + 2] == seeded


@pytest.mark.parametrize("served", ["exact_server", "eagle_server"], indirect=True)
def test_an_answer_is_the_same_after_a_retraction(served, prompts):
    """Some choices are retracted, and prefilled again with their tokens so far."""
    body = {"max_tokens": 2 * TOKENS, "min_tokens": 2 * TOKENS, "n": 12}
    kinds = [SEEDED[0], SEEDED[1], {"temperature": 0}]

    def ask(i, speculate):
        answer = complete(served, prompts[i], speculate=speculate, **(body | kinds[i]))
        return [choice["token_ids"] for choice in answer["choices"]]

    def ask_all() -> None:
        with ThreadPoolExecutor(len(kinds)) as pool:
            assert list(pool.map(lambda i: ask(i, True), range(len(kinds)))) == alone

    alone = [ask(i, False) for i in range(3)]
    until_retracted(served.url, ask_all)


def test_without_a_seed_answers_differ(exact_server, prompts):
    body = {"max_tokens": 24, "temperature": 1.0, "n": 4}
    answer = complete(exact_server, prompts[0], speculate=True, **body)
    assert len({tuple(c["token_ids"]) for c in answer["choices"]}) == 4


def test_choices_of_a_seeded_request_differ_and_are_reproducible(exact_server, prompts):
    body = {"max_tokens": 24, "temperature": 1.0, "n": 3, "seed": 11}
    once, again = (
        [tuple(c["token_ids"]) for c in complete(exact_server, prompts[0], speculate=True, **body)["choices"]]
        for _ in range(2)
    )
    assert once == again
    assert len(set(once)) == 3
    alone = tokens(complete(exact_server, prompts[0], speculate=False, **(body | {"n": 1})))
    assert once[0] == tuple(alone)
    twice = complete(exact_server, [PROMPT, PROMPT], speculate=True, chat=False, **(body | {"n": 2}))
    assert len({tuple(choice["token_ids"]) for choice in twice["choices"]}) == 4


def test_logprobs_of_sampled_tokens(exact_server, small_target, fresh):
    """Logprobs belong to the distribution that the token was drawn from, drafted or not."""
    body = {"max_tokens": 6, "temperature": 0.7, "logprobs": 1, "seed": 3, "ignore_eos": True}
    answer = complete(exact_server, fresh, speculate=True, **body)
    ids, rules = tokens(answer), Rules(temperature=0.7)
    for k, logprob in enumerate(answer["choices"][0]["logprobs"]["token_logprobs"]):
        (logits,) = small_target.logits([[*fresh, *ids[:k]]])
        assert logprob == pytest.approx(math.log(rules.probs(logits, (*ids[:k],))[ids[k]]), abs=2e-3)
