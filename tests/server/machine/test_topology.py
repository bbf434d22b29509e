"""Processors by Linux's file trees of each kind of machine."""

import os
from pathlib import Path

import pytest
from refusals import refuses

from outrider.server.errors import UserError
from outrider.server.machine import topology
from outrider.server.machine.topology import Core, Topology
from outrider.server.settings.settings import Settings

CPU = "sys/devices/system/cpu/cpu{}/topology/{}"
NODE = "sys/devices/system/node/node{}/cpulist"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def machine(cores: int, nodes: int, *, smt: bool, siblings: str = "core_cpus_list") -> dict[str, str]:
    """Hardware threads as Linux numbers them: one of each core, node by node, then the second ones."""
    per_node = cores // nodes
    files = {}
    for core in range(cores):
        both = f"{core},{core + cores}" if smt else str(core)
        for cpu in (core, core + cores)[: 1 + smt]:
            files[CPU.format(cpu, siblings)] = both
    for node in range(nodes):
        first = node * per_node
        ranges = [f"{first}-{first + per_node - 1}"]
        if smt:
            ranges.append(f"{first + cores}-{first + cores + per_node - 1}")
        files[NODE.format(node)] = ",".join(ranges)
    return files


def test_this_machine() -> None:
    here = topology.here()
    assert set(here.cpus) == os.sched_getaffinity(0)
    assert 1 <= here.usable_cores <= len(here.cores)


def test_a_virtual_machine_of_two_cores(tmp_path: Path) -> None:
    processors = topology.read(tree(tmp_path, machine(2, 1, smt=False)), {0, 1})
    assert processors.cores == (Core(0, (0,)), Core(0, (1,)))
    assert processors.usable_cores == 2


@pytest.mark.parametrize("siblings", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_share_a_core(tmp_path: Path, siblings: str) -> None:
    processors = topology.read(tree(tmp_path, machine(4, 1, smt=True, siblings=siblings)), set(range(8)))
    assert [core.cpus for core in processors.cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert processors.cpus == tuple(range(8))
    assert processors.usable_cores == 4


def test_two_sockets(tmp_path: Path) -> None:
    processors = topology.read(tree(tmp_path, machine(64, 2, smt=True)), set(range(128)))
    assert [core.node for core in processors.cores] == [0] * 32 + [1] * 32
    assert processors.cores[32] == Core(1, (32, 96))


def test_only_allowed_processors_count(tmp_path: Path) -> None:
    """taskset or a container's cpuset limits the processors."""
    processors = topology.read(tree(tmp_path, machine(8, 2, smt=True)), {1, 2, 10, 7})
    assert processors.cores == (Core(0, (1,)), Core(0, (2, 10)), Core(1, (7,)))


@pytest.mark.parametrize(
    ("files", "quota", "usable"),
    [
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "150000 100000"}, 1.5, 1),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "50000 100000"}, 0.5, 1),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, None, 8),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "1600000 100000"}, 16.0, 8),
        # a group above limits: a pod's, or a slice's
        ({"proc/self/cgroup": "0::/pod.slice/server.scope", f"{V2}/pod.slice/cpu.max": "300000 100000",
          f"{V2}/pod.slice/server.scope/cpu.max": "max 100000"}, 3.0, 3),
        ({"proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n0::/", f"{V1}/job/cpu.cfs_quota_us": "250000",
          f"{V1}/job/cpu.cfs_period_us": "100000", f"{V1}/cpu.cfs_quota_us": "-1",
          f"{V1}/cpu.cfs_period_us": "100000"}, 2.5, 2),
        # in a version 1 container the path is the host's
        ({"proc/self/cgroup": "3:cpu,cpuacct:/docker/0123abcd", f"{V1}/cpu.cfs_quota_us": "400000",
          f"{V1}/cpu.cfs_period_us": "100000"}, 4.0, 4),
    ],
)  # fmt: skip
def test_quota_of_a_container(tmp_path: Path, files: dict[str, str], quota: float | None, usable: int) -> None:
    processors = topology.read(tree(tmp_path, machine(8, 1, smt=True) | files), set(range(16)))
    assert processors.quota == quota
    assert processors.usable_cores == usable


def test_without_sys_every_processor_is_a_core(tmp_path: Path) -> None:
    assert topology.read(tmp_path, {0, 3}).cores == (Core(0, (0,)), Core(0, (3,)))


def test_engines_get_a_node_each_or_even_parts() -> None:
    def cpus(parts: tuple[Topology, ...]) -> list[tuple[int, ...]]:
        return [part.cpus for part in parts]

    two_nodes = Topology((Core(0, (0,)), Core(0, (1,)), Core(0, (2,)), Core(1, (3,))), quota=3.0)
    assert two_nodes.nodes == 2
    assert cpus(two_nodes.split(2)) == [(0, 1, 2), (3,)]
    assert [part.quota for part in two_nodes.split(2)] == [1.5, 1.5]
    assert cpus(two_nodes.split(1)) == [(0, 1, 2, 3)]
    assert cpus(two_nodes.split(3)) == [(0,), (1,), (2, 3)]
    assert cpus(Topology(tuple(Core(0, (i, i + 4)) for i in range(4))).split(2)) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=f"4 cores cannot be split into {wrong} parts"):
            two_nodes.split(wrong)


def test_engines_and_their_threads_are_checked() -> None:
    cores = len(topology.here().cores)
    refuses(f"--engines is a number from 1 to {cores}, not {cores + 1}", Settings, device="cpu", engines=cores + 1)
    each = Settings(device="cpu", engines=cores)
    assert each.resolved_engines == cores
    with pytest.raises(UserError, match="--threads is a number from 1 to"):
        Settings(device="cpu", engines=cores, threads=len(topology.here().cpus) + 1)
    assert Settings(device="cpu").resolved_engines == topology.here().nodes
    assert Settings(device="cpu", sglang_flags=("--tp-size", "2")).resolved_engines == 1
