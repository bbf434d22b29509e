"""Sampling of requests without sampling fields, in /openapi.json, /v1/models and the log."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from running import HTTP, Server

from outrider.server.http.requests.sampling_defaults import OPENAI, SamplingDefaults
from outrider.server.processes import logs
from outrider.server.settings.settings import Settings


def defaults(*, diffusion: bool = False, **recommended: float) -> SamplingDefaults:
    """A model recommends these values."""
    config = SimpleNamespace(get_default_sampling_params=lambda: dict(recommended))
    algorithm = "blocks" if diffusion else None
    return SamplingDefaults.of(SimpleNamespace(model_config=config, config_value=lambda name: algorithm))


def test_fields_without_a_recommendation_have_openais_value() -> None:
    assert defaults().applied == OPENAI
    assert defaults(temperature=0.6, top_k=20).applied == OPENAI | {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("name", "value", "ignored"),
    [("top_k", 0, False), ("top_k", -5, True), ("top_k", 2**31, True), ("top_p", 0.0, True), ("temperature", -1, True)],
)
def test_a_recommendation_that_no_request_may_carry_is_not_applied(name: str, value: float, ignored: bool) -> None:
    applied = defaults(min_p=0.1, **{name: value})
    assert applied.applied == OPENAI | {"min_p": 0.1}
    assert applied.ignored == ({name: value} if ignored else {})


def test_block_diffusion_has_no_penalty() -> None:
    recommended = {"temperature": 0.7, "repetition_penalty": 1.1}
    assert defaults(diffusion=True, **recommended).recommended == {"temperature": 0.7}
    assert defaults(**recommended).recommended == recommended


def test_the_log_names_recommendations_only_if_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    def logged(shown: SamplingDefaults, log_format: str) -> str:
        root, server = logging.getLogger(), logging.getLogger(logs.SERVER)
        kept = root.handlers[:], server.handlers[:], server.propagate
        root.handlers[:], server.handlers[:], server.propagate = [], [], True
        try:
            logs.configure(Settings(log_format=log_format))
            shown.announce(server.info)
        finally:
            root.handlers[:], server.handlers[:], server.propagate = kept
        return capsys.readouterr().err

    recommended = {"temperature": 0.2, "top_p": 0.9}
    text = "Sampling by default: temperature 0.2, top_p 0.9 (from the model; --sampling-defaults openai turns it off)"
    assert logged(defaults(**recommended), "text") == text + "\n"
    line = json.loads(logged(defaults(**recommended), "json"))
    assert (line["message"], line["sampling_defaults"], line["level"]) == (text, recommended, "INFO")
    assert "top_k -5" in logged(defaults(top_k=-5), "text")
    assert logged(defaults(), "text") == ""


def described(server: Server) -> list[dict[str, Any]]:
    """Return the defaults that OpenAPI gives for both kinds of request."""
    schemas = HTTP.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    return [
        {name: schemas[kind]["properties"][name]["default"] for name in OPENAI}
        for kind in ("ChatRequest", "TextRequest")
    ]


def test_a_flag_selects_openais_defaults(server: Server) -> None:
    assert described(server) == [OPENAI, OPENAI]
    shown = HTTP.get(f"{server.url}/v1/models")
    assert shown.json()["data"][0]["default_parameters"] == OPENAI
    assert '"top_k":-1,' in shown.text
    assert "Sampling by default" not in server.output()
