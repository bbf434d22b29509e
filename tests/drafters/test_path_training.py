"""`outrider train dflash2`: training paths equal drafted ones; runs; folders; a common store."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from margins import assert_near
from scenes import drafted_steps
from tiny_drafters import DFLASH2, LILICORR, PATHS, TERMS, check_what_measuring_finds, make_model
from tiny_training import check_learned, training

from outrider.drafters import networks
from outrider.drafters.block.checkpoint import save_compact
from outrider.drafters.block.choosing import CodebookChoosing
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import BlockModel
from outrider.drafters.commands import train
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.training import measure
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.forward import FrozenTarget, hidden_states
from outrider.drafters.training.loss import LossWeights
from outrider.drafters.training.paths import lattice, path_loss, scores_behind
from outrider.drafters.training.store import FeatureStore, Sequence
from outrider.drafters.training.target import TargetModel
from outrider.drafters.training.validate import drafted

CPU = torch.device("cpu")
TRAINED = {name: config for name, config in PATHS.items() if not config.windows}


RECIPE = "--gamma 4 --rank 8 --temperatures 0 --anchors 12 --top 32 --steps 80 --short-steps 10 --short-block 2"
arguments = partial(training, f"{RECIPE} --validate-every 40")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_training_step_has_the_drafted_paths(name: str, temperature: float) -> None:
    config = TRAINED[name]
    drafter, tokens, probs, step = drafted_steps(config, temperature)
    frozen = FrozenTarget(drafter.embedding, drafter.head)
    if not temperature:
        assert torch.equal(drafted(drafter.model, frozen, step)[0], tokens)
        return
    ids, scores = lattice(drafter.model, frozen, step, hidden_states(drafter.model, frozen, step, config.gamma))
    behind, known = scores_behind(step.tokens[:, :-1], ids, scores)
    assert known.all()
    q = torch.zeros_like(probs).scatter(-1, ids, (behind / temperature).softmax(-1))
    assert_near(q, probs, TERMS)


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_is_the_sum_over_positions(name: str) -> None:
    """Compared with plain loops; tokens after a non-candidate have no part in it."""
    config = dataclasses.replace(TRAINED[name], choosing=dataclasses.replace(TRAINED[name].choosing, candidates=5))
    model = make_model(config).requires_grad_(True)
    draw = torch.Generator().manual_seed(5)
    frozen = FrozenTarget(*torch.randn(2, 96, 32, generator=draw))
    tokens = torch.randint(96, (40,), generator=draw)
    top = torch.stack([torch.randperm(96, generator=draw)[:20] for _ in range(34)])
    top[::2, 0] = tokens[6::2]
    probs = torch.rand(34, 20, generator=draw).softmax(-1) * 0.9
    answer = Sequence(tokens, 6, torch.randn(40, 96, generator=draw), top, probs)
    step = BatchMaker(config, model.vocab, device=CPU).cut([answer], [torch.tensor([6, 9, 20, 37])], 4)
    hidden = hidden_states(model, frozen, step, 4)
    ids, scores = (x.detach() for x in lattice(model, frozen, step, hidden))
    losses = LossWeights(ce=0.4, tv=0.7, kl=0.2, kl_falloff=1.5, survival=True)
    wanted, chances = torch.zeros(()), []
    for block, anchor in enumerate((6, 9, 20, 37)):
        reached, before = 1.0, 0
        for k in range(min(4, 39 - anchor)):
            token, place = int(tokens[anchor + k + 1]), anchor + k + 1 - 6
            if before is None:
                chances.append(0.0)
                reached = 0.0
            else:
                q = scores[block, k, before].softmax(-1)
                t = torch.tensor([sum(p for i, p in zip(top[place].tolist(), probs[place].tolist(), strict=True)
                                      if i == candidate) for candidate in ids[block, k].tolist()])  # fmt: skip
                kept = float(torch.minimum(q, t).sum())
                ce = -sum(q[i].log() for i, candidate in enumerate(ids[block, k].tolist()) if candidate == token)
                kl = sum(p * (p.log() - x.log()) for p, x in zip(t, q, strict=True) if p)
                weight = reached * torch.tensor(-k / 4).exp()
                wanted += weight * (0.4 * ce + 0.7 * 2 * (1 - kept) + 0.2 * torch.tensor(-1.5 * kept).exp() * kl)
                chances.append(kept)
                reached *= kept
            row = ids[block, k].tolist()
            before = row.index(token) if token in row else None
    loss, _, accept = path_loss(model, frozen, step, hidden, losses)
    assert 0.0 in chances
    assert len({chance > 0 for chance in chances}) == 2
    assert_near(accept, torch.tensor(chances), TERMS)
    assert_near(loss.detach(), wanted, TERMS)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if n.startswith(("cand", "fc")))


def test_training_starts_from_dflash(target_folder: Path) -> None:
    """The convolution is the identity, and the best path has the likeliest tokens."""
    torch.manual_seed(0)
    model = BlockModel(dataclasses.replace(DFLASH2, choosing=CodebookChoosing(16, 8)))
    layer = model.draft_layers[0]
    x, other = torch.randn(2, 10, 32)
    for side in (0, 1):
        assert torch.equal(layer.mlp_conv(x, other, 5, side), x)
    logits = torch.randn(2, 4, 96)
    ids, scores = model.candidate_selector(logits, torch.randn(2, 4, 32), torch.tensor([1, 2]))
    assert torch.equal(ids.gather(-1, scores[:, :, 0].argmax(-1, keepdim=True))[..., 0], logits.argmax(-1))


@pytest.mark.slow
def test_a_run_learns_and_is_measured_as_it_drafts(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    args = arguments("dflash2", target_folder, prompts, tmp_path / "whole")
    assert train.run(args) == 0
    check_learned(tmp_path / "whole")
    folder = tmp_path / "whole" / "drafter"
    assert networks.read_config(folder).kind == "dflash2"
    whole = networks.load_any(folder, dtype=torch.float32)
    assert whole.candidate_selector.successor_codebook.any()
    assert (whole.layers[0].mlp_conv.base_kernel[:, 1] != 0).any()
    check_what_measuring_finds(BlockDrafter.load, target_folder, folder, prompts)


@pytest.mark.slow
def test_a_drafter_with_the_head_of_lilicorr_goes_on(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    target = TargetModel.load(str(target_folder), dtype=torch.float32)
    more = ["--start", str(tmp_path / "published"), "--steps", "200"]
    args = arguments("dflash2", target_folder, prompts, tmp_path / "run", *more)
    shape = train.make_config(args, "dflash2", target, (1, 2, 3, 4))
    save_compact(BlockModel(dataclasses.replace(shape, choosing=LILICORR.choosing)), tmp_path / "published")
    assert train.run(args) == 0
    network = networks.load_any(tmp_path / "run" / "drafter", dtype=torch.float32)
    assert network.config.choosing == LILICORR.choosing
    check_learned(tmp_path / "run")
    capped = dataclasses.replace(shape, logit_cap=5.0)
    save_compact(BlockModel(capped), tmp_path / "published")
    with pytest.raises(ValueError, match="has scaled or capped logits: Outrider serves them and cannot train them"):
        train.run(args)
    with pytest.raises(CheckpointError, match="has scaled or capped logits; measure it in a server"):
        measure.arms_of([tmp_path / "published"], [1])


@pytest.mark.slow
def test_all_kinds_train_on_the_answers_of_one_store(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Each reads its own layers, and writes no data."""
    data = tmp_path / "data"
    assert train.run(arguments("dspark", target_folder, prompts, data, "--steps", "0")) == 0
    before = {path: path.stat().st_mtime_ns for path in (data / "features").iterdir()}
    more = ["--data", str(data), "--follow", "--steps", "8", "--refine-steps", "4", "--short-steps", "0"]
    facts = {}
    for kind in ("dspark", "dflash", "dflash2", "eagle3", "specdiff", "deer"):
        assert train.run(arguments(kind, target_folder, prompts, tmp_path / kind, *more)) == 0
        facts[kind] = json.loads((tmp_path / kind / "drafter" / "training.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in (data / "features").iterdir()} == before
    assert not (data / "tokens").exists()
    assert len({fact["sequences"] for fact in facts.values()}) == 1
    stored = json.loads((data / "features" / "meta.json").read_text())
    assert stored["layers"] == [1, 2, 3, 4]
    folder = tmp_path / "own"
    train.run(arguments("eagle3", target_folder, prompts, folder, "--steps", "0"))
    meta = json.loads((folder / "features" / "meta.json").read_text())
    assert meta["layers"] == [1, 2, 4]
    alone, joint = (
        FeatureStore(place / "features", width=m["width"], top=32, meta={})
        for place, m in ((folder, meta), (data, stored))
    )
    joint.select((1, 2, 4), (1, 2, 3, 4))
    assert joint.widths["features"] == alone.widths["features"] == 3 * 32
    assert joint.bytes == alone.bytes
    pairs = [(alone[i], joint[j]) for i, entry in enumerate(alone.entries) for j, other in enumerate(joint.entries)
             if entry.digest == other.digest]  # fmt: skip
    assert len(pairs) == len(alone)
    for one, other in pairs:
        torch.testing.assert_close(one.features, other.features, atol=0.02, rtol=0.02)
