"""The effect of rounding: how far a model's next-token distributions move, over its own answers.

The first arm answers the prompts, greedily and sampled. Every arm then reads the same texts, and its distributions over
the whole vocabulary are compared with the first arm's, token by token:

  KL      mean Kullback-Leibler divergence from the first arm, in nats, with its standard error over answers
  p99     the divergence that one token in a hundred exceeds
  same    share of tokens at which both arms have the same most probable token

Arms are engines, started one after another. A temporary folder holds the logits of two arms at a time: 4 bytes for each
token and entry of the vocabulary, 2 GB per arm for 10,000 tokens of 49,152.

examples:
  python tests/measure/rounding.py --prompts humaneval.jsonl gsm8k.jsonl mt-bench.jsonl --json quality.json
  python tests/measure/rounding.py --model model.gguf --arms float int8 float32 --tokens 20000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import script
import torch

from outrider.server.bench import harness, record
from outrider.server.errors import UserError
from outrider.server.plugin.hooks import prompt_logits
from outrider.server.processes import client, session
from outrider.server.prompt_files import BUILT_IN, read_mixed_questions
from outrider.server.settings.flags import settings_of
from outrider.server.settings.resolve import Resolved, resolve
from outrider.server.settings.setting import add_flags
from outrider.server.settings.settings import Settings

if TYPE_CHECKING:
    from outrider.server.processes.engine import Engine

ARMS: dict[str, dict[str, Any]] = {
    "float": {"activations": "float"},
    "int8": {"activations": "int8"},
    "float32": {"activations": "float", "dtype": "float32"},
    "int8 weights": {"activations": "float", "quantization": "int8"},
}
"""Settings of each arm."""
IN_FLIGHT = 16
LONGEST = 2048
"""Most tokens of a prompt with its answer, which are read at once."""


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """An answer of the first arm. prompt, tokens: ids. temperature: of its sampling."""

    prompt: list[int]
    tokens: list[int]
    temperature: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """An arm's distance from the first over some tokens: kl, its standard error and its 99th percentile in nats."""

    answers: int
    tokens: int
    kl: float
    kl_error: float
    kl_p99: float
    same: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_flags(parser, Settings, ("model", "dtype", "device", "threads"))
    add("--arms", nargs="+", choices=ARMS, default=["float", "int8"], help="arms to compare (default: float int8)")
    add("--prompts", type=Path, nargs="+", default=[BUILT_IN], metavar="FILE", help=harness.PROMPTS_HELP)
    add("--tokens", type=int, default=10_000, metavar="N", help="tokens of answers, at least (default: %(default)s)")
    add("--new-tokens", type=int, default=128, metavar="N", help="tokens of an answer, at most (default: %(default)s)")
    add("--temperatures", default="0,1", metavar="LIST", help="of the answers, in turn (default: %(default)s)")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    harness.check_positive(args, "tokens", "new_tokens")
    if args.new_tokens > LONGEST // 2:
        raise UserError(f"--new-tokens is at most {LONGEST // 2}, not {args.new_tokens}")
    temperatures = harness.numbers_from_zero("--temperatures", args.temperatures)
    harness.check_outputs(args)
    questions = read_mixed_questions(args.prompts)
    plain = {"drafter": "off", "disable_radix_cache": True, "chunked_prefill_size": LONGEST}
    engines = {arm: resolve(settings_of(args, **plain, **ARMS[arm])) for arm in args.arms}
    first, *others = args.arms
    found: dict[str, dict[str, Divergence]] = {}
    # SGLang allows one engine per process.
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, pool:

        def of(arm: str, answers: Sequence[ReadAnswer]) -> tuple[list[ReadAnswer], Path]:
            """The answers that an arm has read (its own without `answers`), and the file of their logits."""
            harness.log(f"{arm}: {'reads' if answers else 'answers and reads'}")
            path = Path(folder) / arm
            return pool.submit(_turn, engines[arm], path, answers, questions, temperatures, args).result(), path

        answers, reference = of(first, ())
        for arm in others:
            _, path = of(arm, answers)
            found[arm] = divergences(answers, reference, path)
            path.unlink()
    print(f"{'arm':16}{'answers':10}{'tokens':>8}{'KL':>10}{'±':>9}{'p99':>9}{'same':>9}   beside {first}")
    for arm, groups in found.items():
        for name, one in groups.items():
            numbers = f"{one.tokens:8}{one.kl:10.5f}{one.kl_error:9.5f}{one.kl_p99:9.4f}{one.same:9.2%}"
            print(f"{arm:16}{name:10}{numbers}")
    record.write(args.json, "quality", found, resolved=engines[first], first=first)
    return 0


