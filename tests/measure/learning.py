"""Tokens per step of a server that learns, on held-out prompts, while it serves other prompts with pauses.

The server runs with `--learn` and an empty `--learn-folder`. The prompts of --prompts are served in as many parts as
there are pauses; in a pause the server learns. After each pause some prompts of --held-out are sent, one at a time and
with `"store": false`, so that the server does not keep them. All of them, and the prompts of other kinds in --general,
are sent before the first part and after the last pause. Each request has its own `cache_salt`, so that prompt lookup
finds no earlier answers. Decoding is greedy, so texts must not change.

On a busy machine, compare tokens per step and the learner's processor seconds, which hardly depend on other work.

examples:
  python tests/measure/domains.py invoices --out prompts
  python tests/measure/learning.py --prompts prompts/invoices.jsonl --held-out prompts/invoices-held-out.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import script
from performance import table

from outrider.server.bench import harness, record, remote, server_processes
from outrider.server.bench.remote import Remote
from outrider.server.bench.server_processes import LEARNER, ServerProcesses
from outrider.server.errors import UserError
from outrider.server.prompt_files import read_mixed_questions, read_questions

TIMEOUT = 600.0
IDLE, IDLE_LOOKS = 0.1, 10
"""A waiting learner is idle if it uses less processor time than this between two polls a second apart, this often in a
row."""
LIVE_SECONDS = 0.6
"""A server reads its engines' counters this often, so they lag by less."""


Asked = dict[str, float]
"""Sums over answers to prompts sent one at a time: tokens, decode steps, tau, tokens_per_second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help=harness.PROMPTS_HELP)
    add("--held-out", type=Path, nargs="+", required=True, metavar="FILE", help="prompts that are never learned from")
    add("--general", type=Path, nargs="+", default=[], metavar="FILE", help="prompts of other kinds, asked twice")
    add("--general-count", type=int, default=20, metavar="N", help="of each such file (default: %(default)s)")
    add("--pauses", type=int, default=8, metavar="N", help="pauses (default: %(default)s)")
    add("--pause", type=float, default=240.0, metavar="S", help="seconds of a pause (default: %(default)g)")
    more = "seconds of processor time that the learner gets in a pause, which may last longer (default: %(default)g)"
    add("--learner-seconds", type=float, default=0.0, metavar="S", help=more)
    add("--probe", type=int, default=12, metavar="N", help="held-out prompts a file and pause (default: %(default)s)")
    add("--concurrency", type=int, default=4, metavar="N", help="requests in flight, serving (default: %(default)s)")
    add("--new-tokens", type=int, default=128, metavar="N", help="longest answer (default: %(default)s)")
    add("--url", default="http://127.0.0.1:30000", help="a server with --learn (default: %(default)s)")
    add("--api-key", default=os.environ.get("OUTRIDER_API_KEY"), metavar="KEY", help="key (default: OUTRIDER_API_KEY)")
    harness.add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; returns 1 if a greedy text has changed."""
    harness.check_positive(args, "pauses", "probe", "concurrency", "new_tokens", "general_count")
    if args.pause <= 0:
        raise UserError(f"--pause is above 0, not {args.pause:g}")
    harness.check_outputs(args)
    questions = read_mixed_questions(args.prompts)
    held_out = {path.stem: read_questions(path) for path in args.held_out}
    general = {path.stem: read_questions(path)[: args.general_count] for path in args.general}
    results = asyncio.run(_measure(args.url, questions, held_out, general, args))
    print(shown(results))
    record.write(args.json, "learn", results)
    return 1 if results["changed_texts"] else 0


