"""`outrider train eagle3`: training steps equal drafting steps; runs; folders that load."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from margins import assert_near
from own_process import found_by_fork
from tiny_drafters import TERMS, batch, check_what_measuring_finds, draft_after, make_target
from tiny_eagle import LAYER_IDS, LAYOUTS, VOCAB, flat, save_eagle
from tiny_training import check_learned, exported, training

from outrider.drafters.base import Features
from outrider.drafters.commands import train
from outrider.drafters.config_file import CheckpointError, read_json
from outrider.drafters.eagle.config import EagleConfig
from outrider.drafters.eagle.drafter import EagleDrafter
from outrider.drafters.eagle.model import EagleModel
from outrider.drafters.training.batches import BatchMaker
from outrider.drafters.training.forward import frozen_part, hidden_states
from outrider.drafters.training.store import Sequence
from outrider.drafters.training.target import TargetModel

GAMMA, TEMPERATURE = 4, 2.0


RECIPE = "--gamma 4 --draft-vocab 48 --temperatures 0 --anchors 12 --steps 120 --short-steps 10 --validate-every 60"
arguments = partial(training, RECIPE, "eagle3")


def target_of(layout: str) -> Any:
    """For the training forward, and for the drafter."""
    size = flat(layout)["hidden_size"]
    embedding, head = torch.randn(2, VOCAB, size, generator=torch.Generator().manual_seed(7))
    return SimpleNamespace(embedding=embedding, head=head, device=torch.device("cpu"))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_training_step_equals_the_served_drafters(layout: str, tmp_path: Path) -> None:
    """Drafts of several texts serve as training answers."""
    folder, target = save_eagle(tmp_path, layout), target_of(layout)
    config = SimpleNamespace(model_type="llama", num_hidden_layers=6, vocab_size=VOCAB)
    served = EagleDrafter.load(make_target(config, target.embedding, target.head), folder, gamma=GAMMA)
    served.allocate(1024)
    table, lengths = torch.arange(1, 1001).view(4, 250).int(), [30, 1, 9, 200]
    width, draw = len(LAYER_IDS) * target.embedding.shape[1], torch.Generator().manual_seed(3)
    texts = [torch.randint(VOCAB, (n,), generator=draw) for n in lengths]
    hidden = [torch.randn(n, width, generator=draw) for n in lengths]
    for row, (text, states) in enumerate(zip(texts, hidden, strict=True)):
        places = torch.arange(len(text))
        served.observe(Features(states, text, places, table[row, : len(text)].long()))
    asking = batch(table, [0, 1, 2, 3], lengths, TEMPERATURE)
    drafted = served.propose(asking)

    model = EagleModel.load(folder, 6, target.embedding.shape, dtype=torch.float32)
    frozen = frozen_part(model, target)
    maker, sequences = BatchMaker(model.config, model.vocab, device=torch.device("cpu"), tile=2), []
    for row, text in enumerate(texts):
        tokens = torch.cat([text, asking.anchors[row : row + 1], drafted.tokens[row]])
        later = torch.randn(GAMMA + 1, width, generator=draw) * 100  # no step may read them
        none = torch.zeros(len(tokens) - 1, 1)
        sequences.append(Sequence(tokens, 1, torch.cat([hidden[row], later]), none.long(), none))
    anchors = [torch.tensor([5, 20, 30]), torch.tensor([1]), torch.tensor([2, 9]), torch.tensor([100, 190, 200])]
    step = maker.cut(sequences, anchors, GAMMA)
    states = hidden_states(model, frozen, step, GAMMA)
    q = (states.detach() @ frozen.head.T / TEMPERATURE).softmax(-1)[[2, 3, 5, 8]]
    assert_near(q, drafted.probs, TERMS)
    assert float((q[:, 0] - q[:, 1]).abs().max()) > 0.01


def test_bfloat16_and_float32_heads_agree(tmp_path: Path) -> None:
    """Without autocast the rotary table must have the weights' type."""
    folder, target = save_eagle(tmp_path), target_of("authors")
    tokens, draw = torch.arange(3, 33), torch.Generator().manual_seed(5)
    hidden = torch.randn(len(tokens) - 1, len(LAYER_IDS) * target.embedding.shape[1], generator=draw)
    none, outputs = torch.zeros(len(tokens) - 1, 1), []
    for dtype in (torch.float32, torch.bfloat16):
        model = EagleModel.load(folder, 6, target.embedding.shape, dtype=dtype)
        given = {"embedding": target.embedding.to(dtype), "head": target.head.to(dtype), "device": target.device}
        maker = BatchMaker(model.config, model.vocab, device=target.device, tile=2)
        step = maker.cut([Sequence(tokens, 1, hidden, none.long(), none)], [torch.tensor([4, 20])], GAMMA)
        outputs.append(hidden_states(model, frozen_part(model, SimpleNamespace(**given)), step, GAMMA).float())
    assert torch.cosine_similarity(*outputs, dim=-1).min() > 0.99


