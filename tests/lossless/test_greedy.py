"""At temperature 0 in float32, speculation changes no token."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import accepted_tokens, answer_ids, complete, complete_all, tokens
from metrics_page import MetricsPage, until_retracted
from running import HTTP

TOKENS = 128
PLAIN = {"max_tokens": TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
def plain(exact_server, prompts):
    """Without speculation, eight at a time."""
    assert len(prompts) == 50
    return answer_ids(exact_server, prompts, 8, speculate=False, **PLAIN)


@pytest.fixture(scope="module")
def plain_by_mtp(mtp_server, prompts):
    return answer_ids(mtp_server, prompts, 8, speculate=False, **PLAIN)


@pytest.fixture
def expected(request, plain):
    """The answers of the tested server's target without speculation."""
    return request.getfixturevalue("plain_by_mtp") if "mtp_server" in request.node.name else plain


@pytest.mark.parametrize(
    ("served", "count", "again", "least"),
    [
        ("exact_server", 50, 0, 300),
        ("eagle_server", 50, 24, 200),
        ("path_server", 50, 24, 200),
        ("mtp_server", 50, 24, 200),
        ("denoising_server", 24, 0, 100),
    ],
    indirect=["served"],
)
def test_drafts_of_every_kind_of_model(served, count, again, least, prompts, expected):
    """least: drafts of the model that must be right, half as many wrong. again: prompts that are asked a second time,
    when they and the drafter's state come from the cache."""
    names = [f"outrider_{kind}_position_total" for kind in ("accepted", "verified")]
    cached = "sglang:cached_tokens_total"
    before = MetricsPage(served.url)
    assert answer_ids(served, prompts[:count], 8, speculate=True, **PLAIN) == expected[:count]
    if again:
        assert answer_ids(served, prompts[:again], again, speculate=True, **PLAIN) == expected[:again]
    after = MetricsPage(served.url)
    accepted, verified = (after.value(name, source="model") - before.value(name, source="model") for name in names)
    assert accepted > least
    assert verified - accepted > least / 2
    assert (after.value(cached) > before.value(cached)) == (again > 0)


def test_auto_takes_an_mtp_layer(mtp_server, small_mtp):
    assert f"Drafter mtp: {small_mtp.folder}, in the model's checkpoint, fits target" in mtp_server.output()


def check_planned(server, prompts, plain, least):
    """Check that the answers are `plain`, though the planner drafted and rested, and accepted `least` drafts."""
    names = [f"outrider_{name}_total" for name in ("accepted_tokens", "wasted_tokens", "undrafted_steps")]
    before = MetricsPage(server.url)
    drafted = answer_ids(server, prompts, 8, speculate=True, **PLAIN)
    after = MetricsPage(server.url)
    accepted, wasted, undrafted = (after.value(name) - before.value(name) for name in names)
    assert accepted > least
    assert undrafted > 0
    assert wasted < 8 * accepted  # all drafts at full length: 19
    assert drafted == plain


def test_planned(planned_server, prompts, plain):
    check_planned(planned_server, prompts, plain, 400)


def test_the_default_drafter_planned(shipped_server, prompts, request):
    """Its steps are long enough that drafts pay on every machine."""
    chosen = prompts[: 24 if request.config.getoption("--exhaustive") else 10]
    alone = answer_ids(shipped_server, chosen, 8, speculate=False, **PLAIN)
    check_planned(shipped_server, chosen, alone, 80)


@pytest.mark.parametrize(
    "served", ["shipped_server", "dspark_server", "dflash_server", "deer_server", "specdiff_server"], indirect=True
)
def test_a_shipped_drafter(served, prompts):
    """This runs in float32; `test_embedded.py` tests the default type."""
    body = {"max_tokens": 48, "temperature": 0}
    alone = answer_ids(served, prompts[:12], 1, speculate=False, **body)
    before = accepted_tokens(served)
    drafted = answer_ids(served, prompts[:12], 6, speculate=True, **body)
    assert accepted_tokens(served) - before > 60
    assert drafted == alone


@pytest.mark.parametrize("speculate", [False, True])
def test_one_at_a_time(exact_server, prompts, plain, speculate, request):
    count = len(prompts) if request.config.getoption("--exhaustive") else 8
    chosen = prompts[:count]
    alone = answer_ids(exact_server, chosen, 1, speculate=speculate, **PLAIN)
    assert alone == plain[:count]


def test_requests_with_and_without_speculation_share_a_batch(exact_server, prompts, plain):
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda i: complete(exact_server, prompts[i], speculate=i % 2 == 0, **PLAIN), range(16))
        assert [tokens(a) for a in answers] == plain[:16]


