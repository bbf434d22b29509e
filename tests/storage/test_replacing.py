"""Atomic file replacement, and lines appended so that they survive a kill."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_drafters import TINY

from outrider.drafters.block.model import BlockModel
from outrider.drafters.training.loop import ReaderRun, Recipe
from outrider.server.model import cached_folder
from outrider.storage import replacing
from outrider.storage.appending import appending
from outrider.storage.replacing import replace


class Calls:
    """Records the calls that decide the state after a power failure, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, Path]] = []
        fsync, rename = os.fsync, Path.replace

        def noted_fsync(handle: int) -> None:
            self.seen.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
            fsync(handle)

        def noted_rename(path: Path, target: Any) -> Path:
            self.seen.append(("rename", path))
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(Path, "replace", noted_rename)


def test_content_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, path = Calls(monkeypatch), tmp_path / "a"
    with replacing.replacing(path, 0o640) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists()
        assert calls.seen == []
    assert calls.seen == [("fsync", temporary), ("rename", temporary), ("fsync", tmp_path)]
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["a"]


def test_a_failing_block_changes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail() -> None:
        with replacing.replacing(path) as temporary:
            temporary.write_text("ne")
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_no_file_is_replaced_if_one_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("old")
    fsync = os.fsync

    def full(handle: int) -> None:
        if ".second." in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace({first: "new", second: "new"})
    assert first.read_text() == "old"
    assert os.listdir(tmp_path) == ["first"]


def test_several_are_put_in_place_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    replace({tmp_path / name: name for name in "bac"})
    assert [path.name[1] for kind, path in calls.seen if kind == "rename"] == ["b", "a", "c"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: name for name in "abc"}


def test_leftovers_of_killed_writers_are_deleted_if_no_other_writes(tmp_path: Path) -> None:
    for name in (".a.pt.killed", ".b.pt.other"):
        (tmp_path / name).touch()
    with replacing.replacing(tmp_path / "a.pt", alone=True):
        pass
    assert sorted(os.listdir(tmp_path)) == [".b.pt.other", "a.pt"]


def test_a_checkpoint_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ReaderRun(tmp_path, BlockModel(TINY), None, Recipe(steps=1))
    (tmp_path / ".checkpoint.pt.killed").touch()
    calls = Calls(monkeypatch)
    run.save()
    kinds = [(kind, path.parent if kind == "rename" else path) for kind, path in calls.seen]
    temporary = calls.seen[0][1]
    assert kinds == [("fsync", temporary), ("rename", tmp_path), ("fsync", tmp_path)]
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_folder_is_synced_with_all_that_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    files = [tmp_path / "1", tmp_path / "x" / "2", tmp_path / "x" / "y" / "3"]
    for path in files:
        path.touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    calls = Calls(monkeypatch)
    replacing.sync_tree(tmp_path)
    synced = [path for _, path in calls.seen]
    assert set(synced[:3]) == set(files)
    assert set(synced[3:]) == {tmp_path, tmp_path / "x", tmp_path / "x" / "y"}


def test_a_cached_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, target = Calls(monkeypatch), tmp_path / "model"
    rename = Path.rename

    def noted(path: Path, new: Any) -> Path:
        calls.seen.append(("rename", path))
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", noted)
    cached_folder.cached(target, lambda folder: (folder / "weights").touch(), what="a model", needs=0)
    at = [kind for kind, _ in calls.seen].index("rename")
    before, after = [{path.name for _, path in part} for part in (calls.seen[:at], calls.seen[at + 1 :])]
    assert before == {"weights", cached_folder.MANIFEST, calls.seen[at][1].name}
    assert after == {tmp_path.name}


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