@pytest.mark.slow
def test_a_run_learns_and_is_measured_as_it_drafts(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    whole = arguments(target_folder, prompts, tmp_path / "whole")
    assert train.run(whole) == 0
    rows = check_learned(tmp_path / "whole")
    assert float(rows[-1]["tau"]) >= 1
    folder = tmp_path / "whole" / "drafter"
    written = json.loads((folder / "config.json").read_text())
    assert written.items() >= EagleConfig.from_json(read_json(folder)).to_json().items()
    check_what_measuring_finds(EagleDrafter.load, target_folder, folder, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["--draft-vocab 48", "--draft-vocab 0", "--start published"])
def test_sglangs_module_drafts_the_same_with_the_folder(
    target_folder: Path, prompts: Path, tmp_path: Path, begun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_eagle(tmp_path / "published", "specforge")
    args = arguments(target_folder, prompts, tmp_path / "run", *begun.split(), "--loss", "authors", "--steps", "4")
    assert train.run(args) == 0
    folder, target = tmp_path / "run" / "drafter", TargetModel.load(str(target_folder), dtype=torch.float32)
    served = EagleDrafter.load(make_target(target.config, target.embedding, target.head), folder, gamma=GAMMA)
    ids, hidden = torch.randint(3, 90, (20,)), torch.randn(20, 3 * target.config.hidden_size)
    given = {"embedding": target.embedding, "head": target.head, "gamma": GAMMA}
    texts = [([*ids.tolist(), 3], hidden)]
    torch.save({name: x.clone() if torch.is_tensor(x) else x for name, x in given.items()} | {"texts": texts},
               tmp_path / "texts")  # fmt: skip
    program = Path(__file__).with_name("eagle_by_sglang.py")
    (theirs,) = found_by_fork(program, *map(str, (target_folder, tmp_path / "texts", folder)))
    assert draft_after(served, ids, hidden).tokens.tolist() == theirs


@pytest.mark.slow
def test_a_published_head_goes_on(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """It has biases, norms of queries and keys, and its own embedding and head."""
    first = save_eagle(tmp_path / "published", "speculators")
    args = arguments(target_folder, prompts, tmp_path / "run", "--start", str(first), "--steps", "4")
    args.target_layers = None
    assert train.run(args) == 0
    before, after = (EagleModel.load(f, 6, (VOCAB, 32)).stored for f in (first, tmp_path / "run" / "drafter"))
    assert before.layers == after.layers
    assert before.tensors.keys() == after.tensors.keys()
    assert {n for n, x in before.tensors.items() if torch.equal(x, after.tensors[n])} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    assert torch.equal(before.vocab, after.vocab)
    args.kind = "dspark"
    with pytest.raises(ValueError, match="is a drafter of kind eagle3, not dspark"):
        train.run(args)


def test_untrainable_heads_are_refused(target_folder: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an EAGLE-3 head has one layer, not --draft-layers 2"):
        train.run(arguments(target_folder, prompts, tmp_path / "run", "--draft-layers", "2"))
    wide = save_eagle(tmp_path / "wide", "wide")
    with pytest.raises(CheckpointError, match="hidden_size is 32, the drafter was trained for 64"):
        train.run(arguments(target_folder, prompts, tmp_path / "run", "--start", str(wide)))
    some, out = save_eagle(tmp_path / "some", "speculators"), ["--out", tmp_path / "out"]
    given = [*out, "--storage", "speculators"], [*out, "--storage", "speculators", "--target", target_folder]
    for folder, words, message in (
        (wide, out, "stock SGLang loads an EAGLE-3 folder as it is"),
        (wide, given[0], "takes one EAGLE-3 folder, and --target"),
        (wide, given[1], "hidden_size is 32, the drafter was trained for 64"),
        (some, given[1], "has no place for biases of some products"),
    ):
        with pytest.raises(ValueError, match=message):
            exported(folder, *words)


@pytest.mark.parametrize("layout", ["authors", "specforge", "whole"])
def test_a_folder_of_speculators_drafts_the_same(layout: str, target_folder: Path, tmp_path: Path) -> None:
    folder, made = save_eagle(tmp_path / "head", layout), tmp_path / "made"
    assert exported(folder, "--out", made, "--storage", "speculators", "--target", target_folder) == 0
    target = TargetModel.load(str(target_folder))
    nothing = torch.zeros_like(target.embedding)
    drafts, width = [], len(LAYER_IDS) * target.config.hidden_size
    hidden, ids = torch.randn(20, width).bfloat16(), torch.randint(VOCAB, (20,))
    for path, rows in ((folder, target.embedding), (made, nothing)):
        given = dataclasses.replace(make_target(target.config, rows), dtype=torch.bfloat16)
        drafts.append(draft_after(EagleDrafter.load(given, path, gamma=GAMMA), ids, hidden, TEMPERATURE))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert_near(drafts[0].probs, drafts[1].probs, TERMS)
    config = json.loads((made / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target_folder)
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in LAYER_IDS]
