"""Which steps each part has. A part needs nothing that a later one needs beyond it; T needs no SGLang."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .report import Measured

Check = Callable[[Any], Iterator[Measured]]
"""Takes a `Device`, or where the part's steps run commands the `Commands`."""


@dataclass(frozen=True, slots=True)
class Part:
    """needs: beside torch and Triton. steps: name and "module:function" in this folder, what tells most first.

    commands: its steps are commands of ours in processes of their own.
    """

    title: str
    needs: str
    steps: dict[str, str]
    commands: bool = False


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
            "tail": "tail:merged",
            "shares": "speed:shares",
            "overhead": "speed:overhead",
            "distributions": "kernels:distributions",
            "drafts": "kernels:drafts",
            "invariance": "attention:invariance",
        },
    ),
    "B": Part(
        "FlashInfer by our plans, fa3 and FlashInfer over pages",
        "FlashInfer, sglang-kernel for fa3",
        {
            "references": "flashinfer:references",
            "replays": "flashinfer:replays",
            "pages": "paged:pages",
            "plans": "flashinfer:plans",
            "shares": "paged:shares",
        },
    ),
    "C": Part(
        "servers of the embedded model: exact, statistical, seeds, overlap and graphs",
        "SGLang, pytest and what tests ask with",
        {
            "greedy": "lossless:greedy",
            "running": "lossless:running",
            "sampled": "lossless:sampled",
            "seeds": "lossless:seeds",
            "planned": "lossless:planned",
            "rules": "lossless:rules",
        },
        commands=True,
    ),
    "D": Part(
        "profile, calibration and load",
        "SGLang",
        {
            "tune": "load:tuned",
            "load 8": "load:load_8",
            "load 64": "load:load_64",
            "load 1": "load:load_1",
            "load 256": "load:load_256",
        },
        commands=True,
    ),
    "E": Part(
        "a step of Qwen3-8B's shape",
        "SGLang",
        {"overhead": "large:overhead", "tune": "large:tuned", "simulated": "large:simulated"},
        commands=True,
    ),
    "F": Part(
        "mixed load by each attention backend",
        "SGLang",
        {"fa3": "endurance:fa3", "flashinfer": "endurance:flashinfer", "outrider": "endurance:outrider"},
        commands=True,
    ),
    "T": Part(
        "training for the embedded model",
        "transformers and the embedded model",
        {"dspark": "training:dspark", "deer": "training:deer", "dllm": "training:dllm"},
        commands=True,
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