def _turn(
    resolved: Resolved,
    path: Path,
    answers: Sequence[ReadAnswer],
    questions: Sequence[str],
    temperatures: Sequence[float],
    args: argparse.Namespace,
) -> list[ReadAnswer]:
    """Start an engine and let it read the answers, or answer first if there are none."""
    os.environ[prompt_logits.ENV] = str(path)  # for the scheduler's process

    async def work(engine: Engine) -> list[ReadAnswer]:
        own = list(answers) or await _answers(engine, questions, temperatures, args)
        await _read(engine, own)
        return own

    return session.run(resolved, work)


async def _answers(
    engine: Engine, questions: Sequence[str], temperatures: Sequence[float], args: argparse.Namespace
) -> list[ReadAnswer]:
    """Answers with `args.tokens` tokens in all; raises UserError if the prompts give fewer."""
    manager = engine.tokenizer_manager

    async def ask(asked: tuple[int, str, float]) -> ReadAnswer:
        number, question, temperature = asked
        room = min(engine.context_length, LONGEST) - args.new_tokens - 2
        ids = client.chat_ids(manager, question)[-room:]
        given = await client.generate(
            manager, ids, temperature=temperature, max_new_tokens=args.new_tokens, sampling_seed=number
        )
        return ReadAnswer(ids, list(given["output_ids"]), temperature)

    # each question at one temperature, then at the next
    turns = [
        (number * len(questions) + i, question, temperatures[(i + number) % len(temperatures)])
        for number in range(len(temperatures))
        for i, question in enumerate(questions)
    ]
    answers: list[ReadAnswer] = []
    while sum(len(one.tokens) for one in answers) < args.tokens:
        wave = turns[len(answers) : len(answers) + IN_FLIGHT]
        if not wave:
            raise UserError(f"--prompts give fewer than --tokens {args.tokens}; give more, or raise --new-tokens")
        answers += (await harness.closed_loop(ask, wave, IN_FLIGHT))[0]
    return answers


async def _read(engine: Engine, answers: Sequence[ReadAnswer]) -> None:
    """Let the engine read the answers after their prompts, one at a time; `prompt_logits` writes the logits."""
    for one in answers:
        start = len(one.prompt) - 1
        ids = one.prompt + one.tokens
        await client.generate(engine.tokenizer_manager, ids, logprobs_from=start, temperature=0.0, max_new_tokens=1)


def divergences(answers: Sequence[ReadAnswer], reference: Path, other: Path) -> dict[str, Divergence]:
    """Divergences of the logits in `other` from `reference`, over the same answers, by temperature and of all.

    For each answer the files hold one row [V] per token, which predicts it, and one row after the last.
    """
    rows = sum(len(one.tokens) + 1 for one in answers)
    files = [np.memmap(path, np.float32, mode="c").reshape(rows, -1) for path in (reference, other)]
    kls, sames, start = [], [], 0
    for one in answers:
        pair = [torch.from_numpy(file[start : start + len(one.tokens)]) for file in files]
        kl, same = divergence(*pair)
        kls.append(kl.numpy())
        sames.append(same.numpy())
        start += len(one.tokens) + 1
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(answers):
        name = "greedy" if one.temperature == 0 else f"T = {one.temperature:g}"
        groups.setdefault(name, []).append(number)
    groups["all"] = list(range(len(answers)))
    return {name: _summary([kls[i] for i in chosen], [sames[i] for i in chosen]) for name, chosen in groups.items()}


def divergence(reference: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(reference | other) in nats of each row [n, V] of logits, and whether both have the same largest: [n], [n]."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), reference.argmax(-1) == other.argmax(-1)


def _summary(kls: Sequence[np.ndarray], sames: Sequence[np.ndarray]) -> Divergence:
    together = np.concatenate(kls)
    mean = float(together.mean())
    off = np.array([kl.sum() - len(kl) * mean for kl in kls])  # tokens of one answer are correlated
    return Divergence(
        answers=len(kls), tokens=len(together), kl=mean, kl_error=float(np.sqrt((off**2).sum()) / len(together)),
        kl_p99=float(np.quantile(together, 0.99)), same=float(np.concatenate(sames).mean()),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
