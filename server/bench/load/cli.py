"""Throughput and latency under load: of any OpenAI server by URL, or of an engine of our own, arm by arm.

With --url or --scenario, requests go to a running server. A closed loop (--concurrency) keeps so many in flight: as one
ends, the next begins. An open loop sends them at --rate, at random as independent users come (poisson), at fixed
distances (fixed) or several at once (bursts), or as a trace did, however many are in flight: it shows what users wait
where more come than can be served. Each load is one row; docs/loadtest.md explains the columns and the scenario files.
  whole/asked  requests answered to the end, of those due in the measured time; the others are under "failures"
  tok/s        output tokens per second of all requests, within the measured time
  per user     tokens per second of one answer after its first token, median
  TTFT         time to first token, from when the request was due
  TPOT         time per output token after the first
  E2E          time to the end of the answer
  good         share of all requests that kept every one of --goodput's times; goodput: such requests per second

  level kept   share of the requests with min_tokens_per_second whose tokens after the first came at that speed
With prompts of different lengths a second table has the gaps between pieces of an answer, and TTFT by prompt length.

With --long-prompts, streams are under way, a long prompt arrives, and a short one behind it.

Several servers (--url ours=http://… vllm=http://…) take turns, round by round, each alone at its turn; "× ours" is the
ratio of throughputs in the same round. Scripts in deploy/peers start other engines.

Without --url and --scenario, an engine is started here and arms take turns on it, round by round: "off" (no drafts),
"verify all", "planned", and if named "across", planned with lookup in the round's other texts; of a block-diffusion
model D=0 to D=3 draft so many states. Prompts of several files are mixed. tau is tokens per request and step;
acceptance by position is in a table, and in --json FILE for `outrider simulate`.
With --level a third of the requests asks for a service level, "level kept" is the share that got it, and an arm "no
levels" plans without being asked. Times are medians over the rounds. Where no profile fits, a quick one is measured
first, as a server does.

examples:
  outrider bench load --url http://127.0.0.1:30000 --rate 0.5,1,2,4 --seconds 60 --goodput ttft:500 tpot:50
  outrider bench load --url ours=http://127.0.0.1:30000 vllm=http://127.0.0.1:8000 --concurrency 1,8 --seconds 20
  outrider bench load --url http://127.0.0.1:30000 --long-prompts 1000,5000
  outrider bench load --scenario deploy/loadtest/chat.toml --json chat.json --csv chat.csv --plot chat.png
  outrider bench load --prompts sessions.jsonl --concurrency 1 --count 10 --arms planned across
  outrider bench load --prompts code.jsonl math.jsonl chat.jsonl --concurrency 1,8,32 --plot load.png
"""

import argparse
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...settings.flags import MOVED as MOVED
from ...settings.flags import Flags, add_engine_flags, add_unmasking_flags
from .. import harness
from . import arms, by_url, long_prompts

SHARED = ("model",)
"""The engine flag that a server by URL takes too: the name that it is asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    both = parser.add_argument_group("both")
    add = both.add_argument
    add("--prompts", type=Path, nargs="+", metavar="FILE", help=harness.PROMPTS_HELP)
    add("--concurrency", metavar="LIST", help=f"requests in flight (default: {arms.CONCURRENCY})")
    add("--temperature", type=float, metavar="T", help="temperature of all requests (default: 0)")
    new_tokens = f"tokens of an answer, at most (default: {arms.NEW_TOKENS}); 64-192: drawn for each request"
    add("--new-tokens", metavar="N", help=new_tokens)
    add("--rounds", type=int, metavar="N", help=f"measurements of each arm (default: {arms.ROUNDS}; of one server 1)")
    harness.add_output_flags(both, plot="throughput over speed per user, and times over load")
    of_url = _Noted(parser.add_argument_group("a server by URL"))
    by_url.add_flags(of_url)
    of_arms = _Noted(parser.add_argument_group("an engine of our own (--model: by URL, the name to ask for)"))
    add = of_arms.add_argument
    count = "requests per round, at least; never fewer than twice those in flight (default: %(default)s)"
    add("--count", type=int, default=8, metavar="N", help=count)
    add(
        "--arms",
        nargs="+",
        choices=[*arms.ARMS | arms.ACROSS | arms.DIFFUSION_ARMS],
        help="arms to compare (default: all but across)",
    )
    add("--level", type=float, metavar="X", help="service level that every third request asks for, in tokens/s")
    add_engine_flags(of_arms, drafter=True)
    add_unmasking_flags(of_arms)
    parser.set_defaults(of_url=of_url.defaults, of_arms=of_arms.defaults)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 where not one request was answered."""
    chosen = args.url is not None or args.scenario is not None
    others = args.of_arms if chosen else args.of_url
    for name, (flag, default) in others.items():
        if name not in SHARED and name != "api_key" and getattr(args, name) != default:
            raise UserError(f"{flag} goes {'without' if chosen else 'with'} --url or --scenario")
    if args.rounds is not None:
        harness.check_positive(args, "rounds")
    harness.check_outputs(args)
    if args.long_prompts:
        return long_prompts.run(args)
    results = (by_url if chosen else arms).run(args)
    return 0 if any(one.whole for of_load in results.values() for rounds in of_load.values() for one in rounds) else 1


class _Noted:
    """A group of flags that keeps which were added: {destination: (flag, default)}."""

    def __init__(self, group: Flags) -> None:
        self.group = group
        self.defaults: dict[str, tuple[str, Any]] = {}

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = self.group.add_argument(*names, **options)
        self.defaults[action.dest] = (names[0], action.default)
        return action
