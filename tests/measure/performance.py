"""Write docs/performance.md, and README's chart, from the records in profiles/results.

Each question has a table, with one row per machine and model. The benchmarks' `--json` writes the records. A record
of drafter weights that are no longer shipped is left out, unless it measures learning or compares drafters.

examples:
  outrider bench load --prompts profiles/prompts.jsonl --concurrency 1,8,32 --json profiles/results/load-amx.json
  python tests/measure/performance.py
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import performance_chart
import script
from performance_rows import QUESTIONS, Record, Row, model
from records import read_record

from outrider.profiles.fingerprint import folder_digest
from outrider.server import pictures
from outrider.server.bench import harness
from outrider.server.errors import UserError
from outrider.server.settings.checkpoints import WEIGHTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE, CHART = ROOT / "profiles" / "results", ROOT / "docs" / "performance.md", ROOT / "docs" / "speed.svg"
EMBEDDED = "SmolLM2-135M-Instruct"
HEAD = """\
# Performance

`make performance` writes this page from the records in [profiles/results](../profiles/results), which
`outrider bench … --json` wrote, of today's weights, with command, machine (family/model), versions and date.
Ratios are of arms in turns: median (smallest–largest) over rounds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FOLDER", help="folder of records (default: ours)"
    )


def run(args: argparse.Namespace) -> int:
    if not (records := read_all(args.results)):
        raise UserError(f"--results {args.results} has no records of today's weights: `outrider bench load --json`")
    pictures.require("README's chart")
    PAGE.write_text(page(records))
    draw_chart(records, CHART)
    harness.log(f"{PAGE} holds {len(records)} records")
    return 0


def read_all(folder: Path) -> dict[str, Record]:
    """Records by file name; names on standard error each that is left out for its former weights."""
    today = {folder_digest(path.parent) for path in WEIGHTS.glob("*/*/config.json")}
    records = {path.name: read_record(path) for path in sorted(folder.glob("*.json"))}
    alike = {digest for one in records.values() if one["question"] == "drafters" for digest in one["weights"].values()}
    found: dict[str, Record] = {}
    for path, one in records.items():
        other = [name for name, digest in one["weights"].items() if name != "target" and digest and digest not in today]
        question = _question(one)
        if question == "load" and other and one["weights"]["drafter"] in alike:
            question = "load of drafters"
        if other and question not in ("learn", "drafters", "load of drafters"):
            harness.log(f"{path} is left out: {', '.join(other)} had other weights than are shipped today")
        else:
            found[path] = one | {"question": question, "former": bool(other)}
    return found


def _question(one: Record) -> str:
    """The record's question. Some kinds of loads by URL have one of their own."""
    asked = one.get("scenario", {}).get("requests", [])
    if asked and all(a["output_tokens"]["mean"] == 1 for a in asked):
        return "prompts by URL"
    if any(a.get("input_tokens") and a["input_tokens"]["mean"] is None for a in asked):
        return "mixed prompts by URL"
    if any("response_format" in a.get("body", {}) for a in asked):
        return "schemas by URL"
    return "learning by URL" if one.get("learning") else one["question"]


def page(records: Mapping[str, Record]) -> str:
    """The text of docs/performance.md."""
    parts = [HEAD]
    for question, (title, about, rows) in QUESTIONS.items():
        of_question = {name: one for name, one in records.items() if one["question"] == question}
        if not of_question:
            continue
        tables: dict[tuple[str, ...], list[Row]] = {}
        for one in merged(of_question.values()):
            for columns, row in rows(one):
                tables.setdefault(tuple(columns), []).append([machine(one), *row])
        parts.append(f"## {title}\n{about}\n")
        for columns, found in tables.items():
            above = ["", *(row[0] for row in found)]  # a machine is named once
            named = [["" if row[0] == last else row[0], *row[1:]] for row, last in zip(found, above, strict=False)]
            parts.append(table(["machine", *columns], named))
        sources = (f"- [{name}](../profiles/results/{name}), {one['date']}\n" for name, one in of_question.items())
        parts.append("".join(sources))
    return "\n".join(parts)


def draw_chart(records: Mapping[str, Record], path: Path) -> None:
    """Draw `performance_chart`: a panel for each processor on which other engines served the embedded model."""
    panels = {}
    for one in records.values():
        if (
            one["question"] == "load by URL"
            and model(one) == EMBEDDED
            and not performance_chart.OTHERS.isdisjoint(one["models"])
        ):
            panels[f"{model(one)} on {machine(one)}"] = performance_chart.speeds(one)
    with pictures.figure(path) as figure:
        performance_chart.draw(figure, panels)


def merged(records: Iterable[Record]) -> list[Record]:
    """Merge records of parts of one question, if they share machine, engine and weights."""
    found: dict[str, Record] = {}
    for one in records:
        learned = one["results"]["held_out"] if one["question"] == "learn" else None
        asked = one.get("scenario", {}).get("requests")
        of = [one["weights"], one.get("engine"), one.get("models"), one.get("requests"), asked, learned]
        key = json.dumps([one["machine"], *of])
        if key in found and isinstance(one["results"], dict):
            found[key] = {**found[key], "results": {**found[key]["results"], **one["results"]}}
        else:
            found[key] = one
    return list(found.values())


def machine(one: Record) -> str:
    """Processor (without its stepping), cores and instruction set."""
    device = re.sub(r", stepping \d+|\(R\)| Processor", "", one["machine"]["device"])
    device = re.sub(r"\(family (\d+), model (\d+)\)", r"(\1/\2)", device)
    return f"{device}, {one['machine']['cores']} cores, {one['machine']['instruction_set']}"


def table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
