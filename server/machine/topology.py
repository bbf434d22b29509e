"""The processors that this process may compute on: physical cores, their hardware threads, NUMA nodes, and a quota.

Read from Linux: `/sys/devices/system` (its ABI/stable/sysfs-devices-system-cpu), the process's affinity, which a
cgroup's cpuset narrows, and the bandwidth limit of its cgroups (cpu.max in version 2, cpu.cfs_quota_us in version 1).
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core. node: NUMA node that it belongs to. cpus: its hardware threads that may be used, ascending."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """cores: ordered by node, then by processor. quota: processors' worth of time; None: no limit."""

    cores: tuple[Core, ...]
    quota: float | None = None

    @property
    def cpus(self) -> tuple[int, ...]:
        """Hardware threads in ascending order."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def usable_cores(self) -> int:
        """Cores that can be kept busy: a quota of 1.5 processors keeps one busy. At least one."""
        return len(self.cores) if self.quota is None else max(1, min(len(self.cores), int(self.quota)))

    @property
    def nodes(self) -> int:
        """NUMA nodes that have cores here."""
        return len({core.node for core in self.cores})

    def split(self, parts: int) -> tuple[Topology, ...]:
        """Split into `parts` of neighbouring cores, each with its share of the quota.

        The parts are the NUMA nodes if there are as many, else equally large. Raises ValueError if there are fewer
        cores.
        """
        if not 1 <= parts <= len(self.cores):
            raise ValueError(f"{len(self.cores)} cores cannot be split into {parts} parts")
        quota = None if self.quota is None else self.quota / parts
        if parts == self.nodes:
            groups = [tuple(group) for _, group in itertools.groupby(self.cores, key=lambda core: core.node)]
        else:
            ends = [len(self.cores) * part // parts for part in range(parts + 1)]
            groups = [self.cores[start:end] for start, end in itertools.pairwise(ends)]
        return tuple(Topology(group, quota) for group in groups)


@functools.cache
def here() -> Topology:
    """Return the topology of this machine, for this process as it was started."""
    return read(Path("/"), os.sched_getaffinity(0))


def read(root: Path, affinity: Set[int]) -> Topology:
    """Read the topology. root: of the file system. affinity: processors that the process may run on.

    Where the kernel gives no information (a sandbox may have no /sys), each processor is taken for a core, all on node
    0, without a quota.
    """
    devices = root / "sys/devices/system"
    nodes = {
        cpu: int(path.name.removeprefix("node"))
        for path in (devices / "node").glob("node[0-9]*")
        for cpu in _numbers(path / "cpulist")
    }
    siblings: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(affinity):
        siblings.setdefault(_siblings(devices / f"cpu/cpu{cpu}/topology") or frozenset([cpu]), []).append(cpu)
    cores = [Core(nodes.get(cpus[0], 0), tuple(cpus)) for cpus in siblings.values()]
    limits = [limit for folder in _cgroups(root) if (limit := _limit(folder)) is not None]
    return Topology(tuple(sorted(cores, key=lambda core: (core.node, core.cpus))), min(limits, default=None))


def _siblings(folder: Path) -> frozenset[int]:
    """Return the hardware threads of a core; the file has another name before Linux 5.3."""
    return frozenset(_numbers(folder / "core_cpus_list") or _numbers(folder / "thread_siblings_list"))


def _numbers(path: Path) -> list[int]:
    """Return the numbers of a list like "0-3,8"; none where there is no such file."""
    numbers: list[int] = []
    for part in filter(None, _text(path).split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of the process's cgroups for the processor, and of their parents.

    Inside a container the path in /proc may be the host's, which is not there: the mount itself is then the cgroup.
    """
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = mount / controllers if controllers else mount
        if not base.is_dir():
            base = mount / "cpu"
        folder = base / path.lstrip("/")
        yield from (base, *(above for above in (folder, *folder.parents) if base in above.parents))


def _limit(folder: Path) -> float | None:
    """Return the processors' worth of time that a cgroup gets in each period."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():  # "max", "-1", or no such file
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
