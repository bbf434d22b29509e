"""`outrider bench --help` names every benchmark and imports none of them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.server.bench.cli import COMMANDS, MOVED
from outrider.server.bench.micro import cli as micro_cli
from outrider.server.cli.main import COMMANDS as COMMANDS_OF_ALL
from outrider.server.cli.main import main


def test_help_imports_no_benchmark() -> None:
    code = """
import sys
from outrider.server.cli.main import COMMANDS as COMMANDS_OF_ALL
from outrider.server.cli.main import main
try:
    main(["bench", "--help"])
finally:
    heavy = {"torch", "numpy", "sglang"} & set(sys.modules)
    assert not heavy, heavy
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    for name, (_, summary) in COMMANDS.items():
        assert any(line.split() == [name, *summary.split()] for line in lines), shown


ROOT = Path(__file__).parents[3]
MODULES = {(name,): module for name, (module, _) in COMMANDS.items() if name != "micro"}
MODULES |= {("micro", name): module for name, (module, _) in micro_cli.COMMANDS.items()}


@pytest.mark.parametrize("words", MODULES, ids=" ".join)
def test_every_benchmark_explains_itself(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    module = importlib.import_module(MODULES[words])
    assert module.__doc__ is not None
    assert module.__doc__.strip() in shown
    assert f"outrider bench {' '.join(words)}" in module.__doc__.partition("example")[2]
    assert "--json FILE" in shown or words == ("report",)


@pytest.mark.parametrize("name", MOVED)
def test_a_removed_benchmark_names_its_replacement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--rounds", "3"]) == 1
    assert capsys.readouterr().err == f"outrider: `outrider bench {name}` is gone: use {MOVED[name]}\n"
    assert_is_there(MOVED[name])


@pytest.mark.parametrize("name", micro_cli.MOVED)
def test_a_part_of_before_is_answered_with_its_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = micro_cli.MOVED[name]
    assert main(["bench", "micro", name, "--rounds", "3"]) == 1
    assert capsys.readouterr().err == f"outrider: `outrider bench micro {name}` is gone: use {script}\n"
    assert_is_there(script)


def assert_is_there(line: str) -> None:
    program, command, *words = line.replace("`", "").split()
    if program == "python":
        assert (ROOT / command).is_file()
        return
    assert command in COMMANDS_OF_ALL
    assert command != "bench" or words[0] in COMMANDS
    assert words[0] != "micro" or words[1] in micro_cli.COMMANDS
