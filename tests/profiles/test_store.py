"""Profiles are saved whole, found by their fingerprint, refused with the reason, and drawn."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from profile_samples import HERE, profile

from outrider.profiles import store
from outrider.profiles.store import ProfileError


def test_saved_profiles_are_read(tmp_path: Path) -> None:
    saved = store.save(profile(), tmp_path, {"temperatures": [1.0]})
    back = store.load("epyc", HERE, [tmp_path])
    assert back == saved == replace(profile(), folder=tmp_path / "epyc")
    assert json.loads(back.calibration.read_text()) == {"temperatures": [1.0]}
    assert back.cost().points == profile().points
    assert sorted(path.name for path in (tmp_path / "epyc").iterdir()) == ["calibration.json", "profile.json"]


def test_saving_again_replaces_it_and_a_calibration_that_no_longer_holds(tmp_path: Path) -> None:
    store.save(profile(), tmp_path, {"temperatures": [1.0]})
    again = store.save(replace(profile(), measured_how="by hand"), tmp_path, None)
    assert again.calibration is None
    assert store.locate("epyc", [tmp_path]).measured_how == "by hand"


@pytest.mark.parametrize("wanted", ["epyc", "PATH", "PATH/profile.json"])
def test_a_profile_is_named_by_name_or_path(tmp_path: Path, wanted: str) -> None:
    store.save(profile(), tmp_path, None)
    wanted = wanted.replace("PATH", str(tmp_path / "epyc"))
    assert store.load(wanted, HERE, [tmp_path]).name == "epyc"


def test_a_profile_of_another_engine_is_refused_naming_every_difference(tmp_path: Path) -> None:
    store.save(profile(), tmp_path, None)
    here = replace(HERE, device="Intel Xeon", gamma=5, instruction_set="none")
    with pytest.raises(ProfileError) as error:
        store.load("epyc", here, [tmp_path])
    message = str(error.value)
    assert "device: 'AMD EPYC (family 25, model 17, stepping 1)', here 'Intel Xeon'" in message
    assert "gamma: 7, here 5" in message
    assert "instruction_set: 'avx512bf16', here 'none'" in message
    assert message.count(", here ") == 3
    assert "outrider tune" in message


def test_every_field_of_a_fingerprint_counts() -> None:
    for name, value in HERE.to_json().items():
        changed = replace(HERE, **{name: value * 2})
        assert len(HERE.differences(changed)) == 1
        assert HERE.differences(changed)[0].startswith(f"{name}: ")


def test_the_users_profiles_come_before_the_shipped_and_the_latest_first(tmp_path: Path) -> None:
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    store.save(profile("shipped", measured_at="2026-09-01T00:00:00Z"), shipped, None)
    assert store.find(HERE, [user, shipped]).name == "shipped"
    store.save(profile("old"), user, None)
    store.save(profile("new", measured_at="2026-02-01T00:00:00Z"), user, None)
    store.save(profile("other", replace(HERE, gamma=3), "2026-03-01T00:00:00Z"), user, None)
    assert store.find(HERE, [user, shipped]).name == "new"
    assert store.find(replace(HERE, gamma=3), [user, shipped]).name == "other"
    assert store.find(replace(HERE, gamma=4), [user, shipped]) is None


def test_a_damaged_profile_does_not_hide_a_good_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.save(profile("good"), tmp_path, None)
    store.save(profile("torn"), tmp_path, None)
    (tmp_path / "torn" / "profile.json").write_text('{"schema": 1, "poi')
    assert store.find(HERE, [tmp_path]).name == "good"
    assert "torn" in caplog.text
    assert "is damaged" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: text.replace('"schema": 3', '"schema": 1'), "schema 1, this version of Outrider reads 3"),
        (lambda text: text.replace('"points"', '"dots"'), "lacks 'points'"),
        (lambda text: text.replace('"gamma"', '"gamna"'), "unexpected keyword argument 'gamna'"),
        (lambda text: text.replace('"tokens": 8', '"tokens": -8'), "tokens >= requests"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_reason(tmp_path: Path, change, reason: str) -> None:
    store.save(profile(), tmp_path, None)
    path = tmp_path / "epyc" / "profile.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ProfileError, match=reason) as error:
        store.load("epyc", HERE, [tmp_path])
    assert "outrider tune" in str(error.value)
    assert str(path) in str(error.value)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    store.save(profile("a"), tmp_path, None)
    store.save(profile("b"), tmp_path, None)
    with pytest.raises(ProfileError, match="no profile nowhere; known are a, b"):
        store.load("nowhere", HERE, [tmp_path, tmp_path / "missing"])
    with pytest.raises(ProfileError, match=r"has no profile\.json"):
        store.load(str(tmp_path), HERE, [])
    with pytest.raises(ProfileError, match="known are none"):
        store.load("nowhere", HERE, [])


def test_a_folder_of_the_same_name_does_not_hide_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "epyc").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    store.save(profile(), tmp_path, None)
    assert store.load("epyc", HERE, [tmp_path]).folder == tmp_path / "epyc"


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b"])
def test_names_that_are_no_folder_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError, match="letters, digits"):
        store.save(profile(name), tmp_path, None)


def save_forever(root: Path) -> None:
    for count in range(10**9):
        store.save(replace(profile(), measured_how=f"round {count}"), root, {"round": count})


def test_a_kill_while_saving_leaves_a_whole_profile(tmp_path: Path) -> None:
    """Saving repeats without end and is killed at a random moment."""
    store.save(profile(), tmp_path, {})
    for _ in range(3):
        process = multiprocessing.get_context("fork").Process(target=save_forever, args=(tmp_path,))
        process.start()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            loaded = store.load("epyc", HERE, [tmp_path])
            json.loads(loaded.calibration.read_text())
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert store.load("epyc", HERE, [tmp_path]).measured_how.startswith("round")


def save_on_a_full_disk(root: Path, room: int) -> None:
    """Exits with 0 if saving fails as on a full disk; no file may exceed `room`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    try:
        store.save(replace(profile(), measured_how="another"), root, {"calibration": "x" * 200})
    except OSError as error:
        sys.exit(0 if error.errno == errno.EFBIG else 1)
    sys.exit(1)


@pytest.mark.parametrize("room", [0, 100, 1000])
def test_a_full_disk_leaves_the_former_profile(tmp_path: Path, room: int) -> None:
    """There is room for no file, for a part of the first, or for the first."""
    store.save(profile(), tmp_path, {"calibration": "old"})
    process = multiprocessing.get_context("fork").Process(target=save_on_a_full_disk, args=(tmp_path, room))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    loaded = store.load("epyc", HERE, [tmp_path])
    assert loaded.measured_how == profile().measured_how
    assert json.loads(loaded.calibration.read_text()) == {"calibration": "old"}
    assert sorted(path.name for path in loaded.folder.iterdir()) == [store.CALIBRATION, store.PROFILE]
