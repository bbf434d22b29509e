"""Speculation changes no answer of models with 8-bit weights or activations."""

from pathlib import Path

import pytest
from asking import MODEL, accepted_tokens, answer_ids
from running import ForkedServer, Server

from outrider.kernels.cpu import native
from outrider.server.model import bundled_model, target
from outrider.server.settings.activations import with_activations
from outrider.server.settings.settings import Settings

pytestmark = pytest.mark.skipif(not native.available(), reason="8-bit weights need the compiled kernels")

EXACT = ("--dtype", "float32", "--disable-radix-cache", "--max-total-tokens", "3072", "--context-length", "1024")
GREEDY = {"max_tokens": 64, "temperature": 0}


@pytest.mark.parametrize("served", ["int8_server", "rounding_server"], indirect=True)
def test_speculation_changes_no_answer(served: Server, prompts: list[str], request: pytest.FixtureRequest) -> None:
    """The slower embedded model has half of the prompts unless --exhaustive."""
    few = "rounding_server" in request.node.name and not request.config.getoption("--exhaustive")
    chosen = prompts[: 3 if few else 6]
    plain = answer_ids(served, chosen, 1, speculate=False, **GREEDY)
    before = accepted_tokens(served)
    drafted = answer_ids(served, chosen, 6, speculate=True, **GREEDY)
    assert accepted_tokens(served) - before > 50  # enough drafts were tested
    assert drafted == plain


def test_the_models_route_names_the_activations(rounding_server: Server, exact_server: Server) -> None:
    for server, activations in ((rounding_server, "int8"), (exact_server, "float")):
        assert server.client().models.list().data[0].model_dump()["activations"] == activations


def test_the_faster_activations_are_the_default(rounding_server: Server, tmp_path: Path) -> None:
    """They are chosen before the start, and named in the log and to clients."""
    file = str(bundled_model.find_gguf())
    settings = Settings(model=file, device="cpu", dtype="float32", drafter="off")
    chosen = with_activations(settings, target.find(file)).activations
    flags = ("--model", file, "--served-model-name", MODEL, "--drafter", "off", "--log-level", "info")
    with ForkedServer(tmp_path / "log", *EXACT, *flags, "--activations", "auto") as server:
        assert server.client().models.list().data[0].model_dump()["activations"] == chosen
        assert f"Activations {chosen}: " in server.output()
        if chosen == "int8":
            prompt = ["Name three rivers of Europe."]
            texts = [answer_ids(each, prompt, 1, speculate=False, **GREEDY) for each in (server, rounding_server)]
            assert texts[0] == texts[1]


def test_rounded_answers_differ_but_are_similar(int8_server: Server, exact_server: Server, prompts: list[str]) -> None:
    rounded, exact = (
        answer_ids(server, prompts[:6], 6, speculate=False, **GREEDY) for server in (int8_server, exact_server)
    )
    assert rounded != exact
    agree = sum(r[:4] == e[:4] for r, e in zip(rounded, exact, strict=True))
    assert agree >= 3
