"""Answers with speculation equal those without with 8-bit weights or activations too: what is served is the model."""

from __future__ import annotations

import pytest
from asking import accepted_tokens, complete_all, tokens
from running import Server

from outrider.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="8-bit weights need the compiled kernels")

GREEDY = {"max_tokens": 64, "temperature": 0}


@pytest.mark.parametrize("served", ["int8_server", "rounding_server"], indirect=True)
def test_speculation_changes_nothing(served: Server, prompts: list[str]) -> None:
    chosen = prompts[:12]
    plain = [tokens(a) for a in complete_all(served, chosen, 1, speculate=False, **GREEDY)]
    before = accepted_tokens(served)
    drafted = [tokens(a) for a in complete_all(served, chosen, 6, speculate=True, **GREEDY)]
    assert accepted_tokens(served) - before > 50  # otherwise nothing was put to the test
    assert drafted == plain


def test_clients_are_told(rounding_server: Server, exact_server: Server) -> None:
    told = [
        server.client().models.list().data[0].model_dump()["activations"] for server in (rounding_server, exact_server)
    ]
    assert told == ["int8", "float"]


def test_it_is_another_model(int8_server: Server, exact_server: Server, prompts: list[str]) -> None:
    """Otherwise the weights were not rounded at all."""
    rounded, exact = (
        [tokens(a) for a in complete_all(server, prompts[:6], 6, speculate=False, **GREEDY)]
        for server in (int8_server, exact_server)
    )
    assert rounded != exact
    agree = sum(r[:4] == e[:4] for r, e in zip(rounded, exact, strict=True))
    assert agree >= 3  # but a close one
