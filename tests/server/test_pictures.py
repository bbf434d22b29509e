"""Pictures are saved with matplotlib, and refused before a measurement without."""

import sys
from pathlib import Path

import pytest

from outrider.server import pictures
from outrider.server.cli.main import main
from outrider.server.errors import UserError


def test_a_figure_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert pictures.available()
    pictures.require("--plot")
    with pictures.figure(tmp_path / "a.png") as figure:
        figure.subplots().plot([1, 2], [3, 4])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not pictures.available()
    with pytest.raises(UserError, match="--plot needs matplotlib: pip install matplotlib, or leave --plot out"):
        pictures.require("--plot")


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "load", "--prompts", __file__, "--plot", "a.png"],
        ["bench", "load", "--url", "http://127.0.0.1:9", "--plot", "a.png"],
    ],
)
def test_commands_refuse_before_they_measure(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "needs matplotlib" in shown.err
    assert shown.out == ""
