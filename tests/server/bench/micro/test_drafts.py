"""`outrider bench micro drafts` times a drafter beside a target of its shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_drafters import WIDE, WIDE_DFLASH, WIDE_DFLASH2, WIDE_DIFFUSION, make_diffusion, make_model
from tiny_eagle import save_eagle

from outrider.drafters.block.checkpoint import save_compact
from outrider.kernels.cpu import native
from outrider.server.bench import record
from outrider.server.cli.main import main


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("weights", ["bfloat16", "Q4_1"])
def test_a_line_per_drafter_and_number_of_requests(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "dspark", tmp_path / "dflash", tmp_path / "dflash2"]
    for folder, config in zip(folders, (WIDE, WIDE_DFLASH, WIDE_DFLASH2), strict=True):
        save_compact(make_model(config), folder)
    folders += [save_eagle(tmp_path / "eagle3", "wide"), tmp_path / "diffusion"]
    save_compact(make_diffusion(WIDE_DIFFUSION), folders[-1])
    output = tmp_path / "drafts.json"
    flags = ["--requests", "1,3", "--context", "9", "--rounds", "3", "--temperature", "1", "--weights", weights]
    assert main(["bench", "micro", "drafts", *map(str, folders), *flags, "--threads", "1", "--json", str(output)]) == 0
    out = capsys.readouterr().out.splitlines()
    lines = [line for line in out if ", ours " in line or ", torch " in line]
    measured = record.read(output)["results"]
    names = ["dspark", "dflash", "dflash2", "eagle3", "diffusion, 1 step", "diffusion, 2 steps"]
    assert list(measured) == [f"{name}, {count}" for name in names for count in (1, 3)]
    rows = [(name, kind, found) for name, found in measured.items() for kind in ("torch", "ours")]
    for line, (name, kind, found) in zip(lines, rows, strict=True):
        label, _, cells = line.partition(f", {kind} ")
        assert label.strip() == name
        assert {len(times) for times in found["times"].values()} == {3}
        for cell, arm in zip(cells.split(), ("verify", f"propose, {kind}", f"observe, {kind}"), strict=False):
            assert float(cell) == pytest.approx(sorted(found["times"][arm])[1], abs=0.01)
        parts = found["parts"] if "diffusion" not in name else [part[:3] for part in found["parts"]]
        assert min(map(min, parts)) > 0  # products, attention, norms, and a block drafter's sampling


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not native.available():
        pytest.skip("no compiled kernels here")
    assert main(["bench", "micro", "drafts", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err
