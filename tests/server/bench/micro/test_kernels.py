"""`outrider bench micro kernels` times the requested cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.server.bench import record
from outrider.server.cli.main import main


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_line_per_case(rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    assert main(["bench", "micro", "kernels", "--rounds", str(rounds), "--only", "silu", "--json", str(path)]) == 0
    machine, _, *lines = capsys.readouterr().out.splitlines()
    assert "bfloat16, 1 thread" in machine
    measured = record.read(path)["results"]
    assert list(measured) == ["silu_mul 1", "silu_mul 8", "silu_mul 64"]
    for line, (case, times) in zip(lines, measured.items(), strict=True):
        assert line.startswith(case)
        torch_ms, ours_ms, ratio, spread = line.removeprefix(case).split()
        low, high = spread.strip("()").split("–")
        assert len(times["torch"]) == len(times["ours"]) == rounds
        assert float(torch_ms) == pytest.approx(sorted(times["torch"])[rounds // 2], abs=1e-3)
        assert float(ours_ms) == pytest.approx(sorted(times["ours"])[rounds // 2], abs=1e-3)
        assert 0 < float(low) <= float(ratio) <= float(high)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--only", "no such kernel"], "no case here has 'no such kernel' in its name"),
        (["--rounds", "0"], "--rounds is at least 1, not 0"),
        (["--threads", "0"], "--threads is at least 1, not 0"),
    ],
)
def test_bad_input_is_one_line(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "micro", "kernels", *words]) == 1
    assert capsys.readouterr().err == f"outrider: {reason}\n"
