"""The batch of requests to draft for in a decode step."""

import torch

from outrider.drafters.base import DraftBatch, ForcedTokens
from outrider.kernels.upload import upload

from .requests import RequestTable
from .sampling import Sampling
from .step import Step


def draft_batch(
    step: Step,
    sampling: Sampling,
    requests: RequestTable,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    anchors: torch.Tensor,
    forced: ForcedTokens | None,
    *,
    owned: bool,
    ages: bool,
) -> DraftBatch:
    """Return the batch of requests at rows [R], with seq_lens and anchors [R]. forced: as in `DraftBatch`. owned:
    requests have drafters of their own. ages: the drafter needs to know how long answers are."""
    return DraftBatch(
        anchors=anchors,
        seq_lens=seq_lens,
        page_table=page_table,
        rows=rows,
        draft_mask=None if step.draft_mask.all() else upload(step.draft_mask, anchors.device),
        depth=step.depth,
        keys=sampling.draft_keys(seq_lens, requests.gamma),
        wants_probs=not sampling.all_decided,
        decided=sampling.decided,
        all_greedy=sampling.all_greedy,
        answer_lens=seq_lens - requests.prompts[rows] + 1 if ages else None,
        longest=None if anchors.is_cpu else 1 << int(step.view.contexts.max()).bit_length(),
        sets=torch.from_numpy(step.entries.sets) if owned else None,
        corpora=step.entries.corpora,
        forced=forced,
        **sampling.rules._asdict(),
    )
