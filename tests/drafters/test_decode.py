"""The target writes many texts at once, with the right distribution."""

from pathlib import Path

import torch
from margins import assert_near
from tiny_drafters import TERMS, save_target

from outrider.drafters.training.decode import decode
from outrider.drafters.training.flat import CompiledLayers, ModuleLayers, flat_layers
from outrider.drafters.training.prompts import AnsweredPrompt
from outrider.drafters.training.synthesise import answer
from outrider.drafters.training.target import TargetModel
from outrider.kernels.cpu import native
from outrider.kernels.flat_batch import FlatBatch


def test_texts_written_together_equal_single_ones(target_folder: Path) -> None:
    """Rows and slots are reused; whole prompts and single tokens share steps."""
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    prompts = [[1, 3, 10], [1, 3, *range(20, 29)], [5], [9, 8, 7, 6], [4, 40], [11, 12, 13], [50, 51]]
    options = {"max_new_tokens": 12, "stop_ids": {2, 30, 31, 32, 33, 34, 35}}
    seeds, heat = list(range(7)), [0.0, 0.0, 0.0, 1.0, 0.0, 0.7, 0.0]
    together = {t.number: (t.ids, t.finish) for t in decode(target, prompts, heat, seeds=seeds, rows=3, **options)}
    assert len(together) == 7
    assert len({len(ids) for ids, _ in together.values()}) > 1
    for row, prompt in enumerate(prompts):
        (text,) = decode(target, [prompt], [heat[row]], seeds=[seeds[row]], **options)
        ids = text.ids
        assert together[row] == (ids, text.finish)
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
    for text in written:
        counts[text.ids[0]] += 1
    often = chances * trials > 5
    expected, cells = chances[often] * trials, int(often.sum())
    surprise = float(((counts[often] - expected).square() / expected).sum())
    assert cells > 10
    assert surprise < cells + 5 * (2 * cells) ** 0.5  # chi-square: mean `cells`, variance twice that


def test_answers_go_on_where_a_kill_left_them(target_folder: Path, tmp_path: Path) -> None:
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    samples = [AnsweredPrompt((f"w{i % 5} w9",)) for i in range(12)]
    options = {"temperatures": [0.0, 1.0], "max_new_tokens": 9, "seed": 3, "rows": 4}
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    written = list(answer(target, samples, whole, **options))
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 12
    cut.write_text("".join(lines[:5]) + lines[5][:20])
    assert sorted(a.to_json() for a in answer(target, samples, cut, **options)) == sorted(a.to_json() for a in written)
    assert cut.read_text().startswith("".join(lines[:5]))
    assert sorted(cut.read_text().splitlines()) == sorted(whole.read_text().splitlines())


def test_all_implementations_of_the_target_agree(tmp_path: Path) -> None:
    folder = save_target(tmp_path, hidden_size=64, intermediate_size=96, heads=2)
    target = TargetModel.load(str(folder), dtype=torch.float32)
    ways = [ModuleLayers(target, 40)]
    ways += [CompiledLayers(target, 40, 20)] if native.available() else []
    assert isinstance(flat_layers(target, 40, 20), CompiledLayers if native.available() else ModuleLayers)
    table = torch.randperm(40)[:36].view(3, 12).int()
    for lens, queries in (([5, 1, 9], [5, 1, 9]), ([6, 2, 10], [1, 1, 1])):
        batch = FlatBatch(
            torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(lens).int(), torch.tensor([2, 0, 1]), table
        )
        slots = table[batch.rows[batch.requests_of_tokens], batch.positions].long()
        ids = torch.randint(3, 96, (sum(queries),))
        with torch.inference_mode():
            expected, *results = ((way, way.forward(ids, slots, batch)) for way in ways)
            for way, hidden in results:
                assert_near(hidden, expected[1], TERMS)
                logits = expected[0].logits(expected[1])
                assert_near(way.logits(hidden), logits, TERMS)
