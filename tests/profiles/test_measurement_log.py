"""A killed measurement resumes."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from profile_samples import HERE, POINTS

from outrider.profiles.measurement_log import PartialMeasurement
from outrider.scheduler.cost.step_times import Point


def add(partial: PartialMeasurement, *points: Point) -> None:
    for point in points:
        partial.add((point.requests, point.tokens, point.context), [point])


def measured(path: Path, count: int = 5) -> PartialMeasurement:
    partial = PartialMeasurement(path, HERE)
    add(partial, *POINTS[:count])
    return partial


def test_added_points_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "partial.jsonl"
    measured(path)
    again = PartialMeasurement(path, HERE)
    assert again.points == list(POINTS[:5])
    add(again, POINTS[5])
    assert PartialMeasurement(path, HERE).points == list(POINTS[:6])
    again.discard()
    assert not path.exists()
    assert PartialMeasurement(path, HERE).points == []


def test_a_shape_counts_whatever_its_points_are(tmp_path: Path) -> None:
    path, shape = tmp_path / "partial.jsonl", (1, 4, 128.0)
    partial = PartialMeasurement(path, HERE)
    for _ in range(2):
        partial.add(shape, POINTS[1:3])
    for again in (partial, PartialMeasurement(path, HERE)):
        assert again.points == [*POINTS[1:3]] * 2
        assert again.times == {shape: 2}


def test_the_time_that_it_took_is_there_too(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    partial = measured(path, 2)
    partial.spend(1.5)
    add(partial, POINTS[2])
    partial.spend(0.25)
    for _ in range(2):
        again = PartialMeasurement(path, HERE)
        assert (again.seconds, again.points) == (1.75, list(POINTS[:3]))


@pytest.mark.parametrize("cut", [1, 2, 10, 60])
def test_a_torn_last_line_costs_that_point_only_and_is_not_appended_to(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "partial.jsonl"
    measured(path)
    path.write_bytes(path.read_bytes()[:-cut])
    again = PartialMeasurement(path, HERE)
    assert again.points == list(POINTS[:4])
    add(again, POINTS[7])
    assert PartialMeasurement(path, HERE).points == [*POINTS[:4], POINTS[7]]


def test_every_length_of_a_torn_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    measured(path, 3)
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole, 1) if byte == ord("\n")]
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends)
        assert PartialMeasurement(path, HERE).points == list(POINTS[: max(complete - 1, 0)])


def test_a_damaged_line_in_the_middle_costs_that_point_only(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    measured(path)
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = "\x00\x00 not JSON\n"
    path.write_text("".join(lines))
    assert PartialMeasurement(path, HERE).points == [POINTS[0], *POINTS[2:5]]


def test_a_measurement_of_another_engine_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    measured(path)
    other = PartialMeasurement(path, replace(HERE, threads=1))
    assert other.points == []
    add(other, POINTS[0])
    assert PartialMeasurement(path, replace(HERE, threads=1)).points == [POINTS[0]]


@pytest.mark.parametrize("header", ["garbage", "[]", '{"schema": 9}', "{}"])
def test_a_file_that_is_something_else_starts_anew(tmp_path: Path, header: str) -> None:
    path = tmp_path / "partial.jsonl"
    measured(path)
    path.write_text("\n".join([header, *path.read_text().splitlines()[1:], ""]))
    assert PartialMeasurement(path, HERE).points == []
    measured(path, 1)
    assert PartialMeasurement(path, HERE).points == [POINTS[0]]


def measure(path: Path, rounds: int) -> None:
    for _ in range(rounds):
        partial = PartialMeasurement(path, HERE)
        add(partial, *POINTS[:4])
        partial.discard()


def test_two_servers_that_measure_at_once_do_not_stop_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=measure, args=(tmp_path / "partial", 50)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    measure(tmp_path / "partial", 1)
    assert list(tmp_path.iterdir()) == []
