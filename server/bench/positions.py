"""Records what the shipped drafter and prompt lookup would draft at every token of the embedded model's answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from outrider.drafters.base import Draft, DraftBatch, Features
from outrider.drafters.block import BlockDrafter, load
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.training.features import sequence_features
from outrider.drafters.training.measure import target_answers
from outrider.drafters.training.target import TargetModel
from outrider.scheduler.simulation.recorded import Positions, to_log_odds

AT_A_TIME = 64
"""Positions of an answer that are drafted for in one call."""


def record(
    target: TargetModel, drafter: Path, files: list[Path], *, count: int, new_tokens: int, lookup_gamma: int
) -> Positions:
    """Positions of the target's answers, at temperature 0, to the first `count` prompts of each file."""
    model = BlockDrafter(load(drafter), embedding=target.embedding, head=target.head)
    answers = [
        answer
        for path in files
        for answer in target_answers(target, path, count=count, new_tokens=new_tokens, temperature=0.0, kept=None)
    ]
    found = []
    for ids, prompt in tqdm(answers, desc="positions"):
        features = sequence_features(target, [(ids, prompt)], tuple(model.target_layers), 1)[0].features
        found.append(drafts_along(model, NgramDrafter(lookup_gamma), features, torch.tensor(ids), prompt))
    lengths = [len(model_kept) for _, _, model_kept, _, _ in found]
    return Positions(
        np.cumsum([0, *lengths]),
        np.array([prompt for _, prompt in answers]),
        *(np.concatenate(part) for part in zip(*found, strict=True)),
    )


@torch.inference_mode()
def drafts_along(
    model: BlockDrafter, lookup: NgramDrafter, features: torch.Tensor, text: torch.Tensor, prompt: int
) -> tuple[np.ndarray, ...]:
    """The columns of `Positions` of one answer, the tokens [S] of `text` behind its prompt; features [S, m*d]."""
    slots = torch.arange(len(text))
    for drafter in (model, lookup):
        drafter.allocate(len(text) + AT_A_TIME * (model.gamma + 1))
        drafter.observe(Features(features, text, slots, slots))
    drafts = [(model.propose(batch), lookup.propose(batch)) for batch in _batches(text, prompt, model.gamma)]
    anchors = torch.arange(prompt, len(text) - 1)
    by_model, by_lookup = ([pair[place] for pair in drafts] for place in (0, 1))
    lens = torch.cat([draft.lens for draft in by_lookup])
    return (
        to_log_odds(torch.cat([draft.confidence for draft in by_model]).float().numpy()),
        to_log_odds(torch.cat([draft.confidence for draft in by_lookup]).float().numpy()),
        _kept(by_model, text, anchors),
        np.minimum(_kept(by_lookup, text, anchors), lens.numpy()).astype(np.int8),
        lens.numpy().astype(np.int8),
    )


def _batches(text: torch.Tensor, prompt: int, gamma: int) -> Iterator[DraftBatch]:
    """Every position of the answer as a request. They share the slots before them; each has slots for its block."""
    columns = torch.arange(len(text) + gamma + 1)
    for anchors in torch.arange(prompt, len(text) - 1).split(AT_A_TIME):
        own = torch.arange(len(anchors))[:, None]
        behind = (columns - anchors[:, None]).clamp(0, gamma)
        page_table = torch.where(columns < anchors[:, None], columns, len(text) + own * (gamma + 1) + behind)
        yield DraftBatch(
            anchors=text[anchors],
            seq_lens=anchors,
            page_table=page_table.int(),
            rows=own[:, 0],
            temperatures=torch.zeros(len(anchors)),
            keys=torch.zeros((len(anchors), gamma), dtype=torch.int64),
            wants_probs=False,
            all_greedy=True,
        )


def _kept(drafts: list[Draft], text: torch.Tensor, anchors: torch.Tensor) -> np.ndarray:
    """[P] int8, leading tokens of each draft that are those of the text."""
    tokens = torch.cat([draft.tokens for draft in drafts])
    following = torch.nn.functional.pad(text, (0, tokens.shape[1] + 1), value=-1)
    right = tokens == following[anchors[:, None] + 1 + torch.arange(tokens.shape[1])]
    return right.long().cumprod(1).sum(1).numpy().astype(np.int8)
