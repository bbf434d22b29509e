"""Public drafters by target, as the pages of `public.toml` list them. This module fetches nothing."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIST = Path(__file__).with_suffix(".toml")
STORAGE = re.compile(
    r"[-_.](ud|awq|gptq|gguf|bnb|fp8|nvfp4|mxfp4|bf16|f16|fp16|int[48]|[48]bit|w\d+a\d+|i?q\d)(?=[-_.]|$).*"
)
"""The part of a lower-case name that says how weights are stored, and everything after it."""


@dataclass(frozen=True, slots=True)
class PublicDrafter:
    """One repository of the hub. kind: as `registry.serving` takes it. target: the model that it drafts for. source:
    the page that lists it."""

    repo: str
    kind: str
    target: str
    source: str


@cache
def listed() -> tuple[PublicDrafter, ...]:
    """Return all public drafters, in the order of the list."""
    pages = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return tuple(
        PublicDrafter(repo, kind, target, source)
        for source, drafters in pages.items()
        for repo, (kind, target) in drafters.items()
    )


def drafting_for(name: str) -> tuple[PublicDrafter, ...]:
    """Return the drafters of a target, by the name of its folder, GGUF file or repository, with or without owner."""
    wanted = plain_name(name)
    return tuple(drafter for drafter in listed() if plain_name(drafter.target) == wanted)


def plain_name(name: str) -> str:
    """Strip owner, case and storage format from a model's name: `Qwen/Qwen3-8B-AWQ` and `qwen3-8b-Q4_K_M` are one."""
    return STORAGE.sub("", name.rpartition("/")[2].lower()).removeprefix("meta-")
