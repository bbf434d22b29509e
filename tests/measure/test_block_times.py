"""block_times.py times the requested products."""

from pathlib import Path

import block_times
import performance
import pytest
import script
import torch
from records import read_record


def test_products_with_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--shape", "256x256", "--kinds", "Q4_K", "Q8_0", "--rows", "1,2", "--rounds", "3", "--threads", "1"]
    threads = torch.get_num_threads()
    try:
        assert script.main(block_times, [*flags, "--json", str(tmp_path / "found.json")]) == 0
    finally:
        torch.set_num_threads(threads)
    found = read_record(tmp_path / "found.json")
    assert list(found["results"]) == ["Q4_K 1", "Q4_K 2", "Q8_0 1", "Q8_0 2"]
    _, _, *lines = capsys.readouterr().out.splitlines()
    for line, (case, times) in zip(lines, found["results"].items(), strict=True):
        assert [len(times[arm]) for arm in ("reading", "float", "int8")] == [3, 3, 3]
        medians = [sorted(each)[1] for each in times.values()]
        assert [float(word) for word in line.removeprefix(case).split()[:3]] == pytest.approx(medians, abs=0.01)
    assert "| Q8_0 | " in performance.page({"found.json": found})
