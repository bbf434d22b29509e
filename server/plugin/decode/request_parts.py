"""Optional parts that follow each request: its owner's drafter, looked-up texts, adapter, and answers to learn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafters.corpora import NO_CORPUS

from .adapters import BASE, AdapterOutcomes
from .boundary import Boundary
from .learning import AnswerKeeper
from .owner_drafters import OwnerDrafters
from .requests import RequestTable
from .texts import TextKeeper


@dataclass(frozen=True, slots=True)
class RequestParts:
    """Reports the begin and end of requests to each part. If a part fails, the request continues without it."""

    optional: Boundary
    by_owner: OwnerDrafters | None
    texts: TextKeeper | None
    adapters: AdapterOutcomes | None
    keeper: AnswerKeeper | None

    def admit(self, table: RequestTable, rows: Sequence[int], reqs: Sequence[Any]) -> None:
        """SGLang's requests are prefilled: write their numbers to their rows."""
        run = self.optional.run
        for row, req in zip(rows, reqs, strict=True):
            if self.by_owner is not None:
                table.sets[row] = run("own_drafters", 0, self.by_owner.admit, req)
            if self.texts is not None:
                table.corpora[row] = run("lookups", NO_CORPUS, self.texts.admit, req)
            if self.adapters is not None:
                table.adapters[row] = run("adapters", BASE, self.adapters.admit, req)
            if self.keeper is not None:
                run("learning", None, self.keeper.admit, req)

    def finished(self, rid: str) -> None:
        """A request has ended."""
        run = self.optional.run
        if self.keeper is not None:
            run("learning", None, self.keeper.finished, rid)
        if self.by_owner is not None:
            run("own_drafters", None, self.by_owner.finished, rid)
        if self.texts is not None:
            run("lookups", None, self.texts.finished, rid)
