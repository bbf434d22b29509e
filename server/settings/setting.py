"""One declaration per setting: its default, its flag, its checks and its help, kept in the dataclass field."""

import argparse
import os
import re
import typing
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from ..errors import UserError

FLAG = "flag"
METAVARS: dict[type, str] = {int: "N", float: "S", Path: "FILE"}
"""Metavars of flags that name none: a number, seconds, a file."""


class Flags(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The flag of a setting.

    group: heading in `outrider serve --help`. help: for `--help` and server/README, in Markdown. metavar: name of the
    value, if not the usual one of its type. unset: effect of leaving the flag out, if the default is None. choices: all
    values that the flag takes. bounds: least and most of a number; exempt: a further value. environment: variables that
    replace the flag; the first that is set counts.
    """

    group: str
    help: str
    metavar: str | None = None
    unset: str = ""
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    exempt: float | None = None
    environment: tuple[str, ...] = ()


def setting(group: str, default: Any, help: str, **flag: Any) -> Any:
    """Return a dataclass field with a flag; `flag` are further fields of `Flag`."""
    return field(default=default, metadata={FLAG: Flag(group=group, help=help, **flag)})


def name_of(name: str) -> str:
    """Return the flag of a setting, as users write it."""
    return "--" + name.replace("_", "-")


def check(settings: Any) -> None:
    """Raise UserError for the first setting with a value outside its choices or bounds."""
    for each, flag in declared(type(settings)):
        value = getattr(settings, each.name)
        if flag.choices and value not in flag.choices:
            raise UserError(f"{name_of(each.name)} is one of {', '.join(flag.choices)}, not {value!r}")
        if flag.bounds is not None and value is not None and value != flag.exempt:
            require_between(each.name, value, *flag.bounds)


def require_between(name: str, value: float, least: float, most: float) -> None:
    """Raise UserError if `value` of setting `name` is outside its bounds."""
    if not least <= value <= most:
        raise UserError(f"{name_of(name)} is a number from {least} to {most}, not {value}")


def declared(settings: type) -> list[tuple[Field[Any], Flag]]:
    """Return the fields that have a flag, in the order in which they are declared."""
    return [(each, each.metadata[FLAG]) for each in fields(settings) if FLAG in each.metadata]


def add_flags(parser: Flags, settings: type, names: Iterable[str], **changed: dict[str, Any]) -> None:
    """Add the flags of the named settings. changed: argparse options, by setting, that replace the declared ones."""
    known = {each.name: (each, flag) for each, flag in declared(settings)}
    types = typing.get_type_hints(settings)
    for name in names:
        each, flag = known[name]
        options = _argparse_options(each, flag, types[name]) | changed.get(name, {})
        parser.add_argument(name_of(name), **options)


def _argparse_options(each: Field[Any], flag: Flag, annotation: Any) -> dict[str, Any]:
    default = next(filter(None, map(os.environ.get, flag.environment)), each.default)
    shown = default_in_words(each, flag)
    text = _plain(flag.help + (f" (default: {shown})" if shown else ""))
    options: dict[str, Any] = {"default": default, "help": text.replace("%", "%%")}
    kind = next(kind for kind in (bool, int, float, Path, tuple, str) if _is(annotation, kind))
    metavar = flag.metavar or METAVARS.get(kind)
    if kind is bool:
        return options | {"action": argparse.BooleanOptionalAction if each.default else "store_true"}
    if kind is tuple:
        return options | {"type": _names, "metavar": metavar}
    if flag.choices:
        return options | {"choices": flag.choices}
    return options | {"type": kind, "metavar": metavar}


def _is(annotation: Any, kind: type) -> bool:
    parts = typing.get_args(annotation) or (annotation,)
    return kind in parts or typing.get_origin(annotation) is kind


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def default_in_words(each: Field[Any], flag: Flag) -> str:
    if flag.unset or each.default is None:
        return flag.unset
    if isinstance(each.default, bool):
        return "yes" if each.default else ""
    return f"{each.default:g}" if isinstance(each.default, float) else str(each.default)


def _plain(markdown: str) -> str:
    """Return the text without the marks of code and links."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown.replace("`", ""))
