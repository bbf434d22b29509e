"""Make an API key and add it to a file of keys for `outrider serve --api-keys FILE`, list the keys, or remove one.

The key is printed once; the file holds its hash. A running server reads a changed file within a second. Token limits
count prompts and answers together, like `usage` in the answers, cached tokens included.

examples:
  outrider key team-a --api-keys keys.toml --rate 600/minute --concurrency 8
  outrider key team-b --api-keys keys.toml --tokens-per-minute 100000 --tokens-per-day 5000000
  outrider key operator --api-keys keys.toml --admin
  outrider key --list --api-keys keys.toml
  outrider key team-a --remove --api-keys keys.toml

To change a key's limits, edit its table in the file: rate, concurrency, tokens_per_minute, tokens_per_day,
max_tokens_per_request, admin, learn.
"""

import argparse
from pathlib import Path

from ..errors import UserError
from ..http.keys import key_file

LIMITS = ("rate", *key_file.NUMBERS, "admin")
SHOWN = {None: "-", False: "-", True: "yes"}
HELP = {
    "concurrency": "choices at the same time: n, for each prompt, of all requests together",
    "tokens_per_minute": "in any minute; an answer counts as its max_tokens until it has ended",
    "tokens_per_day": "the same, from midnight to midnight UTC",
    "max_tokens_per_request": "of prompt and all choices; also the limit of a request without max_tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="name of the key in logs: letters, digits, dashes, underscores"
    )
    parser.add_argument(
        "--api-keys", required=True, type=Path, metavar="FILE", help="file of keys (TOML), made if there is none"
    )
    limits = parser.add_argument_group("limits of a new key (default: none)")
    limits.add_argument("--rate", metavar="N/UNIT", help="requests per second, minute or hour")
    for name, text in HELP.items():
        limits.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=text)
    limits.add_argument("--admin", action="store_true", help="may also use /outrider/tune")
    limits.add_argument(
        "--no-learn", dest="learn", action="store_false", help="keep none of its answers for the drafter to learn from"
    )
    instead = parser.add_argument_group("instead of making a key").add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="print the keys' names and limits")
    instead.add_argument("--remove", action="store_true", help="take the key NAME back")


def run(args: argparse.Namespace) -> int:
    """Print the key, or the list, alone to stdout."""
    given = [name for name in LIMITS if getattr(args, name) not in (None, False)]
    if args.list or args.remove:
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} goes with a new key; to change one, edit {args.api_keys}")
        if args.list and args.name is not None:
            raise UserError(f"--list shows all keys; leave {args.name} out")
    if args.list:
        print(_table(key_file.read(args.api_keys)))
        return 0
    if args.name is None:
        raise UserError("name the key: outrider key NAME --api-keys FILE, or list them: outrider key --list")
    if args.remove:
        key_file.remove(args.api_keys, args.name)
        return 0
    print(_create(args))
    return 0


def _create(args: argparse.Namespace) -> str:
    for name in key_file.NUMBERS:
        number = getattr(args, name)
        if number is not None and not 1 <= number <= key_file.MOST:
            raise UserError(f"--{name.replace('_', '-')} is a number from 1 to {key_file.MOST}, not {number}")
    try:
        rate = key_file.RequestRate.parse(args.rate) if args.rate is not None else None
    except ValueError as error:
        raise UserError(f"--rate: {error}") from None
    secret = key_file.new()
    key = key_file.Key(
        name=args.name,
        digest=key_file.digest(secret.encode()),
        rate=rate,
        admin=args.admin,
        learn=args.learn,
        **{name: getattr(args, name) for name in key_file.NUMBERS},
    )
    key_file.add(args.api_keys, key)
    return secret


def _table(keys: tuple[key_file.Key, ...]) -> str:
    rows = [("name", *(name.replace("_", " ") for name in LIMITS))]
    for key in keys:
        values = (getattr(key, name) for name in LIMITS)
        rows.append((key.name, *(SHOWN.get(value, str(value)) for value in values)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
