"""Tokens per second of Outrider beside other engines, on the same prompts; their memory, and how soon they are ready.

Every engine runs in a process of its own. They take turns, round by round, so that what else the machine does meets
all; those that wait are stopped (SIGSTOP), so that none takes processor time from another. The ratios and their spread
are the result; the rates themselves hold for this machine at this moment.

Outrider, SGLang, Transformers and vLLM compute in the type of --dtype; llama.cpp and OpenVINO GenAI compute on a
GGUF file, which holds the embedded model in 4 bits. All are asked in process, none over HTTP. vLLM and OpenVINO GenAI
live in environments of their own in the user's cache, which are made when their arms are first named (a package index
is needed, a few minutes, 2 GB for vLLM). vLLM compiles the model at each start: for a minute, ten on busy cores. An
engine that fails is left out, and the others go on. Where no profile fits, Outrider measures a quick one before it is
ready, as a server does.

examples:
  outrider bench peers --prompts mixed.jsonl --arms outrider,vllm,openvino --concurrency 1,8 --plot peers.png
  outrider bench peers --prompts mixed.jsonl --arms outrider,vllm --json peers.json --resume
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from .. import pictures
from ..errors import UserError
from ..model import bundled_model
from ..prompt_files import read_questions
from ..settings.flags import add_engine_flags, settings_of
from ..settings.settings import Settings
from . import baselines, environments, harness, isolated
from .baselines import Job, Setup
from .peers_record import Footprint, Record, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "outrider"
# arm: (engine, speculation)
ARMS = {
    OURS: ("outrider", True),
    "outrider-off": ("outrider", False),
    "sglang": ("sglang", False),
    "transformers": ("transformers", False),
    "llama.cpp": ("llama.cpp", False),
    "vllm": ("vllm", False),
    "openvino": ("openvino", False),
}
BY_DEFAULT = [arm for arm, (engine, _) in ARMS.items() if engine not in isolated.ENGINES]
WAVES = 4
"""Prompts of a turn, at least, by requests in flight. With one such wave, an engine whose answers end at different
times would mostly be timed with fewer in flight than were asked for."""
WARM_TOKENS = 8
"""Of each answer of the warm-up."""
PATIENCE = 1800.0
"""Seconds that an engine may take to start or for a turn. vLLM compiles for minutes beside other work."""
TOLD_EVERY = 15.0
"""Seconds between two lines that say what is waited for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser, drafter=True)
    add = parser.add_argument
    add("--prompts", type=Path, required=True, metavar="FILE", help=harness.PROMPTS_HELP)
    more = ", ".join(arm for arm in ARMS if arm not in BY_DEFAULT)
    add(
        "--arms",
        default=",".join(BY_DEFAULT),
        metavar="LIST",
        help=f"also: {more}, which are installed when they are named (default: %(default)s)",
    )
    add("--gguf", type=Path, metavar="FILE", help="for llama.cpp and OpenVINO (default: the one that is served)")
    add("--concurrency", default="1,2,4,8,16,32", metavar="LIST", help="requests in flight (default: %(default)s)")
    waves = f"prompts per turn, at least; never fewer than {WAVES} times those in flight (default: %(default)s)"
    add("--count", type=int, default=8, metavar="N", help=waves)
    add("--new-tokens", type=int, default=128, metavar="N", help="of each answer (default: %(default)s)")
    add(
        "--prefill",
        default="512,4096",
        metavar="LIST",
        help='prompt tokens, timed with one new token; "" for none (default: %(default)s)',
    )
    add("--rounds", type=int, default=3, metavar="N", help="measurements of each arm (default: %(default)s)")
    add("--resume", action="store_true", help="keep the rounds that a run with the same flags has left in --json FILE")
    harness.add_output_flags(parser, plot="tokens per second by concurrency")


def run(args: argparse.Namespace) -> int:
    arms = [arm for arm in args.arms.split(",") if arm]
    if not arms or any(arm not in ARMS for arm in arms):
        raise UserError(f"--arms is a list of {', '.join(ARMS)}, not {args.arms!r}")
    if not args.concurrency and not args.prefill:
        raise UserError("nothing to measure: --concurrency and --prefill are empty")
    concurrencies = harness.positive_integers("--concurrency", args.concurrency) if args.concurrency else []
    prefills = harness.positive_integers("--prefill", args.prefill) if args.prefill else []
    harness.check_positive(args, "count", "new_tokens", "rounds")
    harness.check_outputs(args)
    if args.device == "cuda":
        raise UserError("bench peers compares engines on a CPU")
    if args.resume and args.json is None:
        raise UserError("--resume goes on with the file that --json names")
    if "llama.cpp" in arms:
        baselines.import_xllamacpp()
    cases = make_cases(args, concurrencies, prefills)
    setups = make_setups(args, {ARMS[arm][0] for arm in arms}, cases)
    record = Record(args, list(cases), arms)
    for name in isolated.ENGINES:
        if name in setups:
            environments.prepare(name)
    engines = Engines()
    try:
        for setup in setups.values():
            engines.start(setup, cases)
        measure(engines, arms, cases, args.rounds, record)
        record.engines = {name: engine.footprint() for name, engine in engines.running.items()}
    finally:
        engines.end()
    failures = engines.failures
    record.write()
    kept = [arm for arm in arms if ARMS[arm][0] not in failures]
    if not kept:
        raise UserError("; ".join(failures.values()))
    results = {case: {arm: rates[arm][: args.rounds] for arm in kept} for case, rates in record.results.items()}
    report(results, kept)
    report_footprints(record.engines)
    if args.plot:
        with pictures.figure(args.plot) as figure:
            plot(results, figure)
    for name, reason in failures.items():
        print(f"{name} is left out: {reason}", file=sys.stderr)
    return 1 if failures else 0


