"""Check this installation, and give a remedy for each problem.

Takes the flags of `outrider serve` and checks everything that a server with these flags needs. Starts no server, but
compiles the kernels if that is not done yet. Prints a line for each check, with the remedy; the exit code is 1 if there
is a problem.

examples:
  outrider doctor
  outrider doctor --model ./Qwen3-4B --port 8000 --json
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from ..doctor import installation
from ..doctor.finding import Finding, Status, problem
from ..errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    try:
        from . import serve
    except ImportError:  # a package is missing; `run` reports it
        parser.epilog = "Packages are missing: only --json is understood until they are there."
    else:
        serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; returns 1 if there is a problem."""
    findings = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json:
            _print(finding)
    count = {status: sum(finding.status is status for finding in findings) for status in Status}
    problems = count[Status.PROBLEM]
    if args.json:
        listed = [asdict(finding) | {"status": finding.status.value} for finding in findings]
        print(json.dumps({"ok": not problems, "findings": listed}, indent=1))
    else:
        print(f"\n{problems} problems, {count[Status.WARNING]} warnings")
    return 1 if problems else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks, the slowest last. Skips checks that need a missing package."""
    yield from installation.python()
    packages = list(_guarded("packages", installation.packages))
    yield from packages
    if any(finding.status is Status.PROBLEM for finding in packages):
        return
    from ..doctor import machine, plugin, serving
    from ..settings.flags import served_settings_of

    for subject, check in (
        ("processors", machine.processors),
        ("cache", machine.cache),
        ("temporary", machine.temporary),
    ):
        yield from _guarded(subject, check)
    try:
        settings = served_settings_of(args)
    except UserError as error:
        yield problem("flags", str(error), "see `outrider serve --help`")
        return
    loading = plugin.start()
    yield from _guarded("gpu", lambda: machine.gpu(settings))
    if settings.resolved_device == "cpu":
        yield from _guarded("kernels", installation.kernels)
    yield from _guarded("model", lambda: serving.examine(settings))
    yield from _guarded("plugin", lambda: plugin.finding(loading))


def _guarded(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check. An exception in it counts as a problem."""
    try:
        yield from check()
    except Exception as error:
        yield problem(subject, f"it could not be examined: {error!r}", "report it, with `outrider version`")


def _print(finding: Finding) -> None:
    print(f"{finding.status.value.upper():8} {finding.subject:13} {finding.message}", flush=True)
    if finding.remedy:
        print(f"{'':22} → {finding.remedy}", flush=True)
