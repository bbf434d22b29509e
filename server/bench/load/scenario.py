"""A load test as a TOML file: arrivals and contents of requests, and objectives of good answers. Each key is checked.

`deploy/loadtest/` has examples; docs/loadtest.md explains each key.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from ...errors import UserError


def _beside(path: Path, info: ValidationInfo) -> Path:
    return (info.context or Path()) / path


File = Annotated[Path, AfterValidator(_beside)]
"""A file; a relative path starts at the folder that is the context of validation."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Length(_Table):
    """Number of tokens: normally distributed and clipped to min and max, or without a mean log-uniform between them."""

    mean: PositiveFloat | None = None
    stdev: NonNegativeFloat = 0.0
    min: PositiveInt = 1
    max: PositiveInt = 1 << 20

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        return {"mean": value} if isinstance(value, int) else value

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.mean is None and "max" not in self.model_fields_set:
            raise ValueError("give a mean, or min and max")
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class Closed(_Table):
    """A closed loop with `concurrency` requests in flight: as one ends, the next begins."""

    kind: Literal["closed"]
    concurrency: list[PositiveInt] = Field(min_length=1)

    @property
    def loads(self) -> list[float]:
        return [float(n) for n in self.concurrency]


class _Open(_Table):
    """Requests per second, however many are in flight."""

    rate: list[PositiveFloat] = Field(min_length=1)

    @property
    def loads(self) -> list[float]:
        return self.rate


class Rate(_Open):
    """Requests at fixed intervals, or at random like independent users."""

    kind: Literal["fixed", "poisson"]


class Bursts(_Open):
    """`size` requests at once, `rate` requests per second in the mean."""

    kind: Literal["bursts"]
    size: PositiveInt


class Trace(_Table):
    """The times and the lengths or prompts of a trace file; speed 2 plays it twice as fast."""

    kind: Literal["trace"]
    file: File
    speed: list[PositiveFloat] = Field([1.0], min_length=1)

    @property
    def loads(self) -> list[float]:
        return self.speed


Arrivals = Annotated[Closed | Rate | Bursts | Trace, Field(discriminator="kind")]
UNITS = {"closed": "in flight", "fixed": "req/s", "poisson": "req/s", "bursts": "req/s", "trace": "speed"}


class Requests(_Table):
    """One kind of request; `weight` is its relative frequency.

    prompts: files of prompts. texts: the prompts themselves. input_tokens: length of made-up prompts. At most one of
        the three.
    shared_prefix_tokens: length of a common prefix of these prompts, like a system prompt. body: further fields.
    """

    name: str = ""
    weight: PositiveFloat = 1.0
    prompts: Annotated[list[File], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = []
    texts: list[str] = []
    input_tokens: Length | None = None
    shared_prefix_tokens: int = Field(default=0, ge=0)
    output_tokens: Length = Length(mean=128)
    body: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.prompts) + bool(self.texts) + (self.input_tokens is not None) > 1:
            raise ValueError("prompts, texts and input_tokens exclude each other")
        return self


class Objectives(_Table):
    """Most milliseconds of a good answer: to the first token, per token after it, to the end."""

    ttft: PositiveFloat | None = None
    tpot: PositiveFloat | None = None
    e2e: PositiveFloat | None = None

    def kept(self, ttft: float, tpot: float, e2e: float) -> bool:
        """True if an answer with these times, in seconds, is good."""
        limits = ((self.ttft, ttft), (self.tpot, tpot), (self.e2e, e2e))
        return all(limit is None or seconds * 1e3 <= limit for limit, seconds in limits)

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2e))


class Scenario(_Table):
    """A load test. seconds: measured time at each load, after warm_up seconds."""

    description: str = ""
    seconds: PositiveFloat = 60.0
    warm_up: NonNegativeFloat = 10.0
    timeout: PositiveFloat = 600.0
    seed: int = 0
    arrivals: Arrivals = Closed(kind="closed", concurrency=[1, 2, 4, 8, 16, 32])
    requests: list[Requests] = Field([Requests()], min_length=1)
    objectives: Objectives = Objectives()
    body: dict[str, Any] = {"temperature": 0.0}


def read(path: Path | None, changes: Mapping[str, Any]) -> Scenario:
    """The scenario of a file, with `changes` replacing its values; without a file, of `changes` alone.

    Raises UserError with key and reason.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text())
        except OSError as error:
            raise UserError(f"--scenario {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"--scenario {path} is not TOML: {error}") from None
    try:
        return Scenario.model_validate(_merged(values, changes), context=path and path.parent)
    except ValidationError as error:
        raise UserError(f"{path or 'the flags'}: {_reason(error)}") from None


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`: tables of the same kind are merged, arrivals of another kind are replaced."""
    merged = dict(values)
    for name, change in changes.items():
        old = merged.get(name)
        if name == "arrivals" and isinstance(old, dict) and old.get("kind") != change.get("kind", old.get("kind")):
            old = None
        if name == "requests" and isinstance(old, list):
            merged[name] = [_merged(one, change[0]) for one in old]
        elif isinstance(old, dict) and isinstance(change, dict):
            merged[name] = _merged(old, change)
        else:
            merged[name] = change
    return merged


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place or 'scenario'}: {first['msg'].removeprefix('Value error, ')}"
