"""Make an API key and add it to a file of keys for `outrider serve --api-keys FILE`.

The key is printed once; the file holds its hash. A running server takes it up within a second. To take a key back,
remove its table from the file.

  outrider key team-a --api-keys keys.toml --rate 600/minute --concurrency 8
  outrider key operator --api-keys keys.toml --admin
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.server.errors import UserError
from outrider.server.http import keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="stands for the key in logs: letters, digits, dashes, underscores")
    parser.add_argument("--api-keys", required=True, type=Path, metavar="FILE", help="made if there is none")
    parser.add_argument("--rate", metavar="N/UNIT", help="requests per second, minute or hour (default: any number)")
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests at the same time (default: any number)")
    parser.add_argument("--admin", action="store_true", help="may also use /outrider/tune")


def run(args: argparse.Namespace) -> int:
    """Print the key; nothing else goes to stdout."""
    if args.concurrency is not None and args.concurrency < 1:
        raise UserError(f"--concurrency is a number from 1 on, not {args.concurrency}")
    try:
        rate = keys.Rate.parse(args.rate) if args.rate is not None else None
    except ValueError as error:
        raise UserError(f"--rate: {error}") from None
    secret = keys.new()
    key = keys.Key(
        name=args.name,
        digest=keys.digest(secret.encode()),
        rate=rate,
        concurrency=args.concurrency,
        admin=args.admin,
    )
    keys.add(args.api_keys, key)
    print(secret)
    return 0
