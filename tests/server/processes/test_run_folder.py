"""The folder of a running server is private, and is deleted with the server or by the next one."""

import multiprocessing
import os
import stat
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from outrider.server.processes.run_folder import PREFIX, RunFolder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def hold(pipe: Connection, elsewhere: Path) -> None:
    made = RunFolder.make()
    made.attach(elsewhere)
    pipe.send(made.path)
    time.sleep(60)


def test_for_this_user_alone_and_gone_at_the_end(temporary: Path) -> None:
    made = RunFolder.make()
    assert made.path.parent == temporary
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    (made.path / "metrics").mkdir()
    made.remove()
    assert list(temporary.iterdir()) == []


def test_the_next_server_deletes_a_killed_ones_folder(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "shared"
    elsewhere.touch()
    process = context.Process(target=hold, args=(theirs, elsewhere))
    process.start()
    try:
        left = ours.recv()
        (left / "metrics").mkdir()
        (left / "metrics" / "counter.db").touch()
        file = temporary / f"{PREFIX}file"
        file.touch()
        second = RunFolder.make()
        assert left.exists()  # its server lives
        assert elsewhere.exists()
    finally:
        process.kill()
        process.join()
    third = RunFolder.make()
    assert sorted(temporary.iterdir()) == sorted([second.path, third.path, file])
    assert not elsewhere.exists()


def test_links_are_not_followed(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    RunFolder.make()
    assert (elsewhere / "kept").exists()


def test_many_that_start_at_once_have_a_folder_each(temporary: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for _ in range(8):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=hold, args=(theirs, tmp_path_factory.mktemp("elsewhere") / "shared")))
        processes[-1].start()
        pipes.append(ours)
    try:
        made = [pipe.recv() for pipe in pipes]
        assert len(set(made)) == 8
        assert all(os.path.isdir(path) for path in made)
    finally:
        for process in processes:
            process.kill()
            process.join()
