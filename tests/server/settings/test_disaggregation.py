"""Separate servers for prefill and decode."""

import importlib.util
from typing import Any

import pytest
from refusals import refuses

from outrider.server.errors import UserError
from outrider.server.model import families
from outrider.server.model.target import Model
from outrider.server.settings import model_kinds
from outrider.server.settings.parallel import Parallel
from outrider.server.settings.settings import Settings

TCP = ("--disaggregation-transfer-backend", "mooncake_tcp")
DECODE = ("--disaggregation-mode", "decode", *TCP)
MODEL = Model("tiny", "path", {}, None)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def test_flags_are_read_and_steps_cost_the_same() -> None:
    parallel = Parallel.of((*DECODE, "--disaggregation-bootstrap-port", "9001", "--page-size", "16"))
    assert (parallel.role, parallel.backend, parallel.others) == ("decode", "mooncake_tcp", ("--page-size", "16"))
    assert Parallel.of(("--disaggregation-mode", "null")).role == ""
    settings = Settings(device="cpu", sglang_flags=DECODE)
    assert settings.plugin_config.role == "decode"
    assert settings.parallel.step_flags == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disaggregation-mode", "both"), "among the flags for SGLang: argument --disaggregation-mode: invalid"),
        (("--disaggregation-mode", "decode", *TCP[:1], "fake"), "--disaggregation-mode decode goes with .*, not fake"),
        (("--disaggregation-mode", "prefill", *TCP[:1], "nixl"), "that two servers fit together"),
    ],
)
def test_impossible_settings_are_refused_at_once(flags: tuple[str, ...], message: str) -> None:
    refuses(message, Settings, device="cpu", sglang_flags=flags)


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
    with pytest.raises(UserError, match=f"^{flag} needs prefill and decode in one server"):
        Settings(**({"device": "cpu", "sglang_flags": DECODE} | changes))


def test_models_with_more_than_keys_and_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(device="cpu", sglang_flags=DECODE)
    config = {"architectures": ["SDARForCausalLM"], "vocab_size": 8, "mask_token_id": 0}
    with pytest.raises(UserError, match="is a block-diffusion model, which stays in one server; leave"):
        model_kinds.with_diffusion(settings, Model("filling", "path", config, None))
    monkeypatch.setattr(families, "is_recurrent", lambda model: True)
    with pytest.raises(UserError, match="keeps a state of each request, which stays in one server; leave"):
        model_kinds.with_recurrent(settings, MODEL)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs a package that is not installed: pip install mooncake-transfer-engine"):
        Settings(device="cpu", sglang_flags=DECODE)
