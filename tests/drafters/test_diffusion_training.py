"""`outrider train specdiff|deer` at tiny size: masks, weights, both stages, resumption, tau."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_drafters import DIFFUSION
from tiny_training import check_learned, training

from outrider.drafters.block.checkpoint import load_as
from outrider.drafters.commands import train
from outrider.drafters.diffusion.model import DiffusionModel
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.loop import checkpoint_model
from outrider.drafters.training.masked import mask_blocks, masked_anywhere, masked_at_the_end
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel

SIZE = 7


RECIPE = "--gamma 4 --draft-vocab 48 --draft-layers 2 --anchors 12 --steps 40 --refine-steps 10 --short-steps 0"
arguments = partial(training, f"{RECIPE} --ema 0.9 --validate-every 40")


@pytest.mark.slow
def test_deer_goes_on_from_stage_one_and_survives_stops(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    whole = arguments("deer", target_folder, prompts, tmp_path / "whole")
    assert train.run(whole) == 0
    rows = check_learned(tmp_path / "whole" / "stage-1")
    assert rows[-1]["tau"]
    files = {file.name for file in (tmp_path / "whole" / "tokens").iterdir()}
    assert files == {"meta.json", "index.jsonl", "tokens.bin", "top_ids.bin", "top_probs.bin"}

    more = ["--data", str(tmp_path / "whole"), "--save-seconds", "0"]
    for kind, steps, refine_steps in (("specdiff", 13, 0), ("deer", 40, 4), ("deer", 40, 10)):
        pieces = arguments(kind, target_folder, prompts, tmp_path / "pieces", *more)
        pieces.steps, pieces.refine_steps = steps, refine_steps
        assert train.run(pieces) == 0
    left, right = (
        load_as(DiffusionModel, tmp_path / name / "drafter", dtype=torch.float32).state_dict()
        for name in ("whole", "pieces")
    )
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-4, rtol=1e-3)
    unfinished = checkpoint_model(tmp_path / "whole" / "stage-2" / "checkpoint.pt").state_dict()
    for name in left:
        torch.testing.assert_close(left[name], unfinished[name], atol=0.05, rtol=0.02)
    first = checkpoint_model(tmp_path / "whole" / "stage-1" / "checkpoint.pt").state_dict()
    assert not torch.allclose(first["mask"], unfinished["mask"], atol=1e-3)


def test_initial_layers(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    more = ["--steps", "1", "--lr", "1e-12", "--start-layers", "3", "1"]
    assert train.run(arguments("specdiff", target_folder, prompts, tmp_path / "out", *more)) == 0
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    started = load_as(DiffusionModel, tmp_path / "out" / "drafter", dtype=torch.float32)
    for ours, number in zip(started.draft_layers, (3, 1), strict=True):
        theirs = target.model.model.layers[number].mlp.down_proj.weight
        torch.testing.assert_close(ours.down_proj.weight, theirs, atol=float(theirs.abs().max()) / 127, rtol=0)
    wrong = arguments("specdiff", target_folder, prompts, tmp_path / "wrong", "--start-layers", "1")
    wrong.data = tmp_path / "out"
    with pytest.raises(ValueError, match=r"--start-layers \[1\]: expected 2 numbers in 0\.\.5"):
        train.run(wrong)


def test_masks_of_stage_one_are_weighted_by_rarity() -> None:
    masked, weights = masked_anywhere(4000, SIZE, torch.Generator().manual_seed(0))
    assert float((masked * weights).mean()) == pytest.approx(1.0, abs=0.02)
    assert ((weights >= 1) & (weights <= SIZE)).all()
    assert set(masked.sum(1).tolist()) == set(range(SIZE + 1))
    assert float(masked.all(1).float().mean()) > 1 / (SIZE + 1) - 0.03


def test_masks_of_stage_two_are_the_end_and_weigh_one() -> None:
    masked, weights = masked_at_the_end(4000, SIZE, 1.15, torch.Generator().manual_seed(0))
    assert (masked.long().diff(dim=1) >= 0).all()
    assert set(masked.sum(1).tolist()) == set(range(1, SIZE + 1))
    torch.testing.assert_close(weights.sum(1), torch.ones(4000))
    assert not weights[~masked].any()
    both = masked[:, :-1] & masked[:, 1:]
    torch.testing.assert_close((weights[:, :-1] / weights[:, 1:])[both], torch.full((int(both.sum()),), 1.15))
    assert masked[::2].all()


def test_only_masked_tokens_are_learnt() -> None:
    ids = torch.arange(20)
    tops = torch.arange(10, 20)[:, None].expand(-1, 4)
    sequence = Sequence(ids, 10, torch.empty(20, 0), tops, torch.rand(10, 4))
    maker = BatchMaker(DIFFUSION, torch.arange(96), device=torch.device("cpu"), decay=float("inf"))
    step = maker.cut([sequence], [torch.tensor([11, 17])], 4)
    masked = torch.tensor([[True, False, True, True], [False, True, True, True]])
    weights = torch.tensor([[2.0, 9, 3, 4], [9, 5, 9, 9]])
    hidden = mask_blocks(step, masked, weights)
    assert hidden.step.labels.token.tolist() == [12, 14, 15, 19]
    assert hidden.step.labels.weight.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert hidden.step.labels.top[:, 0].tolist() == [12, 14, 15, 19]
    assert hidden.step.labels.blocks == [0, 3]
    assert hidden.step.rows.tolist() == [0, 2, 3, 5]
    assert hidden.revealed.tolist() == [[False, True, False], [True, False, False]]
