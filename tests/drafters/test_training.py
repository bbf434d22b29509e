"""The training stages at tiny size: losses, data files, the whole command, a kill."""

import argparse
import csv
import dataclasses
import json
import resource
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from margins import assert_near
from tiny_drafters import TERMS, TINY, check_what_measuring_finds, make_model
from tiny_training import check_learned, exported, training

from outrider.drafters.block.checkpoint import load
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.drafters.commands import shapes, train
from outrider.drafters.config_file import CheckpointError, check_layers
from outrider.drafters.training import measure
from outrider.drafters.training.deadline import Deadline
from outrider.drafters.training.features import answer_chances
from outrider.drafters.training.forward import FrozenTarget
from outrider.drafters.training.loop import ReaderRun, Recipe
from outrider.drafters.training.loss import LossWeights
from outrider.drafters.training.optimise import learning_rate
from outrider.drafters.training.prompts import BadLine, parse_line, read_samples
from outrider.drafters.training.start import start_from_target, start_markov
from outrider.drafters.training.store import FeatureStore, Sequence
from outrider.drafters.training.target import TargetModel
from outrider.drafters.training.validate import Chances, kept

RECIPE = "--gamma 4 --draft-vocab 48 --rank 8 --anchors 12 --steps 60 --decay-steps 20 --short-steps 20"
arguments = partial(training, f"{RECIPE} --validate-every 20", "dspark")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder, dtype=torch.float32).state_dict()


@pytest.mark.slow
def test_train_learns_survives_a_kill_and_drafts(
    target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = arguments(target_folder, prompts, tmp_path / "whole", "--temperatures", "0", "0.5", "--self-prompts", "4")
    assert train.run(whole) == 0
    rows = check_learned(tmp_path / "whole")
    held_out, trained_on = ([float(row[name]) for row in rows] for name in ("tau", "tau, trained on"))
    assert trained_on[-1] > trained_on[0] >= 1
    assert 1 <= held_out[-1] != trained_on[-1]

    class Killed(Exception):
        pass

    from outrider.drafters.training import loop

    real, calls = loop.learn_from, []

    def mortal(*args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        calls.append(None)
        if len(calls) == 35:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "learn_from", mortal)
    again = arguments(
        target_folder, prompts, tmp_path / "again", "--temperatures", "0", "0.5", "--data", str(tmp_path / "whole"),
        "--save-seconds", "0",
    )  # fmt: skip
    with pytest.raises(Killed):
        train.run(again)
    assert train.run(again) == 0
    left, right = weights(tmp_path / "whole" / "drafter"), weights(tmp_path / "again" / "drafter")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-4, rtol=1e-3)

    assert exported(tmp_path / "again" / "checkpoint.pt", "--out", tmp_path / "plain") == 0
    assert load(tmp_path / "plain").config.draft_vocab_size is None
    assert load(tmp_path / "plain").config.target == load(tmp_path / "whole" / "drafter").config.target != {}
    runs = [tmp_path / "whole" / name for name in ("before-decay.pt", "checkpoint.pt")]
    of_mean = ["--storage", "int8", "--out", tmp_path / "mean"]
    assert exported(*runs, *of_mean) == 0
    before, after = (loop.checkpoint_model(run).state_dict() for run in runs)
    assert not torch.allclose(before["fc.weight"], after["fc.weight"], atol=1e-3)
    mean, rounding = weights(tmp_path / "mean")["fc.weight"], float(before["fc.weight"].abs().max()) / 127
    torch.testing.assert_close(mean, (before["fc.weight"] + after["fc.weight"]) / 2, atol=rounding, rtol=0)
    with pytest.raises(ValueError, match="is not of the same shape and draft vocabulary as"):
        exported(runs[0], tmp_path / "plain", *of_mean)
    check_what_measuring_finds(BlockDrafter.load, target_folder, tmp_path / "whole" / "drafter", prompts, least=1.0)


