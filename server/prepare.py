"""Unpack the embedded model into the user's cache, check it, and print its folder."""

from __future__ import annotations

import argparse

from outrider.server import embedded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments; OUTRIDER_CACHE or XDG_CACHE_HOME choose the place."""


def run(args: argparse.Namespace) -> int:
    print(embedded.prepare())
    return 0
