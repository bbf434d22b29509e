"""The process that compiles grammars survives slow, large and deadly ones."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from small_grammars import nested_repeats, options, small_schema, with_options

from outrider.server.plugin.grammars import examine, worker
from outrider.server.plugin.grammars.examine import Examiner, GrammarOutcome, GrammarVerdict
from outrider.server.plugin.grammars.folder import GrammarFolder
from outrider.server.plugin.grammars.worker import READY, Compilations, CompileLimits, Job


@dataclass
class Kinds:
    """Acts as the kind of a job says."""

    def examine(self, kind: str, text: str, name: str) -> GrammarVerdict:
        if kind == "spin":
            while True:
                pass
        if kind == "sleep":
            time.sleep(60)
        if kind == "allocate":
            bytearray(1 << 40)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "fail":
            raise KeyError(text)
        return GrammarVerdict(GrammarOutcome.ACCEPTED, reason=text)


@contextmanager
def compilations(**limits: float) -> Iterator[Compilations]:
    made = Compilations(Kinds(), CompileLimits(**limits))
    try:
        yield made
    finally:
        made.end()


def verdicts(running: Compilations, count: int, seconds: float = 60) -> dict[int, dict[str, object]]:
    seen: dict[int, dict[str, object]] = {}
    deadline = time.monotonic() + seconds
    while len(seen) < count:
        assert time.monotonic() < deadline, seen
        pipes = running.pipes()
        ready, _, _ = select.select(list(pipes), [], [], 0.01)
        results = [*(running.finish(pipes[pipe]) for pipe in ready), *running.advance()]
        seen |= {result["number"]: result for result in results}
    return seen


def test_a_grammar_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "LEAST_USED", 0.0)
    with compilations(seconds=1) as running:
        running.add(Job(0, "spin", "", ""))
        verdict = verdicts(running, 1)[0]
        assert not running.pipes()
    assert (verdict["outcome"], verdict["reason"]) == ("costly", "takes longer than 1 s to compile; simplify it")


def test_each_end_has_its_verdict() -> None:
    ends = {
        "allocate": ("costly", "more than 256 MiB of memory"),
        "crash": ("costly", "cannot be compiled"),
        "fail": ("costly", "cannot be compiled"),
        "fine": ("accepted", "text"),
    }
    with compilations(seconds=60, places=5) as running:
        for number, kind in enumerate(ends):
            running.add(Job(number, kind, "text", "text"))
        seen = verdicts(running, len(ends))
        assert not running.pipes()
    for number, (outcome, reason) in enumerate(ends.values()):
        assert seen[number]["outcome"] == outcome, seen
        assert reason in str(seen[number]["reason"])


def test_a_grammar_without_a_core_may_be_retried() -> None:
    with compilations(seconds=0.5) as running:
        running.add(Job(0, "sleep", "", ""))
        assert verdicts(running, 1)[0]["outcome"] == "busy"


def test_slow_grammars_make_room_for_waiting_ones() -> None:
    with compilations(seconds=60, places=2, share=0.1) as running:
        for number in range(4):
            running.add(Job(number, "spin", "", ""))
        running.add(Job(4, "fine", "", ""))
        seen = verdicts(running, 4)
        assert seen.pop(4)["outcome"] == "accepted"
        assert {verdict["outcome"] for verdict in seen.values()} == {"busy"}
        assert set(seen) == {0, 1, 2}
        assert len(running.pipes()) == 1


def test_more_than_may_wait_are_refused_at_once() -> None:
    with compilations(places=1, waiting=2, share=60) as running:
        for number in range(6):
            running.add(Job(number, "spin", "", ""))
        seen = verdicts(running, 3, seconds=3)
    assert set(seen) == {3, 4, 5}
    assert {verdict["outcome"] for verdict in seen.values()} == {"busy"}


def test_a_withdrawn_grammar_ends_and_makes_room() -> None:
    with compilations(places=1, seconds=60, share=60) as running:
        for number, kind in enumerate(("spin", "spin", "fine")):
            running.add(Job(number, kind, "", ""))
        running.advance()
        running.withdraw(1)  # waiting
        running.withdraw(0)  # running
        running.withdraw(9)  # finished
        assert verdicts(running, 1)[2]["outcome"] == "accepted"


def test_a_copy_cannot_take_more_memory_than_it_may() -> None:
    program = f"""
from {worker.__name__} import *
limit(CompileLimits(memory=64 << 20))
bytearray(32 << 20)
try:
    bytearray(128 << 20)
