"""kernel_times.py and block_times.py time the requested cases."""

from collections.abc import Iterator
from pathlib import Path

import block_times
import kernel_times
import performance
import pytest
import script
import torch

from outrider.server.bench import record


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_line_per_case(rounds: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.json"
    assert script.main(kernel_times, ["--rounds", str(rounds), "--only", "silu", "--json", str(path)]) == 0
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
    assert script.main(kernel_times, [*words]) == 1
    assert capsys.readouterr().err.endswith(f": {reason}\n")


@pytest.mark.slow
def test_products_with_blocks(tmp_path: Path) -> None:
    flags = ["--shape", "256x256", "--kinds", "Q4_K", "Q8_0", "--rows", "1,2", "--rounds", "2"]
    assert script.main(block_times, [*flags, "--json", str(tmp_path / "found.json")]) == 0
    found = record.read(tmp_path / "found.json")
    assert list(found["results"]) == ["Q4_K 1", "Q4_K 2", "Q8_0 1", "Q8_0 2"]
    assert all(list(times) == ["reading", "float", "int8"] for times in found["results"].values())
    assert "| Q8_0 | " in performance.page({"found.json": found})
