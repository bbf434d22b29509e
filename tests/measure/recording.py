"""Record the drafts of the embedded model's drafter and of prompt lookup at every token of the model's answers, at
temperature 0, and the accepted length of each, for `outrider simulate --recorded`. A recording holds no text.

examples:
  python tests/measure/recording.py mine.npz --prompts prompts.jsonl
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import script
import torch
from tqdm import tqdm

from outrider.drafters.base import Draft, DraftBatch, Features
from outrider.drafters.block.checkpoint import load
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.training.features import sequence_features
from outrider.drafters.training.measure import target_answers
from outrider.drafters.training.target import TargetModel
from outrider.server.bench.replay import Positions
from outrider.server.model.target import plain_folder
from outrider.server.settings.checkpoints import WEIGHTS
from outrider.server.settings.settings import LOOKUP_GAMMA

AT_A_TIME = 64
"""Positions of an answer in one call of the drafter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recording", type=Path, metavar="FILE", help="file to write")
    add("--prompts", nargs="+", type=Path, required=True, metavar="FILE", help="prompts that are answered")
    add("--count", type=int, default=32, metavar="N", help="prompts of each file (default: 32)")
    add("--output", type=int, default=256, metavar="N", help="tokens of an answer, at most (default: 256)")


def run(args: argparse.Namespace) -> int:
    target = TargetModel.load(plain_folder(None))
    model = BlockDrafter(
        load(WEIGHTS / "smollm2-135m-instruct" / "dspark"), embedding=target.embedding, head=target.head
    )
    answers = [
        answer
        for path in args.prompts
        for answer in target_answers(target, path, count=args.count, new_tokens=args.output, temperature=0.0, kept=None)
    ]
    columns = []
    for ids, prompt in tqdm(answers, desc="positions"):
        features = sequence_features(target, [(ids, prompt)], tuple(model.target_layers), 1)[0].features
        columns.append(drafts_along(model, NgramDrafter(LOOKUP_GAMMA), features, torch.tensor(ids), prompt))
    found = Positions(
        np.cumsum([0, *(len(model_kept) for _, _, model_kept, _, _ in columns)]),
        np.array([prompt for _, prompt in answers]),
        *(np.concatenate(part) for part in zip(*columns, strict=True)),
    )
    found.save(args.recording)
    print(f"{len(found.prompts)} answers, {len(found.model)} positions")
    return 0


@torch.inference_mode()
def drafts_along(
    model: BlockDrafter, lookup: NgramDrafter, features: torch.Tensor, text: torch.Tensor, prompt: int
) -> tuple[np.ndarray, ...]:
    """The columns of `Positions` for one answer. text: tokens [S] of prompt and answer. features: [S, m*d]."""
    slots = torch.arange(len(text))
    for drafter in (model, lookup):
        drafter.allocate(len(text) + AT_A_TIME * (model.gamma + 1))
        drafter.observe(Features(features, text, slots, slots))
    drafts = [(model.propose(batch), lookup.propose(batch)) for batch in _batches(text, prompt, model.gamma)]
    anchors = torch.arange(prompt, len(text) - 1)
    by_model, by_lookup = ([pair[place] for pair in drafts] for place in (0, 1))
    lens = torch.cat([draft.lens for draft in by_lookup])
    return (
        torch.cat([draft.confidence for draft in by_model]).half().numpy(),
        torch.cat([draft.confidence for draft in by_lookup]).half().numpy(),
        _kept(by_model, text, anchors),
        np.minimum(_kept(by_lookup, text, anchors), lens.numpy()).astype(np.int8),
        lens.numpy().astype(np.int8),
    )


def _batches(text: torch.Tensor, prompt: int, gamma: int) -> Iterator[DraftBatch]:
    """Each position of the answer as a request. All share the slots of earlier tokens; each has slots for its block."""
    columns = torch.arange(len(text) + gamma + 1)
    for anchors in torch.arange(prompt, len(text) - 1).split(AT_A_TIME):
        own = torch.arange(len(anchors))[:, None]
        behind = (columns - anchors[:, None]).clamp(0, gamma)
        page_table = torch.where(columns < anchors[:, None], columns, len(text) + own * (gamma + 1) + behind)
        yield DraftBatch(
            anchors=text[anchors], seq_lens=anchors, page_table=page_table.int(), rows=own[:, 0],
            temperatures=torch.zeros(len(anchors)), keys=torch.zeros((len(anchors), gamma), dtype=torch.int64),
            wants_probs=False, all_greedy=True,
        )  # fmt: skip


def _kept(drafts: list[Draft], text: torch.Tensor, anchors: torch.Tensor) -> np.ndarray:
    """[P] int8: how many leading tokens of each draft equal the text."""
    tokens = torch.cat([draft.tokens for draft in drafts])
    following = torch.nn.functional.pad(text, (0, tokens.shape[1] + 1), value=-1)
    right = tokens == following[anchors[:, None] + 1 + torch.arange(tokens.shape[1])]
    return right.long().cumprod(1).sum(1).numpy().astype(np.int8)


if __name__ == "__main__":
    sys.exit(script.main(sys.modules[__name__]))
