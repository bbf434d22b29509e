"""The file of the keys' usage of the day."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refuses

from outrider.server.http.keys import usage_file
from outrider.server.http.keys.access import Access
from outrider.server.http.keys.token_limits import DAY_SECONDS
from outrider.server.http.keys.usage_file import UsageFile


@dataclass
class Time:
    """A stopped clock. now: seconds since 1970."""

    now: float = 20000 * DAY_SECONDS + 3600.0

    def __call__(self) -> float:
        return self.now


def keys_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text("".join(f"[{name}]\nsha256 = '{name * 64}'\n" for name in "ab"))
    return path


def used(access: Access) -> dict[str, int]:
    return access.used_today()[1]


def test_usage_of_the_day_outlives_a_restart(tmp_path: Path) -> None:
    time, path = Time(), tmp_path / "folder" / "usage.json"

    def started() -> tuple[UsageFile, Access]:
        kept = UsageFile(path)
        day = int(time.now // DAY_SECONDS)
        return kept, Access(None, keys_file(tmp_path), clock=time, used=kept.used_on(day))

    kept, access = started()
    access._key_usages[1].take(70)
    kept.write(access.used_today())
    refuses(r"another server keeps its usage in .* --usage-file", UsageFile, path)
    access._key_usages[1].take(1)
    kept.close(access)
    kept, access = started()
    assert used(access) == {"b": 71}
    kept.close(access)
    time.now -= 3 * DAY_SECONDS  # setting the clock back gains no tokens
    kept, access = started()
    assert used(access) == {"b": 71}
    kept.write(access.used_today())
    assert '"b": 71' in path.read_text()
    kept.close(access)
    time.now += DAY_SECONDS
    kept, access = started()
    assert used(access) == {}
    kept.close(access)


def test_a_key_that_returns_has_its_usage_of_the_day(tmp_path: Path) -> None:
    """A replaced key is removed and added under the same name."""
    time = Time()
    access = Access(None, file := keys_file(tmp_path), clock=time)
    text = file.read_text()
    access._key_usages[1].take(70)

    def changed(content: str) -> dict[str, int]:
        file.write_text(content)
        asyncio.run(access.reload_if_changed())
        return used(access)

    without = text[: text.index("[b]")]
    assert changed(without) == changed(text) == {"b": 70}
    assert access._key_usages[1].day.taken(time.now) == 70

    day = int(time.now // DAY_SECONDS)
    file.write_text(without)
    access = Access(None, file, clock=time, used={"b": 70})
    assert access.used_today() == (day, {"b": 70})  # its file of usage still says so
    time.now += DAY_SECONDS
    assert used(access) == changed(text) == {}


def test_a_file_of_usage_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.json"
    for text in ("", "[]", '{"day": "x", "tokens": {}}', '{"day": "2026-01-01", "tokens": {"a": -1}}', "[" * 99999):
        path.write_text(text)
        refuses("is no file of usage, or damaged; remove it", usage_file.read, path)
    path.unlink()
    refuses("cannot write", UsageFile, Path("/proc/none/usage.json"))

    kept, access = UsageFile(path), Access(None, keys_file(tmp_path), clock=Time())
    path.mkdir()  # a folder cannot be replaced
    for tokens in (1, 2):
        access._key_usages[0].take(tokens)
        kept.write(access.used_today())
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # logged once
    path.rmdir()
    kept.write(access.used_today())
    assert usage_file.read(path)[1] == {"a": 3}
    kept.close(access)
