"""The flags that `outrider serve`, `tune` and `bench` share, and settings from what was given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Protocol

from .settings import (
    CHECKPOINT_DRAFTERS,
    DENOISING_DRAFTERS,
    DENOISING_ORDERS,
    DEVICES,
    DRAFTERS,
    DTYPES,
    QUANTIZATIONS,
    UNMASKINGS,
    Settings,
)

TARGET = ("model", "dtype", "quantization", "device", "threads")
DRAFTER = (
    "drafter", "drafter_path", "lookup", "gamma", "lookup_gamma", "denoising_steps", "denoising_order",
    "initial_tokens",
)  # fmt: skip
UNMASKING = ("unmasking", "unmasking_threshold", "unmasking_tokens", "block_size")


class Flags(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


def add_target_flags(flags: Flags) -> None:
    """What is served, and how it is computed."""
    defaults = Settings()
    flags.add_argument(
        "--model",
        metavar="PATH_OR_HUB_NAME",
        help="what to serve: a folder, a hub name, or a GGUF file (default: the embedded model)",
    )
    flags.add_argument("--dtype", choices=DTYPES, default=defaults.dtype, help="auto: float32 on CPUs without bfloat16")
    flags.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default=defaults.quantization,
        help="int8: 8-bit weights and activations on a CPU, faster and less accurate (default: %(default)s)",
    )
    flags.add_argument("--device", choices=DEVICES, default=defaults.device, help="(default: %(default)s)")
    flags.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of an engine on a CPU (default: one per physical core, less one where there are more than 4)",
    )


def add_drafter_flags(flags: Flags, drafters: Sequence[str] = DRAFTERS) -> None:
    """Who drafts, and how much; `drafters` are the choices."""
    defaults, trained = Settings(), " or ".join(CHECKPOINT_DRAFTERS)
    flags.add_argument(
        "--drafter",
        choices=drafters,
        default=defaults.drafter,
        help="who proposes tokens; auto: dspark with the embedded model, else ngram (default: %(default)s)",
    )
    flags.add_argument(
        "--drafter-path",
        metavar="PATH_OR_HUB_NAME",
        help=f"checkpoint of a {trained} drafter, a folder or a hub name (default: the shipped one)",
    )
    flags.add_argument(
        "--lookup",
        action=argparse.BooleanOptionalAction,
        default=defaults.lookup,
        help=f"leave text that repeats itself to prompt lookup, with a {trained} drafter (default: yes)",
    )
    flags.add_argument(
        "--gamma", type=int, default=defaults.gamma, metavar="N", help="draft tokens per step (default: %(default)s)"
    )
    flags.add_argument(
        "--lookup-gamma",
        type=int,
        default=defaults.lookup_gamma,
        metavar="N",
        help="of prompt lookup beside such a drafter, where it is more than --gamma (default: %(default)s)",
    )
    denoising = " or ".join(DENOISING_DRAFTERS)
    flags.add_argument(
        "--denoising-steps",
        type=int,
        metavar="N",
        help=f"forward passes for a draft of {denoising}, at most --gamma: more are slower and more often right "
        "(default: 1 for deer, 2 for specdiff)",
    )
    flags.add_argument(
        "--denoising-order",
        choices=DENOISING_ORDERS,
        default=defaults.denoising_order,
        help="which tokens these reveal: left: one in each, the last all others; even: as many in each, from left to "
        "right; certain: as many in each, the most certain first (default: %(default)s)",
    )
    flags.add_argument(
        "--initial-tokens",
        type=int,
        default=defaults.initial_tokens,
        metavar="N",
        help=f"of each answer, for which a {trained} drafter does not draft: they are left to prompt lookup, or with "
        "--no-lookup to nobody (default: %(default)s)",
    )


def add_unmasking_flags(flags: Flags) -> None:
    """How a block-diffusion model's tokens are revealed."""
    defaults = Settings()
    flags.add_argument(
        "--unmasking",
        choices=UNMASKINGS,
        default=defaults.unmasking,
        help="which masked tokens a forward reveals; threshold: all that are certain enough; static: a fixed number, "
        "the most certain (default: %(default)s)",
    )
    flags.add_argument(
        "--unmasking-threshold",
        type=float,
        default=defaults.unmasking_threshold,
        metavar="P",
        help="probability above which --unmasking threshold reveals a token; at least one is (default: %(default)s)",
    )
    flags.add_argument(
        "--unmasking-tokens",
        type=int,
        default=defaults.unmasking_tokens,
        metavar="N",
        help="that --unmasking static reveals in each forward (default: %(default)s)",
    )
    flags.add_argument(
        "--block-size", type=int, metavar="N", help="tokens of a block (default: what the model's config.json says)"
    )


def add_engine_flags(parser: Flags, *, drafter: bool) -> None:
    """The flags of a command that measures an engine; drafter: it drafts, so who does can be chosen."""
    add_target_flags(parser)
    if drafter:
        add_drafter_flags(parser, [name for name in DRAFTERS if name != "off"])


def settings_of(args: argparse.Namespace, **fixed: Any) -> Settings:
    """Settings from the flags of `add_engine_flags`; `fixed` are the measurement's own."""
    return Settings(
        **{name: getattr(args, name) for name in TARGET + DRAFTER + UNMASKING if hasattr(args, name)} | fixed
    )
