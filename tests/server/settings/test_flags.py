"""Settings declare their flags, for `--help`, checks and server/README.md."""

import argparse
import math
from dataclasses import fields
from pathlib import Path

import pytest
from readme_tables import README, with_tables
from refusals import refuses

from outrider.server.settings.declared import DRAFTERS
from outrider.server.settings.flags import add_all_flags, add_engine_flags, served_settings_of, settings_of
from outrider.server.settings.setting import FLAG, declared, name_of
from outrider.server.settings.settings import Settings

WITHOUT_FLAG = {"diffusion", "learned", "lookup_tokenizer", "sglang_flags"}
BOUNDED = [(each.name, flag) for each, flag in declared(Settings) if flag.bounds is not None]
CHOSEN = [each.name for each, flag in declared(Settings) if flag.choices]


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    for _, flag in declared(Settings):
        for variable in flag.environment:
            monkeypatch.delenv(variable, raising=False)
    parser = argparse.ArgumentParser()
    add_all_flags(parser)
    return parser


def test_the_tables_in_the_readme_are_up_to_date() -> None:
    document = README.read_text()
    assert document == with_tables(document), "run `make format`"
    assert all(f"| `{name_of(each.name)}`" in document for each, _ in declared(Settings))


def test_every_setting_has_a_flag() -> None:
    assert {each.name for each in fields(Settings) if FLAG not in each.metadata} == WITHOUT_FLAG


def test_without_flags_settings_are_the_defaults(parser: argparse.ArgumentParser) -> None:
    assert served_settings_of(parser.parse_args([])) == Settings()


def test_values_have_the_types_of_their_settings(parser: argparse.ArgumentParser) -> None:
    flags = "--port 8000 --no-lookup --disable-radix-cache --drain-seconds 3 --allowed-hosts a,b.c --api-keys k.json"
    settings = served_settings_of(parser.parse_args([*flags.split(), "--", "--tp-size", "1"]))
    assert settings == Settings(
        port=8000, lookup=False, disable_radix_cache=True, drain_seconds=3.0, allowed_hosts=("a", "b.c"),
        api_keys=Path("k.json"), sglang_flags=("--tp-size", "1"),
    )  # fmt: skip


def test_the_environment_replaces_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    parser = argparse.ArgumentParser()
    add_all_flags(parser)
    assert served_settings_of(parser.parse_args([])).api_key == "secret"
    assert served_settings_of(parser.parse_args(["--api-key", "other"])).api_key == "other"


def test_help_is_plain_text_with_defaults(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().split())
    assert "`" not in text
    assert "](" not in text
    assert "GGUF file to serve" in text
    assert "maximum draft tokens per step (default: 7)" in text
    assert "(default: one per NUMA node of a CPU)" in text


@pytest.mark.parametrize(("name", "flag"), BOUNDED, ids=[name for name, _ in BOUNDED])
def test_numbers_outside_their_bounds_are_refused(name: str, flag: object) -> None:
    for value in flag.bounds:
        if name not in ("metrics_port", "port"):  # they must differ
            Settings(**{name: value} | ({"drafter": "dspark"} if name == "initial_tokens" else {}))
    for value in (math.nextafter(flag.bounds[0], -math.inf), flag.bounds[1] + 1, -math.inf, math.nan):
        refuses(f"^{name_of(name)} is a number from ", Settings, **{name: value})


@pytest.mark.parametrize("name", CHOSEN)
def test_values_that_are_no_choice_are_refused(name: str, parser: argparse.ArgumentParser) -> None:
    refuses(f"^{name_of(name)} is one of ", Settings, **{name: "nonsense"})
    with pytest.raises(SystemExit):
        parser.parse_args([name_of(name), "nonsense"])


def test_commands_that_measure_drafts_reject_off() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, drafter=True)
    assert "off" in DRAFTERS
    assert settings_of(parser.parse_args(["--gamma", "5"]), disable_radix_cache=True) == Settings(
        gamma=5, disable_radix_cache=True
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--drafter", "off"])
