"""Admission of the K draft tokens of largest survival (DSpark, sections 3.2.2 and 5.2).

a_{r,j} = c_{r,1} ... c_{r,j} never rises with j. Ties go to the smaller request, then to the smaller position. So the K
largest are a prefix of every request, and whether x_{r,k} is among them depends only on c_{r,1..k} and on other
requests: a later entry of its own request never precedes it.
"""

import numpy as np
import torch

from outrider.kernels.drafts import admit
from outrider.kernels.upload import upload_together


def largest(
    confidence: torch.Tensor,
    draft_lens: torch.Tensor,
    tokens: int | None,
    *,
    bounds: np.ndarray | None = None,
    first: np.ndarray | None = None,
) -> torch.Tensor:
    """verify_lens [R] int64 that admit the `tokens` of largest survival (None: all), on the confidence's device.

    confidence, draft_lens, first: as in `admit`. bounds: above 0, [R, 1] or [gamma]; the first survival below its bound
    ends a request's tokens.
    """
    most = confidence.numel() if tokens is None else tokens
    if bounds is None and first is None:
        return admit(confidence.float(), draft_lens, draft_lens.new_full((1,), most))[0]
    given = [None if bounds is None else bounds.astype(np.float32), first]
    sent = iter(upload_together([np.array([most]), *(x for x in given if x is not None)], confidence.device))
    number, least, ahead = next(sent), *(None if x is None else next(sent) for x in given)
    return admit(confidence.float(), draft_lens, number, bounds=least, first=ahead)[0]
