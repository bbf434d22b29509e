"""Environments of other engines: made once, of pinned packages, and what a user reads where they cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.server.bench import environments, isolated
from outrider.server.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def nothing_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine whose lock names no package."""
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    lock = tmp_path / "peers-small.txt"
    lock.write_text("# nothing\n")
    return lock


@pytest.mark.parametrize("engine", isolated.ENGINES)
def test_every_package_is_pinned(engine: str) -> None:
    lines = environments.lock_of(engine).read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert packages
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in packages)


def test_an_environment_is_made_once(
    nothing_to_install: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environments.prepare("small")
    assert python.resolve().is_file()
    assert python == environments.folder("small") / "bin" / "python"
    assert "Preparing the environment of the small arm in" in capsys.readouterr().err
    made = [path.name for path in (cache / "peers").iterdir() if path.is_dir()]
    assert made == [environments.folder("small").name]
    monkeypatch.setattr(environments, "_run", None)  # not called again
    assert environments.prepare("small") == python
    nothing_to_install.write_text("# something else\n")
    assert environments.folder("small") != python.parents[1]


def test_no_index_is_told(nothing_to_install: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    nothing_to_install.write_text("outrider-has-no-such-package==1\n")
    with pytest.raises(UserError, match="environment of the small arm could not be made: Could not find a version"):
        environments.prepare("small")
    assert not any(path.is_dir() for path in (cache / "peers").iterdir())


def test_a_cache_that_cannot_be_written_is_told(cache: Path) -> None:
    (cache / "peers").write_text("a file")
    with pytest.raises(UserError, match="set OUTRIDER_CACHE"):
        environments.prepare("openvino")


def test_without_a_checkout_there_is_no_lock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "LOCKS", cache / "elsewhere")
    with pytest.raises(UserError, match="comes with a checkout"):
        environments.prepare("vllm")
