"""The tables of docs/performance.md: columns and rows from a record of each question."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from outrider.server.bench import harness

Record = Mapping[str, Any]
Row = Sequence[str]


def model(one: Record) -> str:
    """The engine's model, or the first server's."""
    return str(one["engine"]["model"] if "engine" in one else next(iter(one["models"].values())))


def _load(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per arm. "planned" is compared with "off"; servers by URL are compared with the first."""
    results = dict(sorted(one["results"].items(), key=lambda load: float(load[0])))
    for arm in next(iter(results.values())):
        cells, about = [], []
        for arms in results.values():
            first = "off" if "engine" in one else next(iter(arms))
            compared = first in arms and (arm == "planned" or "engine" not in one)
            cells.append(_over(arms, arm, first if compared else arm, itemgetter("throughput")))
        if "engine" in one:
            tau = [r["counts"]["tau"] for arms in results.values() for r in arms[arm]]
            about = [("drafter", one["engine"]["drafter"]), ("tau", f"{statistics.median(tau):.2f}")]
        else:
            memory = one["memory_mb"].get(arm)
            about = [("MB", f"{memory:.0f}" if memory else "–")]
        yield (
            ["model", "arm", *(f"{load} in flight" for load in results), *(name for name, _ in about)],
            [model(one), arm, *cells, *(cell for _, cell in about)],
        )


