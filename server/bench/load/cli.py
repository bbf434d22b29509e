"""Throughput and latency under load, of OpenAI servers by URL or of an engine of our own, arm by arm.

With --url or --scenario, requests go to a running server. A closed loop keeps --concurrency requests in flight: as one
ends, the next begins. An open loop sends requests at --rate, however many are in flight: at random like independent
users (poisson), at fixed intervals (fixed), several at once (bursts), or at a trace's times. It shows how long users
wait under overload. Each load is a row; docs/loadtest.md explains columns and scenario files.
  whole/asked  requests answered to the end, of all due in the measured time; "failures" counts the rest
  tok/s        output tokens per second of all requests in the measured time
  per user     tokens per second of one answer after its first token, median
  TTFT         time to first token, from when the request was due
  TPOT         time per output token after the first
  E2E          time to the end of the answer
  good         share of requests within every time of --goodput; goodput: such requests per second

  level kept   of the requests with min_tokens_per_second, the share that got this speed after the first token
If prompt lengths differ, a second table has the gaps between pieces of an answer, and TTFT by prompt length.

Several servers (--url ours=http://… vllm=http://…) take turns, round by round; only one has load at a time. "× ours" is
the ratio of throughputs in the same round. Scripts in tests/measure/peers start other engines.

Without --url and --scenario, an engine starts here and arms take turns on it, round by round: "off" (no drafts),
"verify all", "planned", and only if named "across": planned, with lookup in the round's other texts. A block-diffusion
model has arms D=0 to D=3, named after the number of drafted states. Prompts of several files are mixed. tau is tokens
per request and step; a table, and --json FILE for `outrider simulate`, have acceptance by position.
With --level every third request has a service level, "level kept" is the share that got it, and the arm "no levels"
plans without levels. Times are medians over the rounds. If no profile fits, a quick one is measured first.

examples:
  outrider bench load --url http://127.0.0.1:30000 --rate 0.5,1,2,4 --seconds 60 --goodput ttft:500 tpot:50
  outrider bench load --url ours=http://127.0.0.1:30000 vllm=http://127.0.0.1:8000 --concurrency 1,8 --seconds 20
  outrider bench load --scenario deploy/loadtest/chat.toml --json chat.json --csv chat.csv --plot chat.png
  outrider bench load --prompts sessions.jsonl --concurrency 1 --count 10 --arms planned across
  outrider bench load --prompts code.jsonl math.jsonl chat.jsonl --concurrency 1,8,32 --plot load.png
"""

import argparse
from pathlib import Path

from ...errors import UserError
from ...settings.flags import MOVED as MOVED_ENGINE
from ...settings.flags import add_engine_flags, add_unmasking_flags
from .. import harness
from . import arms, by_url

MOVED = MOVED_ENGINE | {"--long-prompts": "`python tests/measure/long_prompts.py` in a checkout"}

SHARED = ("model", "api_key")
"""Flags that are taken for both: for a server by URL `model` is the requested model's name."""


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
    of_url = parser.add_argument_group("a server by URL")
    by_url.add_flags(of_url)
    of_arms = parser.add_argument_group("an engine of our own (--model: by URL, the name to ask for)")
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
    parser.set_defaults(of_url=of_url._group_actions, of_arms=of_arms._group_actions)


def run(args: argparse.Namespace) -> int:
    """Measure; return 1 if no request was answered."""
    chosen = args.url is not None or args.scenario is not None
    others = args.of_arms if chosen else args.of_url
    for action in others:
        if action.dest not in SHARED and getattr(args, action.dest) != action.default:
            raise UserError(f"{action.option_strings[0]} goes {'without' if chosen else 'with'} --url or --scenario")
    if args.rounds is not None:
        harness.check_positive(args, "rounds")
    harness.check_outputs(args)
    results = (by_url if chosen else arms).run(args)
    return 0 if any(one.whole for of_load in results.values() for rounds in of_load.values() for one in rounds) else 1
