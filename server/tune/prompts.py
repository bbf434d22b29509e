"""The prompts that a calibration asks, and at which temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import outrider.profiles
from outrider.drafters.training.prompts import read_samples

PROMPTS = Path(outrider.profiles.__file__).parent / "prompts.jsonl"
SAMPLED = (1.0, 0.7, 0.4)
"""Temperatures of the sampled class: how far confidences are off changes with the temperature, and it has one fit."""


def built_in_questions() -> list[str]:
    """Code, math and chat in turn, ours."""
    return [sample.turns[0] for sample in read_samples(PROMPTS)]


def with_temperatures(questions: Sequence[str]) -> list[tuple[str, float]]:
    """Each question with one of SAMPLED, another one after nine: of prompts that come in turn, as the built-in ones do,
    every kind meets each of them, and so do both parts of `measure.split`."""
    return [(question, SAMPLED[place // 9 % len(SAMPLED)]) for place, question in enumerate(questions)]
