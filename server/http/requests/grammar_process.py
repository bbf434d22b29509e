"""Send grammars to the process that compiles them, and keep its verdicts."""

import asyncio
import itertools
import json
import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ...plugin.grammars import worker
from ...plugin.grammars.examine import GrammarOutcome, GrammarVerdict
from ...plugin.grammars.folder import GrammarFolder, name_of

logger = logging.getLogger(__name__)

MAX_VERDICTS = 4096
"""Number of kept verdicts: the last used."""
MAX_FOLDER_BYTES = 128 * 1024 * 1024
"""Bytes of compiled grammars kept in the folder."""
GRACE_SECONDS = 2.0
"""Seconds beyond its own limit after which a silent process counts as stuck."""
START_SECONDS = 30.0
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4)


class GrammarMetrics:
    """Metrics of requests' grammars. registry: a test needs one of its own, as each takes a metric only once."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        text = "Grammars of requests, by outcome."
        outcomes = Counter("outrider_grammars", text, ["outcome"], registry=registry)
        self._outcomes = {name: outcomes.labels(name) for name in ("known", *GrammarOutcome)}
        self._seconds = Histogram(
            "outrider_grammar_seconds",
            "Processor time in which a grammar was compiled and tried out.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )

    def known(self) -> None:
        self._outcomes["known"].inc()

    def examined(self, verdict: GrammarVerdict) -> None:
        self._outcomes[verdict.outcome].inc()
        if verdict.outcome is GrammarOutcome.ACCEPTED:
            self._seconds.observe(verdict.seconds)


@dataclass(slots=True)
class GrammarQuestion:
    """A grammar that is being examined. waiting: requests that wait for the verdict."""

    verdict: asyncio.Task[GrammarVerdict]
    waiting: int = 0


class GrammarProcess:
    """The process, started with `begin` or a question, also after its end. For use on one event loop."""

    def __init__(self, folder: Path, metrics: GrammarMetrics | None = None) -> None:
        self.folder, self._limits = GrammarFolder(folder), worker.CompileLimits()
        self._metrics = metrics or GrammarMetrics()
        self._verdicts: OrderedDict[str, GrammarVerdict] = OrderedDict()
        self._folder_bytes = 0
        self._questions: dict[str, GrammarQuestion] = {}
        self._replies: dict[int, tuple[str, asyncio.Future[GrammarVerdict]]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self.running: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def examine(self, kind: str, text: str, name: str | None = None) -> GrammarVerdict:
        """Return the verdict on a grammar: may the scheduler follow it? Takes at most some seconds.

        kind: json, regex, ebnf or structural_tag. name: the scheduler's name for it, if not this text's. All are
            accepted where SGLang has another grammar backend than xgrammar.
        """
        name = name or name_of(kind, text)
        if not self.folder.ready:
            return GrammarVerdict(GrammarOutcome.ACCEPTED)
        if (known := self._verdicts.get(name)) is not None:
            self._verdicts.move_to_end(name)
            self._metrics.known()
            return known
        if name not in self._questions:
            self._questions[name] = GrammarQuestion(asyncio.create_task(self._examine(kind, text, name)))
        question = self._questions[name]
        question.waiting += 1
        try:
            return await asyncio.shield(question.verdict)
        finally:  # the last request that leaves cancels the question
            question.waiting -= 1
            if not question.waiting:
                del self._questions[name]
                question.verdict.cancel()

    async def begin(self) -> None:
        """Start the process, if grammars can be compiled here, so that no request waits for its start."""
        if self.folder.ready:
            await self._start()

    async def _examine(self, kind: str, text: str, name: str) -> GrammarVerdict:
        try:
            verdict = await self._query({"kind": kind, "text": text, "name": name})
        except (OSError, EOFError, TimeoutError) as error:
            logger.warning("the process that compiles grammars has failed (%r); it will be started again", error)
            verdict = GrammarVerdict(GrammarOutcome.BUSY, "grammars cannot be compiled at the moment; try again")
        self._metrics.examined(verdict)
        return verdict

    async def _query(self, job: dict[str, str]) -> GrammarVerdict:
        process = await asyncio.shield(asyncio.create_task(self._start()))  # more questions may share the start
        number = next(self._numbers)
        answer: asyncio.Future[GrammarVerdict] = asyncio.get_running_loop().create_future()
        self._replies[number] = job["name"], answer
        try:
            _write(process, {"number": number, **job})
            async with asyncio.timeout(self._limits.seconds + GRACE_SECONDS):
                return await answer
        except TimeoutError:
            self._drop(process)
            raise
        except asyncio.CancelledError:
            if process is self.running:
                _write(process, {"withdrawn": number})
            raise

    def _remember(self, name: str, verdict: GrammarVerdict) -> None:
        self._verdicts[name] = verdict
        self._folder_bytes += verdict.carried
        while len(self._verdicts) > MAX_VERDICTS or self._folder_bytes > MAX_FOLDER_BYTES:
            forgotten, dropped = self._verdicts.popitem(last=False)
            self._folder_bytes -= dropped.carried
            if dropped.carried:
                self.folder.remove(forgotten)

    async def _start(self) -> asyncio.subprocess.Process:
        """Return the running process, started if needed."""
        async with self._starting:
            if self.running is not None:
                return self.running
            self.running = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", worker.__name__, str(self.folder.path)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                async with asyncio.timeout(START_SECONDS):
                    if await process.stdout.readline() != worker.READY:  # type: ignore[union-attr]
                        raise EOFError("it did not start")
            except BaseException:
                self._drop(process)
                raise
            self._reader = asyncio.get_running_loop().create_task(self._read(process))
            return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass on verdicts until the process ends, and then fail all waiting requests."""
        lines: Any = process.stdout
        async for line in lines:
            fields = json.loads(line)
            name, answer = self._replies.pop(fields.pop("number"), ("", None))
            if answer is None or not fields:  # it was withdrawn
                continue
            verdict = GrammarVerdict.from_json(fields)
            if verdict.outcome is not GrammarOutcome.BUSY:
                self._remember(name, verdict)
            if not answer.done():
                answer.set_result(verdict)
        self._drop(process)
        await process.wait()

    async def end(self) -> None:
        """End the process, and all questions to it."""
        if (process := self.running) is not None:
            self._drop(process)
            await process.wait()

    def _drop(self, process: asyncio.subprocess.Process) -> None:
        """Stop waiting for this process; the next question starts another."""
        if process is not self.running:
            return
        self.running = None
        if process.returncode is None:
            process.kill()
        for _, answer in self._replies.values():
            if not answer.done():
                answer.set_exception(EOFError("it ended"))
        self._replies.clear()


def _write(process: asyncio.subprocess.Process, fields: dict[str, Any]) -> None:
    process.stdin.write(json.dumps(fields).encode() + b"\n")  # type: ignore[union-attr]
