"""A load test as a file: when requests come, what they ask, and what counts as good. TOML, checked line by line.

`deploy/loadtest/` holds ready ones; docs/loadtest.md says what each key means.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from ...errors import UserError


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Length(_Table):
    """Tokens, normally distributed and cut at min and max; without a mean log-uniform from min to max."""

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
    """A closed loop: so many requests in flight; as one ends, the next begins."""

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
    """Requests at fixed distances, or at random as independent users come."""

    kind: Literal["fixed", "poisson"]


class Bursts(_Open):
    """`size` requests at once, as often as brings `rate` requests per second."""

    kind: Literal["bursts"]
    size: PositiveInt


class Trace(_Table):
    """The times of a trace file, and its lengths or prompts; speed 2 plays it twice as fast."""

    kind: Literal["trace"]
    file: Path
    speed: list[PositiveFloat] = Field([1.0], min_length=1)

    @property
    def loads(self) -> list[float]:
        return self.speed


Arrivals = Annotated[Closed | Rate | Bursts | Trace, Field(discriminator="kind")]
UNITS = {"closed": "in flight", "fixed": "req/s", "poisson": "req/s", "bursts": "req/s", "trace": "speed"}


class Requests(_Table):
    """One kind of request; `weight` says how often among the others.

    prompts: files of prompts, beside the scenario's or absolute. texts: prompts themselves. input_tokens: made-up text
        of that length. At most one of the three.
    shared_prefix_tokens: the same text before every one of these prompts, as a system prompt is. body: further fields.
    """

    name: str = ""
    weight: PositiveFloat = 1.0
    prompts: list[Path] = []
    texts: list[str] = []
    input_tokens: Length | None = None
    shared_prefix_tokens: int = Field(default=0, ge=0)
    output_tokens: Length = Length(mean=128)
    body: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _one_file(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("prompts"), str):
            return value | {"prompts": [value["prompts"]]}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.prompts) + bool(self.texts) + (self.input_tokens is not None) > 1:
            raise ValueError("prompts, texts and input_tokens exclude each other")
        return self


class Objectives(_Table):
    """Milliseconds that a good answer keeps: to the first token, per token after it, to the end."""

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
    """A load test. seconds: measured at each load, after warm_up seconds that are not."""

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
    """The scenario of a file, with `changes` in place of its values; without a file, of the changes alone.

    Raises UserError with the place and the reason.
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
        scenario = Scenario.model_validate(_merged(values, changes))
    except ValidationError as error:
        raise UserError(f"{path or 'the flags'}: {_reason(error)}") from None
    return _beside(scenario, path.parent if path else Path())


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes over values; a table of the same kind is merged, arrivals of another kind are replaced."""
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


def _beside(scenario: Scenario, folder: Path) -> Scenario:
    """The scenario with its files found beside it."""
    requests = [
        one.model_copy(update={"prompts": [folder / path for path in one.prompts]}) for one in scenario.requests
    ]
    changed: dict[str, Any] = {"requests": requests}
    if isinstance(scenario.arrivals, Trace):
        changed["arrivals"] = scenario.arrivals.model_copy(update={"file": folder / scenario.arrivals.file})
    return scenario.model_copy(update=changed)