def _learning(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per load and server after the first: the effect of learning, or of merely another process."""
    prompts = ", ".join(Path(path).stem for asked in one["scenario"]["requests"] for path in asked["prompts"])
    for load, arms in one["results"].items():
        first, *others = arms
        for arm in others:
            cells = []
            for read in LEARNING.values():
                ratios = [read(a) / read(b) for a, b in zip(arms[arm], arms[first], strict=True)]
                cells.append(f"{statistics.fmean(ratios):.3f} ± {statistics.stdev(ratios) / len(ratios) ** 0.5:.3f}")
            columns = ["prompts", "in flight", f"over {first}", "rounds", *LEARNING]
            yield columns, [prompts, load, arm, str(len(arms[arm])), *cells]


LEARNING: Mapping[str, Callable[[Record], float]] = {
    "tokens/s": lambda one: one["throughput"],
    "p99 gap": lambda one: one["gap"]["p99"],
    "processor time a token": lambda one: one["processor_ms"],
}


def _prompts(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per arm; its times to the first token are compared with the first server's."""
    results = one["results"]
    tokens = "+".join(f"{asked['input_tokens']['mean']:.0f}" for asked in one["scenario"]["requests"])
    first, *others = next(iter(results.values()))
    for arm in (first, *others):
        cells = [_over(arms, arm, first, lambda r: r["ttft"]["p50"], 2) for arms in results.values()]
        yield ["model", "tokens", "arm", *(f"{load} in flight" for load in results)], [model(one), tokens, arm, *cells]


def _long_prompts(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per length and arm: medians, and the ratio of throughputs to the first arm."""
    columns = ["longest pause, s", "pace kept", "first token, s", "× alone", "short prompt behind, s", "tokens/s"]
    for tokens, arms in sorted(one["results"].items(), key=lambda found: float(found[0])):
        for arm, rounds in arms.items():
            found = [[r["pause"], r["pace"], r["beside"], r["beside"] / r["alone"], r["short"]] for r in rounds]
            cells = [f"{statistics.median(values):.2f}" for values in zip(*found, strict=True)]
            cells.append(_over(arms, arm, next(iter(arms)), itemgetter("throughput")))
            yield ["model", "tokens", "arm", *columns], [model(one), tokens, arm, *cells]


def _mixed(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per load and arm."""
    columns = ["p99 gap, ms", "longest, ms", "tokens/s", "with prompts", "levels kept", "in time"]
    unit = "in flight" if one["scenario"]["arrivals"]["kind"] == "closed" else "requests/s"
    for load, arms in sorted(one["results"].items(), key=lambda found: float(found[0])):
        for arm, rounds in arms.items():
            gaps = [f"{statistics.median(r['gap'][name] for r in rounds) * 1e3:.0f}" for name in ("p99", "largest")]
            rates = [_over(arms, arm, next(iter(arms)), itemgetter(name)) for name in ("throughput", "with_prompts")]
            shares = [
                "–" if any(r[name] is None for r in rounds) else f"{statistics.median(r[name] for r in rounds):.0%}"
                for name in ("level_kept", "good")
            ]
            yield ["model", unit, "arm", *columns], [model(one), load, arm, *gaps, *rates, *shares]


def _over(
    arms: Mapping[str, Sequence[Record]], arm: str, first: str, read: Callable[[Record], float], digits: int = 0
) -> str:
    """An arm's median, with its ratio to the arm `first` unless it is that one."""
    values = [read(one) for one in arms[arm]]
    over = "" if arm == first else f" = {harness.ratio(values, [read(one) for one in arms[first]]).cell} × {first}"
    return f"{statistics.median(values):.{digits}f}{over}"


def _blocks(one: Record) -> Iterable[tuple[Row, Row]]:
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for case, times in one["results"].items():
        kind, rows = case.split()
        found.setdefault(kind, {})[rows] = times
    for kind, by_rows in found.items():
        first = next(iter(by_rows.values()))["int8"]
        cells = [
            f"{harness.ratio(times['float'], times['int8']).median:.1f} ×, "
            f"{harness.ratio(times['int8'], first).median:.2f}"
            for times in by_rows.values()
        ]
        yield ["weight", *(f"{rows} rows" for rows in by_rows)], [kind, *cells]


def _quality(one: Record) -> Iterable[tuple[Row, Row]]:
    for arm, groups in one["results"].items():
        whole = groups["all"]
        kls = {name: f"{found['kl']:.4f} ± {found['kl_error']:.4f}" for name, found in groups.items()}
        yield (
            ["model", "arm", "tokens", *kls, "99th percentile", "same"],
            [
                one["engine"]["model"],
                f"{arm} beside {one['first']}",
                str(whole["tokens"]),
                *kls.values(),
                f"{whole['kl_p99']:.3f}",
                f"{whole['same']:.1%}",
            ],
        )


def _scores(one: Record) -> Iterable[tuple[Row, Row]]:
    for task, servers in one["results"].items():
        first = next(iter(servers))
        cells = [
            f"{found['score']:.1%} ± {found['error']:.1%}"
            + (f"; {found['won']}, {found['lost']}" if name != first else "")
            for name, found in servers.items()
        ]
        yield ["task", "questions", *servers], [task, str(servers[first]["questions"]), *cells]


def _drafters(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per drafter and file of prompts; acceptance by position is at the first temperature."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for case, counts in one["results"].items():
        name, prompts, temperature = case.rsplit(", ", 2)
        found.setdefault((name, prompts), {})[temperature] = counts
    for (name, prompts), by_temperature in found.items():
        first, trained = next(iter(by_temperature.values())), one["trained"][name.partition(",")[0]]
        pairs = zip(first["kept"], first["tried"], strict=True)
        by_position = " ".join(f"{k / t:.2f}".lstrip("0") if t else "–" for k, t in pairs)
        taus = {f"tau, {temperature}": f"{counts['tau']:.2f}" for temperature, counts in by_temperature.items()}
        yield (
            ["drafter", "prompts", "answers, anchors", *taus, "by position"],
            [name, prompts, f"{trained['sequences']}, {trained['anchors']}", *taus.values(), by_position],
        )


def _served(one: Record) -> Iterable[tuple[Row, Row]]:
    """A row per engine: throughput of "planned" over "off"."""
    rates = {
        load: {arm: [r["throughput"] for r in rounds] for arm, rounds in arms.items()}
        for load, arms in one["results"].items()
    }
    cells = [harness.ratio(arms["planned"], arms["off"]).cell for arms in rates.values()]
    yield ["drafter", *(f"{load} in flight" for load in rates)], [one["engine"]["drafter"], *cells]


def _plan(one: Record) -> Iterable[tuple[Row, Row]]:
    results = one["results"]
    totals = [f"{statistics.median(times['total']):.0f} µs" for times in results.values()]
    yield ["requests", *results], [str(one["requests"]), *totals]


def _learn(one: Record) -> Iterable[tuple[Row, Row]]:
    results, names = one["results"], one["results"]["held_out"]
    before, after = results["before"], results["after"]

    def change(chosen: Sequence[str]) -> str:
        taus = [sum(a[n]["tokens"] for n in chosen) / sum(a[n]["steps"] for n in chosen) for a in (before, after)]
        return f"{taus[0]:.2f} → {taus[1]:.2f} = {taus[1] / taus[0]:.2f} ×"

    general, last = [name for name in before if name not in names], results["curve"][-1]
    first, seconds = results["first_promotion_seconds"], last["learner_seconds"]
    yield (
        ["held-out prompts", "tokens a step", "general prompts", "first promotion", "learner's processor s"],
        [
            ", ".join(names) + (", from former weights" if one.get("former") else ""), change(names),
            change(general) if general else "–",
            "–" if first is None else f"{first:.0f} s", "–" if seconds is None else f"{seconds:.0f}",
        ],
    )  # fmt: skip


QUESTIONS: dict[str, tuple[str, str, Callable[[Record], Iterable[tuple[Row, Row]]]]] = {
    "load": (
        "Throughput, with speculation and without", "Tokens per second on one engine, greedy; "
        "tau: tokens per request and step.", _load
    ),
    "learn": (
        "A server that learns", "Prompts that it never learns from, before and after; promotion since the first pause. "
        "sql: 48 general answers, else 144.", _learn
    ),
    "learning by URL": (
        "Learning beside not learning", "A server with `--learn` over one without, mean ± standard error. "
        "learned: with a learned drafter; learn: learning in pauses; again: not learning.",
        _learning
    ),
    "load by URL": (
        "Beside other engines", "Tokens per second of all requests over HTTP, greedy; MB of all processes of a server.",
        _load
    ),
    "schemas by URL": (
        "Answers in JSON", "`deploy/loadtest/schemas.toml`; off: without speculation; before: forced text "
        "in the tokenizer's tokens; compact: without white space.", _load
    ),
    "prompts by URL": (
        "Prompts beside other engines", "Seconds to the first token, by a prompt's tokens.", _prompts
    ),
    "long prompts": (
        "A long prompt beside four streams", "The streams' longest pause and the share of pace kept; first tokens "
        "of that prompt, and of one of 50 tokens sent 0.5 s later; tokens/s count prompts.",
        _long_prompts
    ),
    "mixed prompts by URL": (
        "Short and long prompts at once", "Prompts of 50 to 6,000 tokens (`deploy/loadtest/mixed.toml`): gaps between "
        "pieces of an answer; requests that got their service level; of all, those with it and a first token in "
        "time.",
        _mixed
    ),
    "drafters": (
        "Drafters trained alike", "Without a server or lookup: tokens a step, and the share kept of drafts behind kept "
        "ones, by position.", _drafters
    ),
    "load of drafters": (
        "Served with these drafters", "Tokens per second, planned over without drafts, greedy.", _served
    ),
    "micro blocks": (
        "Integer products", "How much faster rows of 8 bits are than expanded floats; time over that of the least "
        "rows.", _blocks
    ),
    "quality": (
        "What rounding changes", "Next-token distributions over the model's own answers: mean KL divergence (nats) "
        "from the other arm, by temperature; tokens whose most probable is the same.",
        _quality
    ),
    "scores": (
        "lm-eval's scores", "Mean ± standard error; questions won, lost beside the first.", _scores
    ),
    "micro plan": ("A planner's step", "Processor time of planning.", _plan),
}  # fmt: skip