def test_answers_are_written_again_after_a_full_disk(
    target_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """capsys keeps the output out of files."""
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    asked = {"count": 2, "new_tokens": 20, "temperature": 0.0, "kept": tmp_path / "answers"}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            measure.target_answers(target, str(prompts), **asked)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    answers = measure.target_answers(target, str(prompts), **asked)
    assert answers == measure.target_answers(target, str(prompts), **asked) != []


def test_an_answers_tokens_are_accepted_as_often_as_drafts() -> None:
    """Over tokens drawn from p, the mean of min(1, q / p) is the sum of min(p, q)."""
    trials, temperature, draw = 20_000, 4.0, torch.Generator().manual_seed(1)
    p, logits = torch.randn(96, generator=draw).softmax(-1), 3 * torch.randn(40, generator=draw)
    vocab, columns, q = torch.arange(3, 83, 2), torch.full((96,), -1), torch.zeros(96)
    columns[vocab], q[vocab] = torch.arange(40), (logits / temperature).softmax(-1)
    tokens = torch.multinomial(p, trials, replacement=True, generator=draw)
    step = SimpleNamespace(tokens=torch.stack([tokens, tokens], 1), anchor_positions=torch.arange(trials))
    hits = kept(logits.expand(trials, 1, -1), step, columns, Chances(p[tokens], 1, temperature, draw))
    wanted = float(torch.minimum(p, q).sum())
    assert 0.1 < wanted < 0.6
    assert abs(float(hits.float().mean()) - wanted) < 4 * (wanted * (1 - wanted) / trials) ** 0.5


def test_chances_of_an_answers_tokens(target_folder: Path) -> None:
    target, ids = TargetModel.load(str(target_folder), dtype=torch.float32), [1, 4, 6, 7, 2, 9]
    chances = (target.model(input_ids=torch.tensor([ids])).logits[0] / 4.0).softmax(-1)
    expected = [float(chances[place, ids[place + 1]]) for place in range(2, 5)]
    assert_near(answer_chances(target, ids, 3, 4.0), torch.tensor(expected), TERMS)


@pytest.mark.slow
def test_a_run_goes_on_from_a_drafter_with_averaged_weights(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """With all flags of the recipe, and a kill; the mean of the weights is saved."""
    first = arguments(target_folder, prompts, tmp_path / "first", "--temperatures", "0", "--steps", "20")
    train.run(first)
    more = ["--start", str(tmp_path / "first" / "drafter"), "--data", str(tmp_path / "first"), "--ema", "0.9"]
    more += ["--alpha-ce", "0", "--alpha-kl", "0.5", "--kl-falloff", "3", "--position-decay", "2", "--survival-weights"]
    more += ["--alpha-ce-steps", "0", "--short-steps", "0", "--save-seconds", "0", "--draft-vocab", "30"]
    for folder, steps in (("whole", [30]), ("halves", [15, 30])):
        for count in steps:
            args = arguments(
                target_folder, prompts, tmp_path / folder, *more, "--decay-steps", "0", "--steps", str(count)
            )
            train.run(args)
    whole, halves = weights(tmp_path / "whole" / "drafter"), weights(tmp_path / "halves" / "drafter")
    last = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["optimiser"]
    assert load(tmp_path / "whole" / "drafter").config == load(tmp_path / "first" / "drafter").config
    assert not torch.allclose(whole["fc.weight"], last["masters"][0], atol=float(last["masters"][0].abs().max()) / 127)
    rounding = float(last["means"][0].abs().max()) / 127
    torch.testing.assert_close(whole["fc.weight"], last["means"][0], atol=rounding, rtol=0)
    for name in whole:
        torch.testing.assert_close(whole[name], halves[name], atol=1e-4, rtol=1e-3)
    rows = list(csv.DictReader((tmp_path / "whole" / "losses.csv").open()))
    assert float(rows[-1]["kl"]) > 0
    dflash = arguments(target_folder, prompts, tmp_path / "other", *more)
    dflash.kind = "dflash"
    with pytest.raises(ValueError, match="is a drafter of kind dspark, not dflash"):
        train.run(dflash)


@pytest.mark.slow
def test_a_run_follows_another_that_writes_answers(
    target_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New answers are trained on from the next checkpoint on; held-out ones stay held out."""
    more = ["--follow", "--data", str(tmp_path / "data"), "--steps", "20", "--save-seconds", "0", "--start", "fresh"]
    args = arguments(target_folder, prompts, tmp_path / "out", *more)
    with pytest.raises(ValueError, match="has no answers yet"):
        train.run(args)
    data = arguments(target_folder, prompts, tmp_path / "data", "--steps", "0")
    train.run(data)
    index = tmp_path / "data" / "features" / "index.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:8]))
    grow, seen = FeatureStore.grow, []

    def growing(store: FeatureStore) -> bool:
        index.write_text("".join(lines[: 8 + len(seen)]))
        seen.append(len(store))
        return grow(store)

    monkeypatch.setattr(FeatureStore, "grow", growing)
    trained, judged, batches = set[int](), set[int](), ReaderRun.batches

    def noting(run: ReaderRun, store: FeatureStore, numbers: list[int], size: int) -> Any:
        trained.update(numbers)
        return batches(run, store, numbers, size)

    def judging(run: ReaderRun, store: FeatureStore, numbers: list[int], which: str) -> float:
        if which == "held out":
            judged.update(numbers)
        return 1.0

    monkeypatch.setattr(ReaderRun, "batches", noting)
    monkeypatch.setattr(ReaderRun, "validate", judging)
    assert train.run(args) == 0
    assert seen[-1] > 10
    facts = json.loads((tmp_path / "out" / "drafter" / "training.json").read_text())
    assert facts["sequences"] > 8
    first = len(judged)
    args.steps = 40
    assert train.run(args) == 0  # resumed
    assert len(judged) >= first >= 2
    assert not trained & judged


def test_more_answers_hold_out_none_that_was_trained_on() -> None:
    args = argparse.Namespace(from_log=[], validation=5)
    entries = [SimpleNamespace(temperature=float(number % 3 == 1)) for number in range(60)]

    def held_out(count: int) -> list[int]:
        return train.held_out_numbers(SimpleNamespace(entries=entries[:count]), args)  # type: ignore[arg-type]

    for count in range(60):
        assert held_out(count) == [number for number in held_out(60) if number < count]
    assert [len(held_out(count)) for count in (4, 6, 12, 60)] == [0, 1, 2, 5]


@pytest.mark.slow
def test_both_are_trained_in_calls_of_a_few_minutes(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Stopped after every answer, 16 of them read and every step, the command gets as far as an uninterrupted one."""
    more = ["--loss", "authors", "--steps", "6", "--decay-steps", "2", "--short-steps", "2"]
    whole, pieces = (arguments(target_folder, prompts, tmp_path / name, *more) for name in ("whole", "pieces"))
    whole.kind = pieces.kind = "both"
    assert train.run(whole) == 0
    pieces.minutes, calls, done = 0.0, 0, tmp_path / "pieces" / "dflash" / "drafter" / "training.json"
    while not done.exists() or json.loads(done.read_text())["steps"] < 6:
        assert train.run(pieces) == 0
        calls += 1
        assert calls <= 20 + 2 + 6
    assert calls == 20 + 2 + 6
    for name in ("answers.jsonl", "features/tokens.bin"):
        first, second = (tmp_path / run / name for run in ("whole", "pieces"))
        assert sorted(first.read_bytes()) == sorted(second.read_bytes())
    assert json.loads((tmp_path / "pieces" / "dspark" / "drafter" / "training.json").read_text())["steps"] == 6
    shipped = arguments(target_folder, prompts, tmp_path / "next", *more, "--data", str(tmp_path / "whole"))
    shipped.kind, shipped.start = "both", str(tmp_path / "drafters")
    (tmp_path / "drafters").mkdir()
    for kind in ("dspark", "dflash"):
        (tmp_path / "whole" / kind / "drafter").rename(tmp_path / "drafters" / kind)
    assert train.run(shipped) == 0


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
@pytest.mark.parametrize("count", range(2, 40))
def test_layers_read_by_default_can_be_served(count: int, kind: str) -> None:
    check_layers(shapes.spread_layers(count, kind), count)


def test_layers_that_no_engine_captures_are_refused(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    for layers in (["1", "5"], ["4", "1"]):
        with pytest.raises(CheckpointError, match=r"must rise within 0\.\.4: of 6 layers all but the last can be read"):
            train.run(arguments(target_folder, prompts, tmp_path / "out", "--target-layers", *layers))
    assert not (tmp_path / "out").exists()


def test_the_authors_losses_of_each_kind(tmp_path: Path) -> None:
    args = arguments(tmp_path, tmp_path, tmp_path, "--start", "fresh", "--loss", "authors")
    recipe = train.make_recipe(args, "dflash")
    assert recipe.losses(0) == recipe.losses(10**6) == LossWeights(ce=1.0, tv=0.0)
    assert train.make_recipe(args, "dspark").losses(0) == LossWeights(ce=1.0, tv=0.9)
    assert train.make_recipe(args, "dspark").losses(10**6) == LossWeights(ce=0.1, tv=0.9)
    onwards = copy(args)
    onwards.start = "a drafter"
    assert train.make_recipe(onwards, "dspark").losses(0) == LossWeights(ce=0.1, tv=0.9)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ('{"turns": []}', "expected `turns`"),
        ('{"turns": ["a"], "response_ids": [1, "x"]}', "`response_ids`"),
        ('{"turns": ["a"], "temperature": -1}', "`temperature`"),
    ],
)
def test_bad_lines_say_file_line_and_reason(line: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(BadLine, match=f"prompts.jsonl:3: .*{reason}"):
        list(read_samples(path))
    assert parse_line('{"prompt": "fine"}', "x").turns == ("fine",)


def test_markov_head_starts_from_token_pairs(tmp_path: Path) -> None:
    """In the store t + 1 follows t; in other answers 5 does, more often. Both must be learnt."""
    store = FeatureStore(tmp_path / "f", width=4, top=1, meta={})
    tokens = torch.arange(10, 30)
    ids = tokens[5:, None]
    store.append(Sequence(tokens, 5, torch.zeros(20, 4), ids, torch.ones(15, 1)), temperature=0.0, source="x")
    model = BlockModel(TINY)
    before = model.norm.weight.clone()
    answers = [(40, 5), (41, 5), (24, 5), (24, 5), (24, 5)]
    assert start_markov(model, store, [0], answers, iterations=200) < 1.0
    head = model.markov_head
    best = head.w2(head.w1(torch.tensor([14, 20, 28, 40, 41, 24]))).argmax(-1)
    assert best.tolist() == [15, 21, 29, 5, 5, 5]
    assert torch.equal(model.norm.weight, before * 0.3)


def test_draft_layers_start_as_the_targets_last(target_folder: Path) -> None:
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    shape = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2, head_dim=8)
    model = BlockModel(shape)
    start_from_target(model, target, torch.arange(1, 20))
    theirs = target.model.model.layers
    for ours, layer in zip(model.draft_layers, theirs[-2:], strict=True):
        assert torch.equal(ours.qkv.weight[32:48], layer.self_attn.k_proj.weight)
        assert torch.equal(ours.gate_up.weight[48:], layer.mlp.up_proj.weight)
        assert (ours.q_norm.weight > 0).all()
    with pytest.raises(ValueError, match=r"intermediate size 48 against 64.*--start fresh"):
        start_from_target(BlockModel(dataclasses.replace(shape, intermediate_size=64)), target, torch.arange(1, 20))


def test_rate_falls_by_the_clock_before_a_deadline(tmp_path: Path) -> None:
    frozen = FrozenTarget(torch.randn(96, 32), torch.randn(96, 32))
    recipe = Recipe(steps=1000, warmup=0, decay_steps=0, decay_minutes=2.0)
    training = ReaderRun(tmp_path, make_model(TINY).requires_grad_(True), frozen, recipe)
    for left, rate in ((5.0, 1.0), (1.0, 0.5), (-1.0, 0.0)):
        training.deadline = Deadline(left)
        assert training._rate(10) == pytest.approx(rate, abs=0.01)
    with pytest.raises(ValueError, match="--minutes"):
        train.run(arguments(tmp_path, tmp_path, tmp_path, "--decay-minutes", "2"))


def test_learning_rate_rises_holds_and_falls() -> None:
    rates = [learning_rate(i, 100, warmup=10, decay_steps=20) for i in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == rates[79] == 1.0
    assert rates[90] == pytest.approx(0.5)
    assert rates[100] == 0.0
