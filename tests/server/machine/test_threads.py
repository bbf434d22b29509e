"""An engine's threads, and their cores."""

import json
import os
import subprocess
import sys

import pytest
from refusals import refuses

from outrider.server.machine import threads, topology
from outrider.server.machine.topology import Core, Topology
from outrider.server.settings.settings import Settings


def cores(count: int, *, smt: bool = False) -> tuple[Core, ...]:
    return tuple(Core(0, (i, i + count) if smt else (i,)) for i in range(count))


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (Topology(cores(1)), 1),
        (Topology(cores(2)), 2),
        (Topology(cores(4, smt=True)), 4),
        (Topology(cores(5)), 4),
        (Topology(cores(32, smt=True)), 31),
        (Topology(cores(32), quota=1.5), 1),
        (Topology(cores(32), quota=8.0), 7),
    ],
)
def test_one_thread_per_core_not_needed_elsewhere(here: Topology, expected: int) -> None:
    assert threads.default(here, {}) == expected


@pytest.mark.parametrize(("value", "expected"), [("3", 3), ("3,1", 3), ("", 2), ("0", 2), ("many", 2)])
def test_openmps_own_variable_is_the_default(value: str, expected: int) -> None:
    assert threads.default(Topology(cores(2)), {"OMP_NUM_THREADS": value}) == expected


def test_requested_threads() -> None:
    available = len(topology.here().cpus)
    assert Settings(device="cpu", threads=available).resolved_threads == available
    for wrong in (0, available + 1):
        refuses(f"--threads is a number from 1 to {available}, not {wrong}", Settings, device="cpu", threads=wrong)


def test_threads_get_cores_of_their_own_where_one_is_left() -> None:
    placed = threads.place(3, Topology(cores(4, smt=True)), bind=True, environ={})
    assert placed.environment["OMP_PLACES"] == "{0},{1},{2}"
    assert placed.environment["OMP_PROC_BIND"] == "true"
    assert placed.main == {0, 4, 3, 7}  # neither with another bound thread nor on its core


@pytest.mark.parametrize(
    ("here", "bind", "environ"),
    [
        (Topology(cores(3)), True, {}),
        (Topology(cores(8), quota=6.0), True, {}),
        (Topology(cores(8)), False, {}),
        (Topology(cores(8)), True, {"OMP_PROC_BIND": "false"}),
        (Topology(cores(8)), True, {"GOMP_CPU_AFFINITY": "0-3"}),
    ],
)
def test_threads_that_stay_unbound(here: Topology, bind: bool, environ: dict[str, str]) -> None:
    placed = threads.place(3, here, bind=bind, environ=environ)
    assert placed.main == (frozenset() if environ else frozenset(here.cpus))  # the user's own variables win
    assert not placed.environment.keys() & {"OMP_PROC_BIND", "OMP_PLACES"}
    assert placed.environment["OMP_NUM_THREADS"] == "3"


def test_the_users_wait_policy_is_kept() -> None:
    here = Topology(cores(2))
    assert "GOMP_SPINCOUNT" in threads.place(2, here, bind=True, environ={}).environment
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        assert "GOMP_SPINCOUNT" not in threads.place(2, here, bind=True, environ={name: "1"}).environment


AFFINITY = """
import json, os, sys, torch
from outrider.server.machine.threads import Placement
before = os.sched_getaffinity(0)
Placement({}, frozenset(json.loads(sys.argv[1]))).apply()
torch.ones(1 << 22).add_(1)
found = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
print(json.dumps([sorted(before), sorted(os.sched_getaffinity(0)), found, torch.get_num_threads()]))
"""


@pytest.mark.skipif(len(topology.here().cpus) < 2, reason="needs two processors")
def test_openmp_binds_its_threads_and_leaves_the_main_one_to_us() -> None:
    """GNU OpenMP's second thread stays on its core when the main one is moved."""
    first, second = topology.here().cpus[:2]
    pretended = Topology((Core(0, (first,)), Core(0, (second,)), Core(0, (10**4,))))
    placed = threads.place(2, pretended, bind=True, environ={})
    with threads.child_environment(placed.environment):
        done = subprocess.run(
            [sys.executable, "-c", AFFINITY, json.dumps([first, second])], capture_output=True, text=True, check=True
        )
    assert "OMP_PLACES" not in os.environ
    before, main, other_cores, count = json.loads(done.stdout)
    assert before == [first]
    assert main == [first, second]
    assert [second] in other_cores
    assert count == 2