async def _measure(
    url: str,
    questions: Sequence[str],
    held_out: Mapping[str, Sequence[str]],
    general: Mapping[str, Sequence[str]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    async with remote.connect(url, args.api_key) as server:
        if "learning" not in await _live(server):
            raise UserError(f"the server at {url} does not learn: start it with --learn")
        asking = _Asking(server, args.new_tokens)
        harness.log("Asking all held-out prompts, before")
        before = await asking.each({**held_out, **general})
        processes, points, first_pause = server_processes.of_server(url), list[dict[str, Any]](), 0.0
        for number in range(args.pauses):
            part = questions[number * len(questions) // args.pauses : (number + 1) * len(questions) // args.pauses]
            harness.log(f"Serving {len(part)} prompts, then a pause of {args.pause:g} s")
            await harness.closed_loop(asking.ask, part, args.concurrency)
            first_pause = first_pause or time.time()
            learning = await _pause(server, processes, args)
            probe = {name: found[: args.probe] for name, found in held_out.items()}
            point = {
                "seconds": round(time.time() - first_pause, 1),
                "learner_seconds": _learner_seconds(processes),
                "served": (number + 1) * len(questions) // args.pauses,
                "answers": learning.get("answers", 0) + learning.get("held_out", 0),
                "anchors": learning.get("anchors", 0),
                "in_use": learning["in_use"],
                "asked": await asking.each(probe),
            }
            points.append(point)
            harness.log(f"{point}")
        harness.log("Asking all held-out prompts, after")
        after = await asking.each({**held_out, **general})
        exchanges = [dict(event) for event in (await _live(server))["learning"]["exchanges"]]
    promotions = [event for event in exchanges if event["event"] == "promotion"]
    return {
        "before": before,
        "after": after,
        "held_out": list(held_out),
        "changed_texts": asking.changed,
        "promotions": len(promotions),
        "rollbacks": len(exchanges) - len(promotions),
        "first_promotion_seconds": round(promotions[0]["at"] - first_pause, 1) if promotions else None,
        "curve": points,
    }


def _learner_seconds(processes: ServerProcesses | None) -> float | None:
    """Processor time of the learner so far; None if unknown."""
    return processes.seconds_of(LEARNER) if processes else None


async def _pause(server: Remote, processes: ServerProcesses | None, args: argparse.Namespace) -> dict[str, Any]:
    """Pause; returns the server's report on its learning at the end."""
    had, until = _learner_seconds(processes), time.monotonic() + args.pause
    before, idle = had, 0
    while True:
        await asyncio.sleep(min(1.0, args.pause))
        learning: dict[str, Any] = (await _live(server))["learning"]
        has = _learner_seconds(processes)
        if had is None or has is None or has - had >= args.learner_seconds:
            enough = True
        else:  # it has no work
            idle = idle + 1 if learning.get("phase") == "waiting" and has - (before or 0.0) < IDLE else 0
            enough, before = idle >= IDLE_LOOKS, has
        if enough and time.monotonic() >= until:
            return learning


class _Asking:
    """Sends prompts to a server; `changed` counts greedy texts that differ from the first ones."""

    def __init__(self, server: Remote, new_tokens: int) -> None:
        self.server, self.new_tokens, self.changed = server, new_tokens, 0
        self._texts: dict[str, str] = {}

    async def each(self, files: Mapping[str, Sequence[str]]) -> dict[str, Asked]:
        """Send prompts that are not learned from, one at a time."""
        return {name: await self._alone(questions) for name, questions in files.items()}

    async def _alone(self, questions: Sequence[str]) -> Asked:
        before, tokens, seconds = await _live(self.server), 0, 0.0
        for question in questions:
            reply = await self.ask(question, store=False, cache_salt=secrets.token_hex(8))
            tokens, seconds = tokens + reply.completion_tokens, seconds + reply.seconds
            self.changed += self._texts.setdefault(question, reply.text) != reply.text
        now = await _live(self.server)
        decoded, steps = (round(now[name] - before[name]) for name in ("tokens", "request_steps"))
        speed, tau = tokens / seconds if seconds else 0.0, decoded / steps if steps else 0.0
        return {"tokens": decoded, "steps": steps, "tau": round(tau, 4), "tokens_per_second": round(speed, 1)}

    async def ask(self, question: str, **more: Any) -> remote.Reply:
        """Send a prompt, which may be learned from; more: fields of the request."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": self.new_tokens, "temperature": 0}
        reply = await self.server.ask(remote.CHAT, body | more, timeout=TIMEOUT)
        if reply.failure:
            raise UserError(f"the server did not answer: {reply.failure} {reply.detail}")
        return reply


async def _live(server: Remote) -> dict[str, Any]:
    """The data that the page shows."""
    await asyncio.sleep(LIVE_SECONDS)
    async with server.session.get(f"{server.url}/outrider/live") as response:
        if response.status != 200:
            raise UserError(f"{server.url}/outrider/live answers {response.status}: is it a server of Outrider?")
        found: dict[str, Any] = await response.json()
        return found


def shown(results: Mapping[str, Any]) -> str:
    """The curve and the comparison, as tables."""
    names, before, after = results["held_out"], results["before"], results["after"]
    rows = [
        [
            f"{point['seconds'] / 60:.1f}", "" if (s := point["learner_seconds"]) is None else f"{s:.0f}",
            str(point["served"]), str(point["anchors"]), point["in_use"] or "start",
            *(f"{point['asked'][name]['tau']:.2f}" for name in names),
        ]
        for point in results["curve"]
    ]  # fmt: skip
    columns = ["minutes", "learner's processor s", "served", "drafts trained on", "drafter", *names]
    compared = [
        [name, *(f"{found[name]['tau']:.2f}" for found in (before, after)), f"{after[name]['tau'] / one['tau']:.2f}",
         *(f"{found[name]['tokens_per_second']:.0f}" for found in (before, after))]
        for name, one in before.items() if one["tau"]
    ]  # fmt: skip
    first = results["first_promotion_seconds"]
    lines = [
        f"promotions: {results['promotions']}, rollbacks: {results['rollbacks']}, texts changed: "
        f"{results['changed_texts']}",
        "no promotion" if first is None else f"first promotion {first:.0f} s after the first pause began",
    ]
    heads = ["prompts", "tokens a step before", "after", "ratio", "tokens/s before", "after"]
    return "\n".join([table(columns, rows), table(heads, compared), *lines])


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
