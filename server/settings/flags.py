"""The flags that `outrider serve`, `tune` and `bench` share, and settings from their values."""

import argparse
from typing import Any

from .declared import DRAFTERS
from .setting import Flags, add_flags, declared
from .settings import Settings

TARGET = ("model", "dtype", "quantization", "activations", "device", "threads")
DRAFTER = (
    "drafter", "drafter_path", "lookup", "gamma", "denoising_steps", "initial_tokens", "verification",
)  # fmt: skip
UNMASKING = ("unmasking", "unmasking_threshold", "unmasking_tokens", "block_size")
MOVED = {
    "--lookup-gamma": "--gamma, which prompt lookup follows from 15 tokens on",
    "--lookup-tokens": "--no-lookup-across where 5 MB for each key are too much",
    "--denoising-order": "--denoising-steps; tokens are revealed from left to right",
    "--learn-tokens": "`outrider learn forget`; 2,000,000 tokens of answers are kept",
    "--learn-gigabytes": "a --learn-folder with room for 2 GB",
}
"""Former flags, and their replacements."""


def add_all_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `outrider serve`, in groups."""
    for title in dict.fromkeys(flag.group for _, flag in declared(Settings)):
        group = parser.add_argument_group(title)
        add_flags(group, Settings, [each.name for each, flag in declared(Settings) if flag.group == title])
    parser.add_argument("sglang_flags", nargs="*", metavar="-- SGLANG_FLAG", help="flags for SGLang, after --")


def add_engine_flags(parser: Flags, *, drafter: bool) -> None:
    """Add the flags of a command that measures an engine. drafter: also the flags of drafting."""
    add_flags(parser, Settings, TARGET)
    if drafter:
        drafting = [name for name in DRAFTERS if name != "off"]
        add_flags(parser, Settings, DRAFTER, drafter={"choices": drafting})


def add_unmasking_flags(parser: Flags) -> None:
    add_flags(parser, Settings, UNMASKING)


def settings_of(args: argparse.Namespace, **fixed: Any) -> Settings:
    """Return settings from the flags that measuring commands share; `fixed` are the command's own. Raises UserError."""
    shared = TARGET + DRAFTER + UNMASKING
    return Settings(**{name: getattr(args, name) for name in shared if hasattr(args, name)} | fixed)


def served_settings_of(args: argparse.Namespace) -> Settings:
    """Return settings from the flags of `add_all_flags`. Raises UserError for invalid ones."""
    given = {each.name: getattr(args, each.name) for each, _ in declared(Settings)}
    return Settings(**given, sglang_flags=tuple(args.sglang_flags))