except MemoryError:
    print("refused")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], env=_environment(), capture_output=True, text=True, check=True
    )
    assert run.stdout == "refused\n"


@pytest.fixture
def folder(tmp_path: Path) -> GrammarFolder:
    return with_options(GrammarFolder(tmp_path))


@pytest.mark.slow
def test_grammars_are_accepted_and_refused_with_the_reason(folder: GrammarFolder) -> None:
    examiner = Examiner.of(folder, options(), threads=1)

    def outcome(kind: str, text: str) -> GrammarVerdict:
        return examiner.examine(kind, text, text)

    assert outcome("json", small_schema("name")).outcome is GrammarOutcome.ACCEPTED
    assert outcome("json", '{"type": "object"}').outcome is GrammarOutcome.ACCEPTED
    assert outcome("regex", r"[0-9]{3}-[a-z]+").outcome is GrammarOutcome.ACCEPTED
    assert outcome("ebnf", 'root ::= "yes" | "no" root').outcome is GrammarOutcome.ACCEPTED
    content = {"type": "tag", "begin": "<a>", "end": "</a>", "content": {"type": "any_text"}}
    tag = json.dumps({"type": "structural_tag", "format": content})
    assert outcome("structural_tag", tag).outcome is GrammarOutcome.ACCEPTED
    assert outcome("regex", "").outcome is GrammarOutcome.ACCEPTED
    assert "no token to begin" in outcome("regex", "\u0006").reason  # no printable character
    invalid = {"ebnf": "root ::= (", "regex": "(", "json": '{"type": "objekt"}', "structural_tag": "{}"}
    for kind, text in invalid.items():
        assert outcome(kind, text).outcome is GrammarOutcome.INVALID, (kind, text)
    hidden = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string", "pattern": nested_repeats(5)}},
    }
    slow = {
        "regex": nested_repeats(5),
        "ebnf": f'root ::= "{"x" * 500}" ([a-z]+ | [a-z]* [a-z]*)* root',
        "json": json.dumps(hidden | {"required": ["a", "b"]}),
    }
    for kind, text in slow.items():
        verdict = outcome(kind, text)
        assert verdict.outcome is GrammarOutcome.COSTLY, kind
        assert "too long to follow" in verdict.reason


def test_slow_grammars_are_carried(folder: GrammarFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    examiner = Examiner.of(folder, options(), threads=1)
    assert examiner.examine("regex", "a|b", "a|b").carried == 0
    assert folder.read("a|b") is None
    monkeypatch.setattr(examine, "CARRY_SECONDS", -1.0)
    verdict = examiner.examine("regex", "a|b", "a|b")
    assert verdict.carried == folder.file("a|b").stat().st_size > 0
    monkeypatch.setattr(examine, "MAX_CARRIED_BYTES", 10)
    assert examiner.examine("regex", "c", "c").outcome is GrammarOutcome.COSTLY


def test_a_full_disk_is_no_fault_of_a_grammar(folder: GrammarFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict of "busy" is not remembered."""
    monkeypatch.setattr(examine, "CARRY_SECONDS", -1.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GrammarFolder, "write", full)
    assert Examiner.of(folder, options(), threads=1).examine("regex", "a|b", "a|b").outcome is GrammarOutcome.BUSY


@pytest.mark.slow
def test_the_process_answers_and_ends_with_its_input(folder: GrammarFolder) -> None:
    command = [sys.executable, "-m", worker.__name__, str(folder.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == READY
        process.send_signal(signal.SIGTERM)  # the signal is for the server, which ends this process
        jobs = [("regex", nested_repeats(6)), ("json", small_schema("name"))]
        for number, (kind, text) in enumerate(jobs):
            line = json.dumps({"number": number, "kind": kind, "text": text, "name": str(number)})
            process.stdin.write(line.encode() + b"\n")
        process.stdin.write(json.dumps({"number": 2, "kind": "regex", "text": nested_repeats(7), "name": "2"}).encode())
        process.stdin.write(b'\n{"withdrawn": 2}\n')
        process.stdin.flush()
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        outcomes = {one["number"]: one.get("outcome") for one in lines}
        assert outcomes.pop(2) is None
        assert outcomes[1] == "accepted"
        assert outcomes[0] in ("costly", "busy")
        assert not psutil.Process(process.pid).children()
        process.stdin.close()
        assert process.wait(20) == 0


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