@pytest.mark.parametrize(("served", "count"), [("exact_server", 24), ("mtp_server", 40)], indirect=["served"])
def test_a_cache_too_small_for_all(served, count, prompts, expected):
    """The cache of 3072 tokens is too small for these requests of up to about 200 tokens: some are retracted."""

    def ask() -> None:
        drafted = answer_ids(served, prompts[:count], count, speculate=True, **PLAIN, ignore_eos=True)
        for got, want in zip(drafted, expected[:count], strict=True):
            ended = want[:-1] if len(want) < TOKENS else want  # without ignore_eos the answer ends with its end token
            assert got[: len(ended)] == ended

    until_retracted(served.url, ask)


AGES = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 6}
PERSON = {"type": "object", "required": ["name", "ages"], "additionalProperties": False}
PERSON |= {"properties": {"name": {"type": "string", "maxLength": 20}, "ages": AGES}}
RULES = {
    "frequency penalty": {"frequency_penalty": 0.6},
    "presence penalty": {"presence_penalty": 1.2},
    "repetition penalty": {"repetition_penalty": 1.2},
    "minimum length": {"min_tokens": 40},
    "bias": {"logit_bias": {"260": 4.0, "28": -100}},
    "stop": {"stop": ["ould"]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(exact_server, prompts, rule):
    """Rules depend on earlier tokens, drafted ones included."""
    body = {"max_tokens": 96, "temperature": 0} | RULES[rule]
    chosen = ["Repeat the word echo twenty times: echo echo echo echo", *prompts[:5], prompts[16]]
    before = accepted_tokens(exact_server)
    without = answer_ids(exact_server, chosen, 7, speculate=False, **body)
    middle = accepted_tokens(exact_server)
    drafted = answer_ids(exact_server, chosen, 7, speculate=True, **body)
    assert middle == before
    assert accepted_tokens(exact_server) > middle
    assert drafted == without


def test_logprobs(exact_server, prompts):
    body = {"max_tokens": 48, "temperature": 0, "logprobs": 3}
    for prompt in prompts[:3]:
        without = complete(exact_server, prompt, speculate=False, **body)["choices"][0]["logprobs"]
        drafted = complete(exact_server, prompt, speculate=True, **body)["choices"][0]["logprobs"]
        assert drafted["tokens"] == without["tokens"]
        assert drafted["token_logprobs"] == pytest.approx(without["token_logprobs"], abs=1e-5)
        for a, b in zip(drafted["top_logprobs"], without["top_logprobs"], strict=True):
            assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize("length", [2, 3, 5, 8, 9, 17])
def test_short_answers_where_the_host_learns_lengths_late(late_server, prompts, plain, length):
    """Drafts may then go past an answer's end."""
    before = MetricsPage(late_server.url)
    body = {"max_tokens": length, "temperature": 0}
    drafted = complete_all(late_server, prompts[:24], 8, speculate=True, **body)
    after = MetricsPage(late_server.url)
    assert [tokens(a) for a in drafted] == [answer[:length] for answer in plain[:24]]
    assert [a["usage"]["completion_tokens"] for a in drafted] == [len(answer[:length]) for answer in plain[:24]]
    name = "outrider_verified_tokens_total"
    if length > 3:
        assert after.value(name) - before.value(name) > 24


@pytest.mark.parametrize("served", ["exact_server", "planned_server", "late_server"], indirect=True)
def test_answers_that_end_with_the_context(served, prompts):
    """Neighbouring requests use the next rows of the page table."""
    (model,) = HTTP.get(f"{served.url}/v1/models").json()["data"]
    context, body = model["max_model_len"], {"temperature": 0, "ignore_eos": True}
    ids = complete(served, prompts[0], speculate=False, max_tokens=1)["choices"][0]["prompt_token_ids"]
    text = ids * (context // len(ids) + 1)
    lengths = [context - 40, 30, context - 20, 50]
    asked = [(text[:length], min(context - length, 60)) for length in lengths]

    def ask(case, speculate):
        return tokens(complete(served, case[0], speculate=speculate, max_tokens=case[1], **body))

    alone = [ask(prompt, False) for prompt in asked]
    assert [len(answer) for answer in alone] == [38, 60, 18, 60]
    before = accepted_tokens(served)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: ask(prompt, True), asked)) == alone
    assert accepted_tokens(served) > before


def test_a_decoded_token_has_the_logprob_of_a_prefill(exact_server, prompts):
    """A decode step computes logits without SGLang's forward."""
    body = {"speculate": False, "temperature": 0, "logprobs": 3, "ignore_eos": True}
    for prompt in prompts[:2]:
        decoded = complete(exact_server, prompt, max_tokens=24, **body)["choices"][0]
        for place in (1, 7, 23):
            before = decoded["prompt_token_ids"] + decoded["token_ids"][:place]
            prefilled = complete(exact_server, before, max_tokens=1, **body)["choices"][0]
            assert prefilled["token_ids"] == decoded["token_ids"][place : place + 1]
            (after,), then = prefilled["logprobs"]["top_logprobs"], decoded["logprobs"]["top_logprobs"][place]
            assert after == pytest.approx(then, abs=1e-5)
