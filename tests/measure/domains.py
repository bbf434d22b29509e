"""Prompts of a domain, for learning.py, made from words and numbers; held-out prompts have other words.

    python tests/measure/domains.py invoices --out prompts

writes prompts/invoices.jsonl (400 prompts) and prompts/invoices-held-out.jsonl (60). The other domains are sql and
tickets.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

COMPANIES = "Alder,Birch,Cedar,Dunlin,Egret,Finch,Gannet,Heron,Ibis,Juniper,Kestrel,Larch,Maple,Nuthatch,Osprey,Plover"
TRADES = "Tools,Printing,Bikes,Glass,Catering,Paper,Lighting,Gardens,Software,Freight,Textiles,Ceramics,Optics,Timber"
CITIES = "Lisbon,Ghent,Turin,Graz,Bergen,Porto,Leeds,Bonn,Lyon,Delft,Basel,Aarhus,Cork,Vigo,Brno,Split,Tartu,Riga"
GOODS = "hammer,lamp,desk,cable,notebook,chair,printer,vase,bolt,shelf,kettle,monitor,rope,ladder,drill,bucket,fan,tile"
TABLES = "orders,customers,products,payments,shipments,employees,suppliers,tickets,invoices,visits,accounts,courses"
COLUMNS = "name,city,price,status,created_at,quantity,country,email,total,category,weight,score,phone,due_date,discount"


def invoices(rng: random.Random) -> str:
    """An invoice, to be written as JSON."""
    lines = [
        f"{rng.randint(1, 40)} x {good} at {rng.randint(100, 9999) / 100:.2f}"
        for good in rng.sample(GOODS.split(","), rng.randint(2, 4))
    ]
    seller = f"{pick(rng, COMPANIES)} {pick(rng, TRADES)}"
    return (
        "Write this invoice as JSON with the keys number, date, seller, buyer, city, items (name, quantity, price). "
        f"Answer with the JSON alone.\n\nInvoice {rng.randint(1000, 99999)}, {date(rng)}\nFrom: {seller}\n"
        f"To: {pick(rng, COMPANIES)} {pick(rng, TRADES)}, {pick(rng, CITIES)}\n" + "\n".join(lines)
    )


def sql(rng: random.Random) -> str:
    """Two tables and a question, to be answered by a query."""
    first, second = rng.sample(TABLES.split(","), 2)
    columns = rng.sample(COLUMNS.split(","), 7)
    key = f"{first.removesuffix('s')}_id"
    question = rng.choice(
        [
            f"the {columns[0]} and {columns[1]} of all {first} whose {columns[2]} is above {rng.randint(2, 900)}",
            f"how many {second} there are for each {columns[0]} of their {first.removesuffix('s')}",
            f"the {rng.randint(3, 20)} {first} with the largest {columns[2]}, and the {columns[4]} of their {second}",
            f"the average {columns[5]} of the {second} for every {columns[1]} of the {first}",
        ]
    )
    return (
        "Write one SQL query for this schema, then explain it in one sentence.\n\n"
        f"CREATE TABLE {first} (id INTEGER PRIMARY KEY, {', '.join(f'{c} TEXT' for c in columns[:4])});\n"
        f"CREATE TABLE {second} (id INTEGER PRIMARY KEY, {key} INTEGER REFERENCES {first}(id), "
        f"{', '.join(f'{c} TEXT' for c in columns[4:])});\n\nQuestion: {question}?"
    )


def tickets(rng: random.Random) -> str:
    """A customer's message, to be sorted and answered in the form of a help desk."""
    good, company, days = pick(rng, GOODS), f"{pick(rng, COMPANIES)} {pick(rng, TRADES)}", rng.randint(2, 30)
    message = rng.choice(
        [
            f"I ordered {rng.randint(2, 9)} of your {good}s {days} days ago; none has come to {pick(rng, CITIES)}.",
            f"The {good} from order {rng.randint(1000, 99999)} came broken. I want my money back.",
            f"You charged me {rng.randint(20, 900)} euros twice for one {good}.",
            f"Does the {good} also come in {rng.choice(['black', 'red', 'a smaller size', 'oak', 'steel'])}?",
        ]
    )
    return (
        f"You work at the help desk of {company}. Answer this message in YAML with the keys topic, urgency, summary, "
        f"reply and next_steps (a list). Answer with the YAML alone.\n\n{message}"
    )


def pick(rng: random.Random, words: str) -> str:
    return rng.choice(words.split(","))


def date(rng: random.Random) -> str:
    return f"20{rng.randint(19, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


DOMAINS: dict[str, Callable[[random.Random], str]] = {"invoices": invoices, "sql": sql, "tickets": tickets}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("domain", choices=DOMAINS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--count", type=int, default=400, help="prompts to serve (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=60, help="prompts to ask alone (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(f"{args.domain} {args.seed}")
    prompts: list[str] = []
    while len(prompts) < args.count + args.held_out:
        if (prompt := DOMAINS[args.domain](rng)) not in prompts:
            prompts.append(prompt)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in (
        (args.domain, prompts[args.held_out :]),
        (f"{args.domain}-held-out", prompts[: args.held_out]),
    ):
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in chosen))


if __name__ == "__main__":
    main()
