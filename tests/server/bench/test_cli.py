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


MOVED_NOW = {f"bench {name}": line for name, line in MOVED.items()}
MOVED_NOW |= {f"bench micro {name}": line for name, line in micro_cli.MOVED.items()}


@pytest.mark.parametrize("words", MOVED_NOW)
def test_a_removed_benchmark_names_its_replacement(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--rounds", "3"]) == 1
    assert capsys.readouterr().err == f"outrider: `outrider {words}` is gone: use {MOVED_NOW[words]}\n"
    assert_is_there(MOVED_NOW[words])


def assert_is_there(line: str) -> None:
    program, command, *words = line.replace("`", "").split()
    if program == "python":
        assert (ROOT / command).is_file()
        return
    assert command in COMMANDS_OF_ALL
    assert command != "bench" or words[0] in COMMANDS
    assert words[0] != "micro" or words[1] in micro_cli.COMMANDS


HERE, NUMBERS = __file__, "a list of positive numbers like 1,8"
BAD = {
    "bench micro steps": {"--shapes 8by8": "REQUESTSxTOKENS", "--shapes 0x1": "at least one request"},
    "bench load": {
        "": "--prompts FILE… is needed",
        "--prompts /nowhere.jsonl": "does not exist",
        f"--prompts {HERE}": "not JSON",
        f"--prompts {HERE} --concurrency two": NUMBERS,
        "--url x": "http://HOST:PORT",
        "--url http://127.0.0.1:9": "no server answers at http://127.0.0.1:9",
        "--url http://x --level 3": "--level goes without --url",
        "--rate 3": "--rate goes with --url",
        "--url a=http://127.0.0.1:9 a=http://127.0.0.1:8": "--url names a twice",
        "--url a=http://127.0.0.1:9 --undrafted b": "--undrafted takes names of --url, a, not b",
        "--url http://x --rounds 0": "--rounds is at least 1",
        "--url http://x --rate 3 --concurrency 3": "exclude each other",
        "--url http://x --goodput ttft:fast": "milliseconds above 0",
        "--url http://x --csv /nowhere/at/all.csv": "the folder /nowhere/at does not exist",
    },
    "simulate --concurrency 1 --steps 60 --output 30 --resamples 2": {
        "--concurrency some": NUMBERS,
        "--concurrency 0": NUMBERS,
        "--concurrency 100001": "from 1 to",
        "--planners best": "knows off, verify-all",
        "--planners threshold=2": "survival lies in 0..1",
        "--planners threshold=high": "survival in 0..1",
        "--cost weight=3": "--cost knows base",
        "--cost base=fast": "number of milliseconds",
        "--cost base=-1": "base is 0 or more",
        "--acceptance 0.8,high": "a list like",
        "--acceptance 1.5": "0..1 per position",
        "--acceptance no-json": "not from `outrider bench load",
        "--acceptance no-counts": "not from `outrider bench load",
        "--acceptance no-tokens": "counts no tokens",
        "--profile nowhere": "no profile nowhere",
        "--steps 0": "at least 1",
        f"--recorded {HERE}": "is not a recording",
    },
}
FILES = {"no-json": "no JSON", "no-counts": "[1]", "no-tokens": '{"a": {"tried": [0], "kept": [0]}}'}


@pytest.mark.parametrize(
    ("command", "flags", "reason"), [(name, *case) for name, cases in BAD.items() for case in cases.items()]
)
def test_bad_input_is_one_line(
    command: str, flags: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content)
    assert main([*command.split(), *flags.split()]) == 1
    said = capsys.readouterr().err
    assert reason in said
    assert said.startswith("outrider: ")
    assert len(said.strip().splitlines()) == 1, said
