"""Penalties and bias on ragged rows equal SGLang's penalizers, token by token."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from planning import request
from sglang.srt.sampling import penaltylib

from outrider.server.plugin.decode.logit_rules import RowContext, apply_rules

VOCAB = 64
STOP = 5


def ruled(**penalties):
    made = request(ends=(STOP,), **({"stop_token_ids": {7}} | penalties))
    made.tokenizer, made.grammar = SimpleNamespace(eos_token_id=STOP, additional_stop_token_ids=None), None
    return made


@dataclass(eq=False)
class Batch:
    """The part of SGLang's batch that its penalizers read."""

    reqs: list
    device: str = "cpu"


def sglang_logits(req, tokens, logits):
    """One row of logits, changed by SGLang after `tokens`."""
    batch = Batch([req])
    kinds = ("Frequency", "Presence", "Repetition")
    penalizers = {penaltylib.BatchedMinNewTokensPenalizer} | {
        getattr(penaltylib, f"Batched{kind}Penalizer") for kind in kinds
    }
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCAB, batch, penalizers)
    for token in tokens:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    out = logits.clone()[None]
    additive = torch.zeros_like(out)
    orchestrator.accumulate_additive_penalties(additive)
    out += additive
    scaling = orchestrator.accumulate_scaling_penalties()
    if scaling is not None:
        out = torch.where(out < 0, out * scaling, out / scaling)
    return out[0]


PENALTIES = [
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.1},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 6},
    {"frequency_penalty": 0.5, "presence_penalty": 0.4, "repetition_penalty": 0.8, "min_new_tokens": 4},
]


@pytest.mark.parametrize("seed", range(3))
def test_every_row_equals_plain_decoding(seed):
    generator = torch.Generator().manual_seed(seed)
    reqs = [ruled(**penalties) for penalties in PENALTIES]
    count, gamma = len(reqs), 4
    outputs = [
        torch.randint(0, 12, (int(n),), generator=generator) for n in torch.randint(1, 9, (count,), generator=generator)
    ]
    drafts = torch.randint(0, 12, (count, gamma), generator=generator)
    verify_lens = torch.randint(0, gamma + 1, (count,), generator=generator)
    verify_lens[-1] = gamma
    bias = torch.randn(count, VOCAB, generator=generator)
    request_of_row = torch.arange(count).repeat_interleave(verify_lens + 1)
    step = torch.cat([torch.arange(n + 1) for n in verify_lens.tolist()])
    logits = torch.randn(len(step), VOCAB, generator=generator) * 3
    block = torch.cat([torch.stack([o[-1] for o in outputs])[:, None], drafts], 1)
    info = SimpleNamespace(acc_additive_penalties=torch.zeros(1), logit_bias=bias)

    got = logits.clone()
    begins = torch.nn.functional.pad((verify_lens + 1).cumsum(0), (1, 0))[:-1]

    def output_tokens(places):
        some = [outputs[place] for place in places]
        tokens = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=3)
        return tokens, torch.arange(tokens.shape[1]) < torch.tensor([len(each) for each in some])[:, None]

    apply_rules(got, reqs, info, RowContext(request_of_row, step, block, begins, verify_lens, output_tokens))

    for row, (r, k) in enumerate(zip(request_of_row.tolist(), step.tolist(), strict=True)):
        tokens = [*outputs[r].tolist(), *drafts[r, :k].tolist()]
        expected = sglang_logits(reqs[r], tokens, logits[row]) + bias[r]
        torch.testing.assert_close(got[row], expected)
