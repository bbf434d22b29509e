"""Appended lines survive a kill at once, and are flushed every few lines."""

import os
from pathlib import Path

import pytest

from outrider.storage.appending import appending


def test_lines_are_written_at_once_and_synced_every_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync, synced = tmp_path / "lines", os.fsync, []

    def noting(handle: int) -> None:
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), len(path.read_text().splitlines())))
        fsync(handle)

    def fill() -> None:
        with appending(path, 3) as append:
            for number in range(7):
                append(str(number))
                assert path.read_text().splitlines()[-1] == str(number)
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", noting)
    with pytest.raises(KeyboardInterrupt):
        fill()
    assert synced == [(tmp_path.name, 0), ("lines", 3), ("lines", 6), ("lines", 7)]
    with appending(path, 3) as append:
        append("more")
    assert path.read_text().splitlines() == [*map(str, range(7)), "more"]
