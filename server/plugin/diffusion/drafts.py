"""Draft states as rows of a forward, and which of them are accepted (Spiffy, arXiv 2509.18085).

A draft is a possible later state of the open block, with its own slots. A draft without masks is a final block and
brings a second row, the fully masked next block. If the draft is accepted, its keys and values stay, and the next
block's first step is done as well.
"""

from dataclasses import dataclass

import numpy as np
import torch

from outrider.scheduler.spiffy.fill import follow

from .forward import OpenRows


@dataclass(frozen=True, slots=True)
class StateDraft:
    """request: its number in the batch. state: [B] int64. complete: without masks; it takes two rows."""

    request: int
    state: np.ndarray
    complete: bool

    @property
    def rows(self) -> int:
        return 2 if self.complete else 1


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """Result of a round for an open block.

    state: the block after its last step. accepted: drafts on the way there, by their place among the request's.
    row: of the forward, with the distribution before the newest state.
    opened: the next block after its first step; None: the block has not been accepted as a whole.
    slots: [B] int64, of an accepted complete draft; None: there is none.
    """

    state: np.ndarray
    accepted: list[int]
    row: int
    opened: np.ndarray | None = None
    slots: torch.Tensor | None = None

    @property
    def newest(self) -> np.ndarray:
        return self.state if self.opened is None else self.opened


def with_drafts(
    rows: OpenRows, roots: list[int], drafts: list[StateDraft], slots: torch.Tensor, mask_id: int
) -> OpenRows:
    """Return the rows of a round, followed by its drafts' rows in their order. roots: of each request, the row of
    its open block. slots: [n, B] int64, for the rows of the drafts."""
    if not drafts:
        return rows
    tokens, starts, before, above, opens, root = [], [], [], [], [], []
    begins, lefts, block = rows.starts.tolist(), rows.before.tolist(), rows.tokens.shape[1]
    for draft in drafts:
        place = roots[draft.request]
        tokens.append(torch.from_numpy(draft.state))
        starts.append(begins[place])
        before.append(lefts[place])
        above.append(-1)
        opens.append(not draft.complete)
        root.append(place)
        if draft.complete:
            above.append(len(rows) + len(tokens) - 1)
            tokens.append(torch.full((block,), mask_id))
            starts.append(begins[place] + block)
            before.append(int(draft.state[-1]))
            opens.append(True)
            root.append(place)
    return OpenRows(
        tokens=torch.cat([rows.tokens, torch.stack(tokens)]),
        starts=torch.cat([rows.starts, torch.tensor(starts)]),
        before=torch.cat([rows.before, torch.tensor(before)]),
        tables=torch.cat([rows.tables, rows.tables[root]]),
        slots=torch.cat([rows.slots, slots]),
        open=torch.cat([rows.open, torch.tensor(opens)]),
        above=torch.cat([rows.above, torch.tensor(above)]),
    )


def found(
    rows: OpenRows, stepped: np.ndarray, roots: list[int], drafts: list[StateDraft], first: int, mask_id: int
) -> list[BlockOutcome | None]:
    """Return the result of each request's open block; None for a request with root -1, which has none. rows: with
    drafts. stepped: [N, B] int64, all of them one step on. first: the row of the first draft."""
    pairs: list[list[tuple[StateDraft, int]]] = [[] for _ in roots]
    row = first
    for draft in drafts:
        pairs[draft.request].append((draft, row))
        row += draft.rows
    return [
        _found(rows, stepped, root, its, mask_id) if root >= 0 else None for root, its in zip(roots, pairs, strict=True)
    ]


def _found(
    rows: OpenRows, stepped: np.ndarray, root: int, drafts: list[tuple[StateDraft, int]], mask_id: int
) -> BlockOutcome:
    states, places = [draft.state for draft, _ in drafts], [row for _, row in drafts]
    path = follow(stepped[root], states, list(stepped[places]), mask_id)
    if not path:
        return BlockOutcome(stepped[root], path, root)
    draft, row = drafts[path[-1]]
    if draft.complete:
        return BlockOutcome(draft.state, path, row + 1, stepped[row + 1], rows.slots[row])
    return BlockOutcome(stepped[row], path, row)
