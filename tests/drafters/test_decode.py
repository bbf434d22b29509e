"""The target writing many texts at once: the same texts, the right distribution, nothing lost."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafters.training.decode import decode
from outrider.drafters.training.prompts import Sample
from outrider.drafters.training.synthesise import answer
from outrider.drafters.training.target import TargetModel


def test_texts_written_together_equal_single_ones(target_folder: Path) -> None:
    """More prompts than rows, so rows and slots change hands; whole prompts and single tokens share steps."""
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    prompts = [[1, 3, 10], [1, 3, *range(20, 29)], [5], [9, 8, 7, 6], [4, 40], [11, 12, 13], [50, 51]]
    options = {"max_new_tokens": 12, "stop_ids": {2, 30, 31, 32, 33, 34, 35}}
    seeds, heat = list(range(7)), [0.0, 0.0, 0.0, 1.0, 0.0, 0.7, 0.0]
    together = {row: (ids, end) for row, ids, end in decode(target, prompts, heat, seeds=seeds, rows=3, **options)}
    assert len(together) == 7
    assert len({len(ids) for ids, _ in together.values()}) > 1
    for row, prompt in enumerate(prompts):
        ((_, ids, end),) = decode(target, [prompt], [heat[row]], seeds=[seeds[row]], **options)
        assert together[row] == (ids, end)
        whole = torch.tensor([prompt])
        for token in ids if heat[row] == 0 else []:
            best = target.model(input_ids=whole).logits[0, -1].argmax()
            assert int(best) == token
            whole = torch.cat([whole, best.view(1, 1)], 1)


def test_written_tokens_follow_the_targets_distribution(target_folder: Path) -> None:
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    prompt, trials, temperature = [1, 3, 10], 4000, 3.0
    logits = target.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    chances = torch.softmax(logits / temperature, -1)
    counts = torch.zeros(len(chances))
    written = decode(
        target, [prompt] * trials, [temperature] * trials, max_new_tokens=1, stop_ids={2}, seeds=list(range(trials))
    )
    for _, (token,), _ in written:
        counts[token] += 1
    often = chances * trials > 5
    expected, cells = chances[often] * trials, int(often.sum())
    surprise = float(((counts[often] - expected).square() / expected).sum())
    assert cells > 10
    assert surprise < cells + 5 * (2 * cells) ** 0.5  # chi-square: mean `cells`, variance twice that


def test_answers_go_on_where_a_kill_left_them(target_folder: Path, tmp_path: Path) -> None:
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    samples = [Sample((f"w{i % 5} w9",)) for i in range(12)]  # some prompts twice
    options = {"temperatures": [0.0, 1.0], "max_new_tokens": 9, "seed": 3, "rows": 4}
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    answer(target, samples, whole, **options)
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 12
    cut.write_text("".join(lines[:5]) + lines[5][:20])
    answer(target, samples, cut, **options)
    assert cut.read_text().startswith("".join(lines[:5]))
    assert sorted(cut.read_text().splitlines()) == sorted(whole.read_text().splitlines())
