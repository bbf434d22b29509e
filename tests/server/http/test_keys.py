"""Keys in a file: made, read, refused, and reread."""

import asyncio
import logging
import os
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from in_loop import in_loop
from refusals import refuses

from outrider.server.cli.main import main
from outrider.server.http.keys import access, key_file
from outrider.server.http.keys.access import Access
from outrider.server.http.keys.key_file import BadKeys

DIGEST = "ab" * 32
A = f"[a]\nsha256 = '{DIGEST}'\n"


@dataclass
class Keys:
    """`outrider key` with a file."""

    file: Path
    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit code, and what was printed."""
        code = main(["key", *arguments, "--api-keys", str(self.file)])
        return code, "".join(self.capsys.readouterr())

    def make(self, *arguments: str) -> str:
        code, printed = self.run(*arguments)
        assert (code, printed.count("\n")) == (0, 1)
        return printed.strip()


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path / "keys.toml", capsys)


def look(watched: Access) -> None:
    asyncio.run(watched.reload_if_changed())


def header(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_command_makes_keys_that_are_not_stored(keys: Keys) -> None:
    first = keys.make("team-a", "--rate", "600/minute", "--concurrency", "8")
    assert stat.S_IMODE(keys.file.stat().st_mode) == 0o600
    keys.file.write_text("# ours\n" + keys.file.read_text())
    keys.file.chmod(0o640)
    second = keys.make("operator", "--admin")
    assert first != second
    assert min(len(first), len(second)) > 40
    text = keys.file.read_text()
    assert text.startswith("# ours\n")
    assert first not in text
    assert stat.S_IMODE(keys.file.stat().st_mode) == 0o640
    assert set(os.listdir(keys.file.parent)) <= {"keys.toml", ".keys.toml.lock"}

    team, operator = key_file.read(keys.file)
    assert (team.name, str(team.rate), team.concurrency, team.admin) == ("team-a", "600/minute", 8, False)
    assert (operator.name, operator.rate, operator.concurrency, operator.admin) == ("operator", None, None, True)
    usage = Access(None, keys.file).key_usage(header(first))
    assert usage is not None
    assert usage.key == team


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a b"], "a key's name is up to 64 letters"),
        (["team", "--rate", "600"], "--rate: a rate is a number per second, minute or hour, like 600/minute"),
        (["team", "--rate", "0/minute"], "--rate"),
        (["team", "--concurrency", "0"], "--concurrency is a number from 1 to 1000000000000000, not 0"),
        (["team", "--tokens-per-day", "-1"], "--tokens-per-day is a number from 1 to"),
        (["known"], "has a key known already"),
        ([], "name the key: outrider key NAME"),
        (["known", "--remove"], "known is the only key of"),
        (["other", "--remove"], "has no key other; it has known"),
        (["known", "--list"], "--list shows all keys; leave known out"),
        (["known", "--remove", "--admin"], "--admin goes with a new key; to change one, edit"),
    ],
)
def test_command_names_the_fault(arguments: list[str], message: str, keys: Keys) -> None:
    keys.make("known")
    before = keys.file.read_text()
    code, printed = keys.run(*arguments)
    assert code == 1
    assert message in printed
    assert keys.file.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no keys; add one: outrider key NAME --api-keys"),
        ("[a", "is not TOML"),
        ("\xff", "is not TOML"),
        ("a = 1", "a is no table; a key begins with a line [a]"),
        ("[a]", "key a lacks sha256; make a key: outrider key"),
        ("[a]\nsha256 = 'secret'", "sha256 of key a is not 64 hexadecimal digits"),
        (A + "rates = 1", "key a has 'rates'; known are sha256, rate, concurrency, tokens_per_minute"),
        (A + "rate = 60", "rate of key a is a number per second, minute or hour"),
        (A + "concurrency = true", "concurrency of key a is a number of choices from 1 on, not True"),
        (A + "tokens_per_day = 1e6", "tokens_per_day of key a is a number of tokens from 1 on"),
        (A + f"tokens_per_minute = 0x{'f' * 9999}", "tokens_per_minute of key a is a number"),
        (A + f"concurrency = {'9' * 9999}", "is not TOML"),
        (A + f"rate = '{'9' * 9999}'", "rate of key a is a number per second"),
        ("a = " + "[" * 9999, "is not TOML of keys: it is nested too deeply"),
        ("#" * (key_file.MAX_BYTES + 1), "is larger than 1048576 bytes"),
        (A + "admin = 'yes'", "admin of key a is true or false, not 'yes'"),
        (A.replace("a", "'a b'", 1), "a key's name is up to 64 letters"),
        (A + A.replace("a", "b", 1), "two keys of"),
    ],
)
def test_errors_of_bad_files_name_place_and_reason(text: str, message: str, keys: Keys) -> None:
    keys.file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadKeys) as raised:
        key_file.read(keys.file)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < len(str(keys.file)) + 300


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_file_that_root_changes_stays_its_owners(keys: Keys) -> None:
    keys.make("old")
    os.chown(keys.file, 1234, 5678)
    keys.make("new")
    assert keys.run("old", "--remove")[0] == 0
    assert (keys.file.stat().st_uid, keys.file.stat().st_gid) == (1234, 5678)


def test_missing_file(tmp_path: Path) -> None:
    refuses("cannot be read: No such file", Access, None, tmp_path / "keys.toml")


def test_changes_of_the_file_are_taken_up_and_bad_ones_are_not(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    old = keys.make("old", "--concurrency", "1")
    watched = Access(None, keys.file)
    key_usage = watched.key_usage(header(old))
    assert key_usage is not None
    key_usage.begin()

    new = keys.make("new")
    assert watched.key_usage(header(new)) is None
    look(watched)
    assert watched.key_usage(header(new)) is not None
    assert watched.key_usage(header(old)) is key_usage

    with caplog.at_level(logging.ERROR):
        for bad in ("[old", ""):
            keys.file.write_text(bad)
            look(watched)
            look(watched)
        keys.file.unlink()
        look(watched)
    said = [record.getMessage().partition(": ")[0] for record in caplog.records[1:]]
    assert said == ["the API keys stay as they were"] * 3
    assert watched.key_usage(header(old)) is key_usage
    assert not watched.open

    keys.make("third")
    look(watched)
    assert watched.key_usage(header(old)) is None
    assert watched.key_usage(header(new)) is None
    key_usage.end(1)


def test_a_replaced_link_is_a_change(keys: Keys, tmp_path: Path) -> None:
    """Kubernetes renews a secret so."""
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(replace(keys, file=tmp_path / name / "keys.toml").make(name))
    link = tmp_path / "now"
    link.symlink_to("one")
    watched = Access(None, link / "keys.toml")
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    look(watched)
    assert [watched.key_usage(header(key)) is not None for key in made] == [False, True]


def a_pipe(file: Path) -> None:
    os.mkfifo(file)


BROKEN = {
    "a folder": Path.mkdir,
    "a pipe": a_pipe,
    "no UTF-8": lambda file: file.write_bytes(b"\xff"),
    "10 MB, nested": lambda file: file.write_text("a = " + "[" * 10**7),
    "nested": lambda file: file.write_text("a = " + "[" * 10**5),
    "a link to itself": lambda file: file.symlink_to(file),
    "a number of thousands of digits": lambda file: file.write_text(f"[a]\nrate = {'9' * 9999}"),
    "a file of another's": lambda file: (file.touch(), file.chmod(0)),
}


@pytest.mark.parametrize("how", BROKEN)
@in_loop
async def test_a_broken_file_never_ends_the_watch(
    how: str, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "POLL_SECONDS", 0.01)
    old, aside = keys.make("old"), replace(keys, file=tmp_path / "aside.toml")
    new = aside.make("new")
    watched = Access(None, keys.file)
    task = asyncio.create_task(watched.watch())
    async with asyncio.timeout(20):
        keys.file.unlink()
        BROKEN[how](keys.file)
        while "stay as they were" not in caplog.text:
            await asyncio.sleep(0.01)
        assert watched.key_usage(header(old)) is not None
        keys.file.rename(tmp_path / "away")
        aside.file.rename(keys.file)
        while watched.key_usage(header(new)) is None:
            await asyncio.sleep(0.01)
    task.cancel()
    assert watched.key_usage(header(old)) is None
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert all("the API keys stay as they were: " in error for error in errors)
    assert max(map(len, errors)) < len(str(keys.file)) + 300


def test_an_unexpected_error_does_not_end_the_watch(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = keys.make("old")
    watched = Access(None, keys.file)
    keys.make("new")
    monkeypatch.setattr(key_file, "read", lambda path: 1 / 0)
    look(watched)
    assert watched.key_usage(header(old)) is not None
    assert "ZeroDivisionError" in caplog.text


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    """Each reads the file, adds its table, and replaces it."""
    file, count = tmp_path / "keys.toml", 12
    code = (
        "import sys; from pathlib import Path; from outrider.server.http.keys import key_file; sys.stdin.read(1)\n"
        "for i in range(4): key_file.add(Path(sys.argv[1]), "
        "key_file.Key(name=f'{sys.argv[2]}-{i}', digest=key_file.digest(f'{sys.argv[2]}-{i}'.encode())))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(file), f"k{number}"], stdin=subprocess.PIPE)
        for number in range(count // 4)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(60) for process in started] == [0] * len(started)
    assert len(key_file.read(file)) == count


def test_keys_are_listed_without_secrets_and_taken_back(keys: Keys) -> None:
    made = [
        keys.make("team-a", "--tokens-per-minute", "100000", "--tokens-per-day", "5000000"),
        keys.make("list", "--rate", "60/minute", "--max-tokens-per-request", "512"),
        keys.make("team-ab", "--admin"),
    ]
    by_hand = keys.file.read_text().replace("[list]", "# the list\n['list'] # ours") + "\n# the end\n"
    keys.file.write_text(by_hand)
    code, printed = keys.run("--list")
    assert code == 0
    assert [line.split() for line in printed.splitlines()[1:]] == [
        ["team-a", "-", "-", "100000", "5000000", "-", "-"],
        ["list", "60/minute", "-", "-", "-", "512", "-"],
        ["team-ab", "-", "-", "-", "-", "-", "yes"],
    ]
    assert not [key for key in key_file.read(keys.file) if key.digest.hex() in printed]
    assert keys.run("team-a", "--remove")[0] == 0
    assert [key.name for key in key_file.read(keys.file)] == ["list", "team-ab"]
    assert keys.file.read_text() == by_hand[by_hand.index("# the list") :]
    watched = Access(None, keys.file)
    assert [watched.key_usage(header(key)) is None for key in made] == [True, False, False]


def test_a_table_in_another_style_is_not_edited(keys: Keys) -> None:
    text = f"a.sha256 = '{DIGEST}'\n[b]\nsha256 = '{'cd' * 32}'\n"
    keys.file.write_text(text)
    code, printed = keys.run("a", "--remove")
    assert code == 1
    assert "remove it from" in printed
    assert keys.file.read_text() == text


def test_a_link_to_the_file_stays_one(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    keys.file.symlink_to(tmp_path / "real" / "keys.toml")
    for name in ("one", "two"):
        keys.make(name)
    assert keys.file.is_symlink()
    assert [key.name for key in key_file.read(keys.file)] == ["one", "two"]
