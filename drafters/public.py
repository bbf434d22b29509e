"""Public drafters by target, as the pages of `public.toml` name them. Nothing is fetched here."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIST = Path(__file__).with_suffix(".toml")
STORAGE = re.compile(
    r"[-_.](ud|awq|gptq|gguf|bnb|fp8|nvfp4|mxfp4|bf16|f16|fp16|int[48]|[48]bit|w\d+a\d+|i?q\d)(?=[-_.]|$).*"
)
"""The part of a lower-case name that says how weights are stored, with what follows it."""


@dataclass(frozen=True, slots=True)
class PublicDrafter:
    """One repository of the hub. kind: as `registry.serving` takes it. target: whom it drafts for. source: page."""

    repo: str
    kind: str
    target: str
    source: str


@cache
def listed() -> tuple[PublicDrafter, ...]:
    """All of them, in the order of the list."""
    pages = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return tuple(
        PublicDrafter(repo, kind, target, source)
        for source, drafters in pages.items()
        for repo, (kind, target) in drafters.items()
    )


def drafting_for(name: str) -> tuple[PublicDrafter, ...]:
    """Those of a target, by its name: that of a folder, a GGUF file or a repository, with or without its owner."""
    wanted = plain_name(name)
    return tuple(drafter for drafter in listed() if plain_name(drafter.target) == wanted)


def plain_name(name: str) -> str:
    """A model's name without owner, case and storage format: `Qwen/Qwen3-8B-AWQ` and `qwen3-8b-Q4_K_M` are one."""
    return STORAGE.sub("", name.rpartition("/")[2].lower()).removeprefix("meta-")
