"""Options of a measurement: flags of `outrider tune`, and the body of POST /outrider/tune."""

from dataclasses import dataclass, replace

from outrider.profiles import store

from .effort import QUICK, THOROUGH, Effort


class BadOption(ValueError):
    """An invalid option. option: its name in TuneRequest. problem: the valid values and the given one."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option!r} {problem}")
        self.option = option
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """One measurement. Raises BadOption for an invalid value.

    quick: the measurement of a server that starts without a profile. max_requests: largest number of requests at a
        time.
    rounds: repetitions of each step shape. name: of the profile.
    None: the effort's own, and a name made from model, drafter and machine.
    """

    quick: bool = False
    max_requests: int | None = None
    rounds: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        for option, value in (("max_requests", self.max_requests), ("rounds", self.rounds)):
            if value is not None and value < 1:
                raise BadOption(option, f"is at least 1, not {value}")
        if self.name is not None and not store.NAME.fullmatch(self.name):
            raise BadOption("name", f"is made of letters, digits, dots, dashes and underscores, not {self.name!r}")

    @property
    def effort(self) -> Effort:
        """The effort that these options choose."""
        effort = QUICK if self.quick else THOROUGH
        if (most := self.max_requests) is not None:
            known = max(effort.requests)
            beyond = [known << times for times in range(1, (most // known).bit_length())]
            effort = replace(effort, requests=(*(r for r in (*effort.requests, *beyond) if r < most), most))
        return effort if self.rounds is None else replace(effort, rounds=self.rounds)
