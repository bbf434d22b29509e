"""Features do not depend on the texts that are read at the same time."""

from pathlib import Path

import pytest
import torch
from margins import assert_near
from tiny_drafters import TERMS
from tiny_families import FAMILIES, write

from outrider.drafters.training import features
from outrider.drafters.training.target import TargetModel
from outrider.server.model.families import RECURRENT, SHOWING

READ = sorted(name for name in SHOWING & FAMILIES.keys() if name.endswith("ForCausalLM"))
BEGIN, LAYERS = [40, 300, 41, 77, 500, 90, *range(30, 42)], (0, 3)
ENDS = [[12, 33, 9, 8], [12, 5, 7], [6, 2, 81, 44, 3, 7]]
TEXTS = [([*BEGIN, *end], len(BEGIN) + own) for end, own in zip(ENDS, (2, 1, 3), strict=True)]
WHOLE, ENDING = [len(ids) for ids, _ in TEXTS], [len(end) for end in ENDS]
AT_ONCE = {1: [WHOLE[1], WHOLE[0], WHOLE[2]], 12: [len(BEGIN), 2 * ENDING[0], WHOLE[2]], 2048: [len(BEGIN), 3 * 6]}
"""Tokens at once -> tokens of each forward."""


@pytest.mark.parametrize("family", READ)
def test_a_common_beginning_is_read_once_a_batch(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(family, tmp_path)
    target = TargetModel.load(str(tmp_path), dtype=torch.float32)
    read: list[int] = []
    target.model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: read.append(given[0].numel()))
    for at_once, expected in AT_ONCE.items():
        monkeypatch.setattr(features, "BATCH_TOKENS", at_once)
        read.clear()
        together: dict[int, features.Sequence] = {}
        for batch in features.read_texts(target, TEXTS, LAYERS, 8):
            together |= batch
        assert read == expected or family in RECURRENT
        for number, text in enumerate(TEXTS):
            [alone] = features.sequence_features(target, [text], LAYERS, 8)
            assert together[number].tokens.tolist() == text[0]
            assert together[number].prompt == text[1]
            assert_near(together[number].features, alone.features, TERMS)
            assert_near(together[number].top_probs, alone.top_probs, TERMS)


@pytest.mark.parametrize(("family", "shared"), [("LlamaForCausalLM", 2), ("Qwen3NextForCausalLM", 0)])
def test_only_prompts_are_shared_and_no_recurrent_states(family: str, shared: int, tmp_path: Path) -> None:
    write(family, tmp_path)
    target = TargetModel.load(str(tmp_path), dtype=torch.float32)
    assert features.shared_tokens(target, [(BEGIN, 3), (BEGIN, 4)]) == shared  # the last one says the answer
    assert features.shared_tokens(target, [([1, *BEGIN], 4), (BEGIN, 4)]) == 0