def make_cases(args: argparse.Namespace, concurrencies: Sequence[int], prefills: Sequence[int]) -> dict[str, Job]:
    """The jobs by name; whole groups of `concurrency` prompts, so that no engine ends with a smaller one."""
    from transformers import AutoTokenizer

    from ..model import target

    questions = read_questions(args.prompts)
    tokenizer: Any = AutoTokenizer.from_pretrained(target.find(args.model).path)
    chosen = questions[: max([args.count, *(WAVES * concurrency for concurrency in concurrencies)]) * 2]
    ids: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in chosen
    ]
    cases = {}
    for concurrency in concurrencies:
        count = -(-max(args.count, WAVES * concurrency) // concurrency) * concurrency
        cases[str(concurrency)] = Job([ids[i % len(ids)] for i in range(count)], args.new_tokens, concurrency)
    for length in prefills:
        text = [token for prompt in ids for token in prompt]
        cases[f"prefill {length}"] = Job([(text * (length // len(text) + 1))[:length]], 1, 1)
    return cases


def make_setups(args: argparse.Namespace, engines: set[str], cases: dict[str, Job]) -> dict[str, Setup]:
    dtype = Settings(dtype=args.dtype, device="cpu").resolved_dtype
    gguf = ""
    if readers := sorted(engines & {"llama.cpp", "openvino"}):
        served = args.model if args.model is not None and Path(args.model).is_file() else None
        if args.gguf is None and args.model is not None and served is None:
            raise UserError(f"{' and '.join(readers)} need the model as a GGUF file: --gguf FILE, or other --arms")
        gguf = str(args.gguf or served or bundled_model.find_gguf())
        if not Path(gguf).is_file():
            raise UserError(f"--gguf {gguf} does not exist")
    requests = max(job.concurrency for job in cases.values())
    context = max(len(prompt) + job.new_tokens for job in cases.values() for prompt in job.prompts) + 8
    settings = settings_of(
        args,
        device="cpu",
        dtype=dtype,
        disable_radix_cache=True,
        max_running_requests=requests,
        max_total_tokens=requests * (context + 4 * (args.gamma + 1)) + 1024,  # room for the drafts of each
    )
    return {name: Setup(name, settings, gguf, requests, context, settings.resolved_threads) for name in sorted(engines)}


class Peer:
    """One engine's process: `work` runs a job there; between jobs the process is stopped."""

    def __init__(self, setup: Setup):
        self.name = setup.engine
        command, surroundings = baselines.command(setup)
        began = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("OUTRIDER_PEERS_DEBUG") else None,
            text=True,
            env=surroundings,
        )
        try:
            self.receive(waiting_for="start")
        except BaseException:
            self.end()
            raise
        self.ready_seconds = time.perf_counter() - began
        self._all("suspend")

    def warm_up(self, jobs: Iterable[Job]) -> None:
        """Work through the jobs, and say so while it takes long: an engine may compile for each kind."""
        for job in jobs:
            self.work(job, waiting_for=f"warm-up with {job.concurrency} in flight")

    def work(self, job: Job, waiting_for: str | None = None) -> float:
        """Tokens per second: new ones, or of the prompt where the answer is a single token.

        waiting_for: as in `receive`.
        """
        self._all("resume")
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which its reply will say
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
        took = self.receive(waiting_for)
        self._all("suspend")
        expected = len(job.prompts) * job.new_tokens
        if took["tokens"] != expected:
            raise UserError(f"{self.name} made {took['tokens']} tokens instead of {expected}")
        return (sum(map(len, job.prompts)) if job.new_tokens == 1 else expected) / took["seconds"]

    def receive(self, waiting_for: str | None = None) -> dict[str, Any]:
        """The engine's next line, within PATIENCE seconds. waiting_for: what is said to be waited for; None: nothing is
        said, since it would disturb what is measured."""
        assert self.process.stdout is not None
        self._wait(waiting_for)
        line = self.process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in reply:
            hint = "" if line else " (OUTRIDER_PEERS_DEBUG=1 shows what it wrote)"
            raise UserError(f"the engine {self.name} failed: {reply['error']}{hint}")
        return reply

    def _wait(self, waiting_for: str | None) -> None:
        assert self.process.stdout is not None
        began, output = time.perf_counter(), self.process.stdout.fileno()
        while not select.select([output], [], [], PATIENCE if waiting_for is None else TOLD_EVERY)[0]:
            seconds = time.perf_counter() - began
            if waiting_for is not None:
                print(f"{self.name}: {waiting_for}, {seconds:.0f} s", file=sys.stderr, flush=True)
            if seconds > PATIENCE:
                raise UserError(
                    f"{self.name} did not end its {waiting_for or 'turn'} within {PATIENCE / 60:.0f} minutes"
                )

    def footprint(self) -> Footprint:
        found = [process.memory_full_info() for process in self._processes()]
        return Footprint(self.ready_seconds, sum(m.pss for m in found), sum(m.rss for m in found))

    def end(self) -> None:
        processes = self._all("resume")
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # no more jobs
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for process in processes:
            if process.is_running():
                process.kill()
        self.process.wait()

    def _processes(self) -> list[psutil.Process]:
        if self.process.returncode is not None:
            return []
        try:
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _all(self, action: str) -> list[psutil.Process]:
        processes = self._processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                getattr(process, action)()
        return processes


class Engines:
    """running: by name. failures: why others are not, or not any more."""

    def __init__(self) -> None:
        self.running: dict[str, Peer] = {}
        self.failures: dict[str, str] = {}

    def start(self, setup: Setup, cases: dict[str, Job]) -> None:
        print(f"Starting {setup.engine}", file=sys.stderr, flush=True)
        with self.surviving(setup.engine):
            self.running[setup.engine] = Peer(setup)
            self.running[setup.engine].warm_up(warm_ups(cases.values()))

    @contextmanager
    def surviving(self, name: str) -> Iterator[None]:
        """An error of this engine is its end alone."""
        try:
            yield
        except UserError as error:
            print(error, file=sys.stderr, flush=True)
            self.failures[name] = str(error)
            if name in self.running:
                self.running.pop(name).end()

    def end(self) -> None:
        for engine in self.running.values():
            engine.end()


def measure(engines: Engines, arms: Sequence[str], cases: dict[str, Job], rounds: int, record: Record) -> None:
    """Add the rates of all turns that the record does not have."""
    turns = harness.turns(rounds, list(cases), arms)
    for (number, case), turns_of_case in itertools.groupby(turns, key=itemgetter(0, 1)):
        rates, done = record.results[case], record.done(number, case)
        for _, _, arm in turns_of_case:
            name, speculate = ARMS[arm]
            if done or name not in engines.running:
                continue
            with engines.surviving(name):
                rates[arm][number:] = [engines.running[name].work(replace(cases[case], speculate=speculate))]
        if not done:
            record.write()


def warm_ups(jobs: Iterable[Job]) -> list[Job]:
    """One wave of every kind of job, with short answers."""
    return [Job(job.prompts[: job.concurrency], min(job.new_tokens, WARM_TOKENS), job.concurrency) for job in jobs]


def report(results: Results, arms: Sequence[str]) -> None:
    """Rates of all arms, then ours over each peer and over the best of them at each load."""
    print(f"{'tokens/s':>14}" + "".join(f"{arm:>14}" for arm in arms))
    for case, rates in results.items():
        print(f"{case:>14}" + "".join(f"{statistics.median(rates[arm]):14.1f}" for arm in arms))
    others = [arm for arm in arms if ARMS[arm][0] != "outrider"]
    for ours in (arm for arm in (OURS, "outrider-off") if arm in arms and others):
        print(f"\n{ours + ' over':>17}" + "".join(f"{arm:>24}" for arm in others) + f"{'the best':>24}")
        for case, rates in results.items():
            best = best_of(rates, others)
            cells = [harness.ratio(rates[ours], rates[arm]).cell for arm in [*others, best]]
            print(f"{case:>17}" + "".join(f"{cell:>24}" for cell in cells) + f"  {best}")


def best_of(rates: dict[str, list[float]], others: Sequence[str]) -> str:
    """The peer with the highest median."""
    return max(others, key=lambda arm: statistics.median(rates[arm]))


def report_footprints(footprints: dict[str, Footprint]) -> None:
    print(f"\n{'engine':>14}{'ready, s':>14}{'PSS, MB':>14}{'RSS, MB':>14}")
    for name, (seconds, pss, rss) in footprints.items():
        print(f"{name:>14}{seconds:14.1f}{pss / 1e6:14.0f}{rss / 1e6:14.0f}")


def plot(results: Results, figure: Figure) -> None:
    """Draw tokens per second by concurrency; bands from the slowest to the fastest round."""
    figure.set_size_inches(7, 4.5)
    axes = figure.subplots()
    cases = [case for case in results if case.isdigit()]
    for arm in next(iter(results.values())):
        rates = [sorted(results[case][arm]) for case in cases]
        places = [int(case) for case in cases]
        axes.plot(places, [statistics.median(r) for r in rates], marker="o", label=arm)
        axes.fill_between(places, [r[0] for r in rates], [r[-1] for r in rates], alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(case) for case in cases], cases)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("new tokens per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
