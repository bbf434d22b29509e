"""A target with an MTP layer that drafts, planned, together with prompt lookup: speculation changes no answer."""

import pytest
from asking import complete_all, tokens
from metrics_page import MetricsPage, until_retracted
from running import Server
from small_mtp import SmallMtp

PLAIN = {"max_tokens": 128, "temperature": 0}


@pytest.fixture(scope="module")
def plain(mtp_server: Server, prompts: list[str]) -> list[list[int]]:
    return [tokens(a) for a in complete_all(mtp_server, prompts, 8, speculate=False, **PLAIN)]


def test_auto_takes_it(mtp_server: Server, small_mtp: SmallMtp) -> None:
    said = f"Drafter mtp: {small_mtp.folder}, in the model's checkpoint, fits target"
    assert said in mtp_server.output()


def test_greedy(mtp_server: Server, prompts: list[str], plain: list[list[int]]) -> None:
    """The second time, prompts and drafter state come from the cache."""
    names = ("outrider_accepted_position_total", "outrider_verified_position_total")
    before = MetricsPage(mtp_server.url)
    drafted = [tokens(a) for a in complete_all(mtp_server, prompts, 8, speculate=True, **PLAIN)]
    again = [tokens(a) for a in complete_all(mtp_server, prompts[:24], 8, speculate=True, **PLAIN)]
    after = MetricsPage(mtp_server.url)
    accepted, verified = (after.value(name, source="model") - before.value(name, source="model") for name in names)
    assert accepted > 200
    assert verified - accepted > 100
    assert after.value("sglang:cached_tokens_total") > before.value("sglang:cached_tokens_total")
    assert drafted == plain
    assert again == plain[:24]


def test_a_cache_too_small_for_all(mtp_server: Server, prompts: list[str], plain: list[list[int]]) -> None:
    """40 requests of up to about 200 tokens in a cache of 3072: some are retracted."""
    body = PLAIN | {"ignore_eos": True}

    def ask() -> None:
        drafted = [tokens(a) for a in complete_all(mtp_server, prompts[:40], 40, speculate=True, **body)]
        for got, want in zip(drafted, plain, strict=False):
            ended = want[:-1] if len(want) < PLAIN["max_tokens"] else want
            assert got[: len(ended)] == ended

    until_retracted(mtp_server.url, ask)
