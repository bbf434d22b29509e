"""The result of a check."""

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """WARNING: a server runs, but not as well as it could. PROBLEM: it does not start or does not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """subject: the checked thing, in one or two words. remedy: advice, empty only if the status is OK."""

    subject: str
    status: Status
    message: str
    remedy: str = ""


def ok(subject: str, message: str) -> Finding:
    return Finding(subject, Status.OK, message)


def warning(subject: str, message: str, remedy: str) -> Finding:
    return Finding(subject, Status.WARNING, message, remedy)


def problem(subject: str, message: str, remedy: str) -> Finding:
    return Finding(subject, Status.PROBLEM, message, remedy)
