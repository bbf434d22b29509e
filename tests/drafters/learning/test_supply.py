"""Feature stores of a learner's folder, and its general answers."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from outrider.drafters.learning.answers import Answer
from outrider.drafters.learning.supply import MORE, PROMPTS, Supply, general_answers, open_store
from outrider.drafters.training.store import StoreInUse
from outrider.drafters.training.target import TargetModel


def test_a_store_in_use_by_another_process_is_not_touched(tmp_path: Path) -> None:
    folder, meta = tmp_path / "features", {"layers": [1]}
    with open_store(folder, 8, meta).writing():
        with pytest.raises(StoreInUse, match="another run is writing"):
            open_store(folder, 8, meta)
        assert (folder / "meta.json").exists()


def test_answers_under_rules_teach_the_allowed_tokens(
    tmp_path: Path, learned_target: Path, answers: list[Answer]
) -> None:
    """The target would write another second half; without rules the answer counts as another model's."""
    target = TargetModel.load(str(learned_target), dtype=torch.float32)
    supply = Supply(tmp_path, target, (1,), 10**7)
    prompt, response, half = answers[0].prompt_ids, list(answers[0].response_ids), len(answers[0].response_ids) // 2
    response[half:] = [(token + 1) % 40 for token in response[half:]]
    for ruled in (False, True):
        assert len(list(supply.read([Answer(prompt, response, 0.0, ruled)]))) == 1
        assert (len(supply.items), supply.foreign) == (int(ruled), 1)
    kept = supply[supply.items[0]]
    written = torch.tensor(response)
    assert (kept.top_ids[:, 0] == written).all()
    certain = kept.top_probs[:, 0] == 1
    assert certain[half:].float().mean() > 0.8
    assert (kept.top_probs[certain, 1:] == 0).all()
    free = kept.top_probs[:half]
    assert (free[:, 0] >= free[:, 1]).all()
    assert (free[:, 1] > 0).all()


@pytest.mark.slow
def test_more_general_answers_are_trained_on_and_the_gate_keeps_its_own(tmp_path: Path, learned_target: Path) -> None:
    target, prompts = TargetModel.load(str(learned_target), dtype=torch.float32), tmp_path / "general.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i // 9}"}) + "\n" for i in range(90)))
    first = general_answers(tmp_path / "general", target, (1,), prompts)
    judging = [s.tokens.tolist() for s in first.sequences(first.judging)]
    assert PROMPTS - 8 < len(first.training) + len(first.choosing) + len(judging) <= PROMPTS
    more = general_answers(tmp_path / "general", target, (1,), prompts, MORE)
    assert [s.tokens.tolist() for s in more.sequences(more.judging)] == judging
    assert len(more.training) > len(first.training) + 20
    for answers in (first, more):
        parts = (answers.training, answers.choosing, answers.judging)
        assert all(parts)
        assert sorted(itertools.chain(*parts)) == list(range(len(answers.store)))
    again = general_answers(tmp_path / "general", target, (1,), prompts)
    assert (again.training, again.choosing, again.judging) == (more.training, more.choosing, more.judging)
