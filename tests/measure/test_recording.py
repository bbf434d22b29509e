"""Drafts along an answer equal the drafts of each position alone."""

import numpy as np
import pytest
import recording
import torch
from tiny_drafters import TINY, WIDE, make_model

from outrider.drafters.base import DraftBatch, Features
from outrider.drafters.block.config import BlockConfig
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.ngram import NgramDrafter


@pytest.mark.parametrize("config", [TINY, WIDE])
def test_positions_are_drafted_as_if_each_were_alone(config: BlockConfig, monkeypatch) -> None:
    monkeypatch.setattr(recording, "AT_A_TIME", 7)
    generator = torch.Generator().manual_seed(3)
    length, prompt = 40, 6
    text = torch.randint(0, 12, (9,), generator=generator).repeat(5)[:length]  # repeats, so that lookups are right
    features = torch.randn(length, 3 * config.hidden_size, generator=generator)
    embedding, head = torch.randn(2, config.vocab_size, config.hidden_size, generator=generator)

    def made() -> BlockDrafter:
        return BlockDrafter(make_model(config), embedding=embedding, head=head)

    model, model_kept, lookup_kept, lens = (
        found
        for place, found in enumerate(recording.drafts_along(made(), NgramDrafter(9), features, text, prompt))
        if place != 1
    )
    assert len(model) == len(lens) == length - 1 - prompt
    assert lens.any()
    assert lookup_kept.max() > 0
    for place, anchor in enumerate(range(prompt, length - 1)):
        drafter, slots = made(), torch.arange(anchor)
        drafter.allocate(length + config.gamma + 1)
        drafter.observe(Features(features[:anchor], text[:anchor], slots, slots))
        draft = drafter.propose(
            DraftBatch(
                anchors=text[anchor : anchor + 1], seq_lens=torch.tensor([anchor]), rows=torch.tensor([0]),
                page_table=torch.arange(length + config.gamma + 1)[None].int(), temperatures=torch.zeros(1),
                keys=torch.zeros((1, config.gamma), dtype=torch.int64), wants_probs=False, all_greedy=True,
            )
        )  # fmt: skip
        assert np.abs(draft.confidence.numpy() - model[place]).max() < 1e-3
        right = draft.tokens[0] == torch.nn.functional.pad(text, (0, 9), value=-1)[anchor + 1 :][: config.gamma]
        assert model_kept[place] == int(right.long().cumprod(0).sum())
