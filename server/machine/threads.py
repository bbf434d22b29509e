"""Threads of an engine: their number, how long they spin for each other, and the cores that they are bound to.

Most of it is the environment of the scheduler's process, as its OpenMP runtime (GNU's, which torch comes with) reads it
when it is loaded. The user's own variables win: OMP_PROC_BIND=false leaves the threads unbound.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .topology import Topology

SHARED_CORES = 4
"""Up to this number of cores, HTTP and detokenizer share them with the engine, see `default`."""
SPINS = 2000
"""Turns that a thread spins before it sleeps: longer than the gaps between a step's operations, and much shorter than
the time slice for which another process may take a thread's core."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def default(topology: Topology, environ: Mapping[str, str] = os.environ) -> int:
    """Return OMP_NUM_THREADS if set, else one per physical core, one core less where there are more than four.

    That core runs HTTP and detokenizer. On two cores they take a few per cent of a core's time, and more as steps get
    shorter. An engine waits for its slowest thread, so sharing a core costs it that much on every core: from about
    five cores on, more than giving one up.
    """
    wanted = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdigit() and int(wanted):
        return int(wanted)
    cores = topology.usable_cores
    return cores if cores <= SHARED_CORES else cores - 1


@dataclass(frozen=True, slots=True)
class Placement:
    """Environment and processors of a scheduler's process.

    environment: variables. main: processors of its main thread and of all unbound threads; empty: as the user's own
    variables say.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    main: frozenset[int] = frozenset()

    def apply(self) -> None:
        """Apply it in the process, after its OpenMP runtime has bound the main thread to the first place.

        Python's threads, the compiler of grammars among them, begin where the main thread runs, and there it would wait
        for them.
        """
        if self.main:
            os.sched_setaffinity(0, self.main)


def place(threads: int, topology: Topology, *, bind: bool, environ: Mapping[str, str] = os.environ) -> Placement:
    """Return the placement of `threads` threads on the cores of `topology`.

    bind: to a core each, but only where a core is left and no quota takes them all away at times: a bound thread cannot
    go elsewhere when something else takes its core.
    """
    environment = {"OMP_NUM_THREADS": str(threads)}
    if not any(name in environ for name in _WAITING):
        environment["GOMP_SPINCOUNT"] = str(SPINS)
    roomy = topology.quota is None and threads < len(topology.cores)
    if any(name in environ for name in _BINDING):
        return Placement(environment)
    if not bind or not roomy:
        return Placement(environment, frozenset(topology.cpus))
    bound = topology.cores[:threads]
    environment |= {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(f"{{{core.cpus[0]}}}" for core in bound)}
    return Placement(environment, frozenset(topology.cpus) - {cpu for core in bound[1:] for cpu in core.cpus})


@contextlib.contextmanager
def child_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started inside have these variables."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
