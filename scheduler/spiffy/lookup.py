"""Following a block through the rows of a forward (Spiffy, algorithm 1: lossless verification).

The base policy has stepped every row. From the root the next state is looked for among the drafted states, by its
tokens; where it is found, its row was computed as base decoding would have computed it, and the search goes on from
there. Where it is not found, it is the new root. So the states that are visited are those of base decoding, whatever
was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def follow(root: np.ndarray, drafts: Sequence[np.ndarray], stepped: Sequence[np.ndarray], mask_id: int) -> list[int]:
    """Numbers of the drafts that are accepted, in the order in which the block comes to them; often none.

    root: [B] int64, the newest state, stepped. drafts: drafted states, each [B] int64. stepped: the same, stepped.
    A state without masks is an end: a step leaves it as it is.
    """
    rows = {draft.tobytes(): number for number, draft in enumerate(drafts)}
    path: list[int] = []
    state = root
    while (found := rows.pop(state.tobytes(), None)) is not None:
        path.append(found)
        if not (drafts[found] == mask_id).any():
            break
        state = stepped[found]
    return path
