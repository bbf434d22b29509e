"""Prefill and decode in servers of their own: SGLang's flags for it, known before SGLang is loaded.

SGLang calls it PD disaggregation: a prefill server reads prompts and sends their keys and values to a decode server,
which writes the answers; a router in front sends each request to both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import UserError
from .parallel import FlagParser

TOGETHER = "leave --disaggregation-mode out"
ROLES = ("prefill", "decode")
BACKENDS = ("mooncake_tcp", "mooncake")
"""SGLang's names of its transfers over TCP and by RDMA."""
PACKAGE = "mooncake"
INSTALL = "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 (and Debian's libibverbs1)"


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """role: "prefill", "decode", or "" where one server does both. backend: SGLang's name of the transfer.
    others: the flags that say something else."""

    role: str = ""
    backend: str = ""
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, flags: Sequence[str]) -> Disaggregation:
        """Read them among SGLang's flags; raises UserError for what cannot be."""
        known, others = _PARSER.parse_known_args(list(flags))
        role = "" if known.role == "null" else known.role
        if role and known.backend not in BACKENDS:
            raise UserError(
                f"--disaggregation-mode {role} goes with --disaggregation-transfer-backend {' or '.join(BACKENDS)}, "
                f"not {known.backend}: of others it is not checked whether two servers fit together"
            )
        return cls(role, known.backend, tuple(others))

    def check(self, needs_one_server: Mapping[str, bool]) -> None:
        """Raise UserError where this cannot be one of two servers. needs_one_server: flags, and if they are given."""
        if not self.role:
            return
        if found := next((flag for flag, given in needs_one_server.items() if given), None):
            raise UserError(f"{found} needs prefill and decode in one server; leave out that, or --disaggregation-mode")
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError(f"--disaggregation-mode {self.role} needs a package that is not installed: {INSTALL}")


def _parser() -> FlagParser:
    parser = FlagParser(prog="SGLang", add_help=False, allow_abbrev=False)
    parser.add_argument("--disaggregation-mode", dest="role", choices=("null", *ROLES), default="null")
    parser.add_argument("--disaggregation-transfer-backend", dest="backend", default="mooncake")
    parser.add_argument("--disaggregation-bootstrap-port", type=int)
    return parser


_PARSER = _parser()
