"""Default sampling of a request: the model's recommendation, or OpenAI's (`--sampling-defaults`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from .bounds import RANGES

OPENAI: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Defaults of OpenAI's API, and SGLang's for further fields; -1 and 0 turn one off."""
TURNED_OFF = {"top_k": 0}
"""Values by which Transformers and llama.cpp turn a parameter off, and which SGLang refuses."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """recommended: values of the model's authors, by field; empty with `--sampling-defaults openai`.

    ignored: recommended fields that requests may not set.
    """

    recommended: dict[str, float]
    ignored: dict[str, float]

    @classmethod
    def of(cls, manager: Any) -> Self:
        """Read them from SGLang's tokenizer manager."""
        defaults: dict[str, float] = manager.model_config.get_default_sampling_params()
        defaults = {name: value for name, value in defaults.items() if value != TURNED_OFF.get(name)}
        if manager.config_value("dllm_algorithm"):
            defaults.pop("repetition_penalty", None)  # block diffusion cannot apply it, see `validation`
        usable = {name: value for name, value in defaults.items() if RANGES[name].low <= value <= RANGES[name].high}
        return cls(usable, {name: value for name, value in defaults.items() if name not in usable})

    @property
    def applied(self) -> dict[str, float]:
        """The value of each field in a request without it."""
        return OPENAI | self.recommended

    def announce(self, log: Callable[..., None]) -> None:
        """Log the model's recommendation, if it has one."""
        if self.ignored:
            log(f"Sampling that the model recommends and no request may have is ignored: {_in_words(self.ignored)}")
        if self.recommended:
            text = f"Sampling by default: {_in_words(self.recommended)}"
            log(
                f"{text} (from the model; --sampling-defaults openai turns it off)",
                extra={"sampling_defaults": self.recommended},
            )


def _in_words(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())
