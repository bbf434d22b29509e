"""The scripts of this folder explain themselves."""

import importlib
from pathlib import Path

import pytest
import script

SCRIPTS = [path.stem for path in Path(__file__).parent.glob("[!t]*.py") if "script.main(" in path.read_text()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.main(importlib.import_module(name), ["--help"])
    assert f"python tests/measure/{name}.py" in capsys.readouterr().out
