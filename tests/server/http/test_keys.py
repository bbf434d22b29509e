"""Keys in a file: made, read, refused, and read again while they are in force."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from pathlib import Path

import pytest

from outrider.server.cli.main import main
from outrider.server.errors import UserError
from outrider.server.http import access, keys
from outrider.server.http.access import Access
from outrider.server.http.keys import BadKeys

DIGEST = "ab" * 32


def make(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `outrider key` prints."""
    assert main(["key", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    return printed.strip()


def header(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_command_makes_keys_that_are_nowhere_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    first = make(capsys, "team-a", "--api-keys", str(file), "--rate", "600/minute", "--concurrency", "8")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("# ours\n" + file.read_text())
    file.chmod(0o640)
    second = make(capsys, "operator", "--api-keys", str(file), "--admin")
    assert first != second
    assert min(len(first), len(second)) > 40
    text = file.read_text()
    assert text.startswith("# ours\n")
    assert first not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["keys.toml"]

    team, operator = keys.read(file)
    assert (team.name, str(team.rate), team.concurrency, team.admin) == ("team-a", "600/minute", 8, False)
    assert (operator.name, operator.rate, operator.concurrency, operator.admin) == ("operator", None, None, True)
    found = Access(None, file).holder(header(first))
    assert found is not None
    assert found.key == team


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a b"], "a key's name is up to 64 letters"),
        (["team", "--rate", "600"], "--rate: a rate is a number per second, minute or hour, like 600/minute"),
        (["team", "--rate", "0/minute"], "--rate"),
        (["team", "--concurrency", "0"], "--concurrency is a number from 1 on, not 0"),
        (["known"], "has a key known already"),
    ],
)
def test_command_says_what_was_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    make(capsys, "known", "--api-keys", str(file))
    before = file.read_text()
    assert main(["key", *arguments, "--api-keys", str(file)]) == 1
    assert message in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no keys; add one: outrider key NAME --api-keys"),
        ("[a", "is not TOML"),
        ("\xff", "is not TOML"),
        ("a = 1", "a is no table; a key begins with a line [a]"),
        ("[a]", "key a lacks sha256; make a key: outrider key"),
        ("[a]\nsha256 = 'secret'", "sha256 of key a is not 64 hexadecimal digits"),
        (f"[a]\nsha256 = '{DIGEST}'\nrates = 1", "key a has 'rates'; known are sha256, rate, concurrency, admin"),
        (f"[a]\nsha256 = '{DIGEST}'\nrate = 60", "rate of key a is a number per second, minute or hour"),
        (f"[a]\nsha256 = '{DIGEST}'\nconcurrency = true", "concurrency of key a is a number of requests from 1 on"),
        (f"[a]\nsha256 = '{DIGEST}'\nadmin = 'yes'", "admin of key a is true or false, not 'yes'"),
        (f"['a b']\nsha256 = '{DIGEST}'", "a key's name is up to 64 letters"),
        (f"[a]\nsha256 = '{DIGEST}'\n[b]\nsha256 = '{DIGEST}'", "two keys of"),
    ],
)
def test_bad_files_say_where_and_why(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadKeys) as raised:
        keys.read(file)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        Access(None, tmp_path / "keys.toml")


def test_changes_of_the_file_are_taken_up_and_bad_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    old = make(capsys, "old", "--api-keys", str(file), "--concurrency", "1")
    watched = Access(None, file)
    holder = watched.holder(header(old))
    assert holder is not None
    holder.begin()

    new = make(capsys, "new", "--api-keys", str(file))
    assert watched.holder(header(new)) is None
    watched.look()
    assert watched.holder(header(new)) is not None
    assert watched.holder(header(old)) is holder  # what it has used stays known

    with caplog.at_level(logging.ERROR):
        for bad in ("[old", ""):
            file.write_text(bad)
            watched.look()
            watched.look()
        file.unlink()
        watched.look()
    assert [record.getMessage().partition(": ")[0] for record in caplog.records[1:]] == [
        "the API keys stay as they were"
    ] * 3  # once for each
    assert watched.holder(header(old)) is holder
    assert not watched.open

    make(capsys, "third", "--api-keys", str(file))
    watched.look()
    assert watched.holder(header(old)) is None
    assert watched.holder(header(new)) is None
    holder.end()


def test_an_exchanged_link_is_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes renews a secret so."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    made = [make(capsys, name, "--api-keys", str(tmp_path / name / "keys.toml")) for name in ("one", "two")]
    link = tmp_path / "now"
    link.symlink_to("one")
    watched = Access(None, link / "keys.toml")
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    watched.look()
    assert [watched.holder(header(key)) is not None for key in made] == [False, True]


def test_the_file_is_looked_at_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "LOOK_SECONDS", 0.01)
    file = tmp_path / "keys.toml"
    make(capsys, "old", "--api-keys", str(file))
    watched = Access(None, file)
    new = make(capsys, "new", "--api-keys", str(file))

    async def main() -> None:
        task = asyncio.create_task(watched.watch())
        async with asyncio.timeout(10):
            while watched.holder(header(new)) is None:
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(main())
