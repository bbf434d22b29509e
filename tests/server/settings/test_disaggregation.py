"""Separate servers for prefill and decode."""

import importlib.util
from typing import Any

import pytest
from refusals import refuses

from outrider.server.model import families
from outrider.server.model.target import Model
from outrider.server.settings import model_kinds
from outrider.server.settings.parallel import Parallel
from outrider.server.settings.settings import Settings

DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake_tcp")
ASKED: dict[str, Any] = {"device": "cpu", "sglang_flags": DECODE}
MODEL = Model("tiny", "path", {}, None)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_flags_are_read_and_steps_cost_the_same() -> None:
    parallel = Parallel.of((*DECODE, "--disaggregation-bootstrap-port", "9001", "--page-size", "16"))
    assert (parallel.role, parallel.backend, parallel.others) == ("decode", "mooncake_tcp", ("--page-size", "16"))
    assert Parallel.of(("--disaggregation-mode", "null")).role == ""
    settings = Settings(**ASKED)
    assert settings.plugin_config.role == "decode"
    assert settings.parallel.step_flags == ()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"learn": True}, "--learn"),
        ({"enable_lora": True}, "--lora-paths or --enable-lora"),
        ({"sglang_flags": (*DECODE, "--tp-size", "2")}, "--tp-size"),
        ({"engines": 2}, "--engines"),
    ],
)
def test_options_that_need_one_server_are_refused_by_name(changes: dict[str, Any], flag: str) -> None:
    refuses(f"^{flag} needs prefill and decode in one server", Settings, **ASKED | changes)


def test_models_with_more_than_keys_and_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**ASKED)
    config = {"architectures": ["SDARForCausalLM"], "vocab_size": 8, "mask_token_id": 0}
    filling, stays = Model("filling", "path", config, None), "which stays in one server; leave"
    refuses(f"is a block-diffusion model, {stays}", model_kinds.with_diffusion, settings, filling)
    monkeypatch.setattr(families, "is_recurrent", lambda model: True)
    refuses(f"keeps a state of each request, {stays}", model_kinds.with_recurrent, settings, MODEL)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("needs a package that is not installed: pip install mooncake-transfer-engine", Settings, **ASKED)
