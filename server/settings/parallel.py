"""Spread a model over ranks, machines and servers: reads SGLang's own flags before SGLang is loaded.

SGLang calls a machine a node. Each node is started with the same flags except its `--node-rank`. The first node takes
the requests, and its first rank decides for all ranks (`plugin/decode/ranks.py`).

PD disaggregation is SGLang's name for prefill and decode in separate servers: one reads prompts and sends their keys
and values to the other, which writes the answers; a router sends each request to both.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from ..errors import UserError

TOGETHER = "leave --disaggregation-mode out"
BACKENDS = ("mooncake_tcp", "mooncake")
"""SGLang's names of its transfers over TCP and by RDMA."""
PACKAGE = "mooncake"
STEPLESS: dict[str, dict[str, Any]] = {
    "--constrained-json-disable-any-whitespace": {"action": "store_true"}, "--constrained-json-whitespace-pattern": {},
    "--log-requests": {"action": "store_true"}, "--log-level": {}, "--disaggregation-bootstrap-port": {"type": int},
}  # fmt: skip
"""SGLang's flags that change no step's time, so that a profile fits with and without them; argparse's options."""
INSTALL = "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 (and Debian's libibverbs1)"


@dataclass(frozen=True, slots=True)
class Parallel:
    """tp_size: tensor-parallel ranks of an engine, on all nodes together. node_rank: this node's number.

    dist_init_addr: HOST:PORT at which the nodes find each other, an address of node 0. role: "prefill", "decode", or ""
    for one server that does both. backend: SGLang's name of the transfer between them. others: all further flags.
    """

    tp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    role: str = ""
    backend: str = ""
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, flags: Sequence[str]) -> Parallel:
        """Read SGLang's flags. Raises UserError for a wrong one."""
        known, others = _PARSER.parse_known_args(list(flags))
        given = vars(known)
        del given["stepless"]
        given["role"] = given["role"].replace("null", "")
        parsed = cls(**given, others=tuple(others))
        parsed._check()
        return parsed

    def _check(self) -> None:
        if self.tp_size < 1:
            raise UserError(f"--tp-size is a number from 1, not {self.tp_size}")
        if self.nnodes < 1:
            raise UserError(f"--nnodes is a number from 1, not {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise UserError(f"--node-rank is a number from 0 to --nnodes - 1 = {self.nnodes - 1}, not {self.node_rank}")
        if self.tp_size % self.nnodes:
            raise UserError(
                f"--tp-size {self.tp_size} ranks cannot be spread evenly over --nnodes {self.nnodes}; "
                "a node has as many as any other, and at least one"
            )
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise UserError(
                f"--nnodes {self.nnodes} needs --dist-init-addr HOST:PORT: an address of node 0 that all nodes reach, "
                "and a free port there"
            )
        if self.dist_init_addr is not None:
            self.address  # noqa: B018  raises
        if self.role and self.backend not in BACKENDS:
            raise UserError(
                f"--disaggregation-mode {self.role} goes with --disaggregation-transfer-backend "
                f"{' or '.join(BACKENDS)}, not {self.backend}: with another backend, Outrider cannot check that two "
                "servers fit together"
            )

    def check_one_server(self, needs_one_server: Mapping[str, bool]) -> None:
        """Raise UserError if prefill and decode are separate but one of these flags is given (True)."""
        if not self.role:
            return
        if name := next((flag for flag, given in needs_one_server.items() if given), None):
            raise UserError(f"{name} needs prefill and decode in one server; leave out that, or --disaggregation-mode")
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError(f"--disaggregation-mode {self.role} needs a package that is not installed: {INSTALL}")

    @property
    def ranks_here(self) -> int:
        """Ranks of each engine on this node."""
        return self.tp_size // self.nnodes

    @property
    def leads(self) -> bool:
        """True if this node takes the requests."""
        return self.node_rank == 0

    @property
    def step_flags(self) -> tuple[str, ...]:
        """All flags that change a step's time; addresses of nodes do not."""
        sizes = (("--tp-size", self.tp_size), ("--nnodes", self.nnodes))
        return (*self.others, *(word for flag, size in sizes if size > 1 for word in (flag, str(size))))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `dist_init_addr`. Raises UserError for a malformed address."""
        host, _, port = (self.dist_init_addr or "").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise UserError(f"--dist-init-addr is HOST:PORT, like 192.168.0.2:25000, not {self.dist_init_addr!r}")
        return host, int(port)

    def interface(self) -> str | None:
        """Return the name of this machine's network interface that leads to node 0; None if it is unknown."""
        try:
            family, kind, _, _, target = socket.getaddrinfo(*self.address, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends no packet
                address = probe.getsockname()[0]
        except OSError:
            return None
        return interface_of(address, psutil.net_if_addrs())


def interface_of(address: str, interfaces: Mapping[str, Sequence[Any]]) -> str | None:
    """Return the interface with this address; None if unknown. interfaces: as psutil gives them."""
    return next((name for name, places in interfaces.items() if any(a.address == address for a in places)), None)


class SGLangParser(argparse.ArgumentParser):
    """A parser of the flags after `--`. Raises UserError for wrong ones."""

    def __init__(self) -> None:
        super().__init__(prog="SGLang", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"among the flags for SGLang: {message}")


_PARSER = SGLangParser()
_PARSER.add_argument("--tp-size", "--tensor-parallel-size", dest="tp_size", type=int, default=1)
_PARSER.add_argument("--nnodes", type=int, default=1)
_PARSER.add_argument("--node-rank", type=int, default=0)
_PARSER.add_argument("--dist-init-addr", "--nccl-init-addr", dest="dist_init_addr")
_PARSER.add_argument("--disaggregation-mode", dest="role", choices=("null", "prefill", "decode"), default="null")
_PARSER.add_argument("--disaggregation-transfer-backend", dest="backend", default="mooncake")
for flag, options in STEPLESS.items():
    _PARSER.add_argument(flag, dest="stepless", **options)
