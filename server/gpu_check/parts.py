"""Which steps each part has. A part needs nothing that a later one needs beyond it."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.server.errors import UserError
from outrider.server.gpu_check.device import Device
from outrider.server.gpu_check.report import Measured

Check = Callable[[Device], Iterator[Measured]]


@dataclass(frozen=True, slots=True)
class Part:
    """needs: beside torch and Triton. steps: name and "module:function" in this folder, what tells most first."""

    title: str
    needs: str
    steps: dict[str, str]


PARTS = {
    "A": Part(
        "kernels, alone and as a decode step",
        "nothing",
        {
            "limits": "speed:limits",
            "attention": "attention:references",
            "lengths": "kernels:lengths",
            "bits": "kernels:bits",
            "acceptance": "kernels:acceptances",
            "law": "kernels:law",
            "waits": "step:waits",
            "graphs": "step:graphs",
            "shares": "speed:shares",
            "overhead": "speed:overhead",
            "distributions": "kernels:distributions",
            "drafts": "kernels:drafts",
            "invariance": "attention:invariance",
        },
    ),
    "B": Part(
        "FlashInfer by our plans",
        "FlashInfer",
        {
            "references": "flashinfer:references",
            "replays": "flashinfer:replays",
            "plans": "flashinfer:plans",
        },
    ),
}


def chosen(names: list[str]) -> list[tuple[str, list[str]]]:
    """Parts with their steps, of names like A or A:graphs. Raises UserError with those that there are."""
    found: dict[str, list[str]] = {}
    for given in names:
        letter, _, step = given.partition(":")
        part = PARTS.get(letter.upper())
        if part is None:
            raise UserError(f"a part is one of {', '.join(PARTS)}, not {letter!r}")
        if step and step not in part.steps:
            raise UserError(f"steps of part {letter.upper()} are {', '.join(part.steps)}, not {step!r}")
        found.setdefault(letter.upper(), []).extend([step] if step else part.steps)
    return list(found.items())


def check(part: str, step: str) -> Check:
    """Imports what the step needs."""
    function: Check = pkgutil.resolve_name(f"{__package__}.{PARTS[part].steps[step]}")
    return function
