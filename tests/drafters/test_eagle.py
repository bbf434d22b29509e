"""EagleDrafter: the chain of the paper, for folders of every layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import Reference
from scenes import GAMMA, SLOTS, Scene, eagle_target, pages
from tiny_drafters import assert_same_draft, batch
from tiny_eagle import LAYER_IDS, LAYOUTS, flat, save_eagle, tensors_of

from outrider.drafters import encoding, networks, registry
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.eagle.checkpoint import memory
from outrider.drafters.eagle.drafter import EagleDrafter


def scene_of(layout: str, folder: Path) -> Scene:
    return Scene.named(f"eagle {layout}", folder)


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.usefixtures("compiled", "place")
def test_drafts_equal_the_paper(layout: str, tmp_path: Path) -> None:
    reference = Reference(flat(layout), tensors_of(layout), *eagle_target(layout).weights())
    scene_of(layout, tmp_path).check_drafts(reference)


@pytest.mark.usefixtures("place")
def test_a_prefix_is_shared_by_requests_that_go_on_differently(tmp_path: Path) -> None:
    """The row of its first own token is not at a shared slot, although its features are."""
    scene = scene_of("wide", tmp_path)
    used, table = scene.make(), pages()
    scene.observe(used, table, 0, 0, 20)
    table[1, :20] = table[0, :20]
    for row in (0, 1):
        scene.observe(used, table, row, 20, 24)
    asking = batch(table, [0, 1], [24, 24])
    for _ in range(2):  # in either order of encoding
        together = used.propose(asking)
        for row in (0, 1):
            fresh = scene.make()
            scene.observe(fresh, table, row, 0, 20, of=0)
            scene.observe(fresh, table, row, 20, 24)
            alone = fresh.propose(batch(table, [row], [24]))
            assert torch.equal(together.tokens[row], alone.tokens[0])


@pytest.mark.usefixtures("place")
def test_a_long_text_is_encoded_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BACKLOG", "BACKLOG_EACH", "ROOM", "MOST"):
        monkeypatch.setattr(encoding, name, 8)
    made, table = scene_of("wide", tmp_path).observed()
    asking = batch(table, [1], [30])
    lens = [int(made.propose(asking).lens[0]) for _ in range(5)]
    assert lens[0] == 0
    assert lens[-1] == GAMMA
    monkeypatch.undo()
    whole, table = scene_of("wide", tmp_path).observed()
    whole.on_host = True
    assert_same_draft(whole.propose(asking), made.propose(asking))


def test_a_draft_vocabulary_in_another_order_is_sorted(tmp_path: Path) -> None:
    """Acceptance needs a strictly increasing one."""
    from safetensors.torch import save_file

    scene = scene_of("authors", tmp_path)
    made, table = scene.observed()
    tensors, order = tensors_of("authors"), torch.randperm(40)
    known = (tensors["d2t"] + torch.arange(40))[order]
    tensors |= {"d2t": known - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order].contiguous()}
    save_file(tensors, tmp_path / "model.safetensors")
    reordered = EagleDrafter.load(eagle_target("authors"), tmp_path, gamma=GAMMA)
    reordered.allocate(SLOTS)
    scene.observe(reordered, table, 0, 0, 9)
    one, two = (d.propose(batch(table, [0], [9], 1.0)) for d in (made, reordered))
    assert_same_draft(one, two)
    assert bool((two.vocab.diff() > 0).all())


def test_layers_and_kind_of_each_layout(layout: str, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path, layout)
    assert networks.read_config(folder).kind == "eagle3"
    assert registry.serving(networks.read_config(folder).kind) == ("eagle3",)
    assert EagleDrafter.load(eagle_target(layout), folder, gamma=GAMMA).target_layers == tuple(LAYER_IDS)


def test_default_layers_equal_sglangs_and_vllms(tmp_path: Path) -> None:
    """The inputs of layers 2, n / 2 and n - 3."""
    folder = save_eagle(tmp_path, "authors", eagle_config=None)
    made = EagleDrafter.load(eagle_target("authors", num_hidden_layers=32), folder, gamma=GAMMA)
    assert made.target_layers == (1, 15, 28)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 512}, r"kv_lora_rank \(latent attention \(MLA\)\)"),
        ({"num_experts": 8}, "experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, r"eagle_config\.use_mtp_layernorm True"),
        ({"eagle_config": {"something_new": 3}}, r"eagle_config\.something_new 3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"draft_vocab_size": 39}, r"d2t must be \[39\]|lm_head.weight"),
        ({"intermediate_size": 50}, "mlp.* by its config.json"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"vocab_size": 97}, "vocab_size is 96, the drafter was trained for 97"),
        ({"target_hidden_size": 16}, "fc.weight"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}, r"must rise within 0\.\.4"),
    ],
)
def test_mismatches_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path, "authors", **changes)
    with pytest.raises(CheckpointError, match=message) as refused:
        EagleDrafter.load(eagle_target("authors"), folder, gamma=GAMMA)
    assert "\n" not in str(refused.value)


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_eagle(tmp_path, "authors")
    for change, message in (
        ({"midlayer.mlp.gate_proj.bias": torch.ones(48)}, r"does not know: layers\.0\.mlp\.gate_proj\.bias"),
        ({"layers.1.mlp.gate_proj.weight": torch.ones(48, 32)}, r"layers\.1\.mlp"),
        ({"fc.weight": None}, r"lacks fc\.weight"),
        ({"d2t": None}, "lacks it"),
        ({"d2t": torch.zeros(40, dtype=torch.int64) - 1}, "must name 40 different tokens"),
        ({"aux_norm_low.weight": torch.ones(32)}, r"lacks fc_norm\.1\.weight, fc_norm\.2\.weight"),
    ):
        tensors = {name: value for name, value in (tensors_of("authors") | change).items() if value is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            EagleDrafter.load(eagle_target("authors"), tmp_path, gamma=GAMMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors; weights in \*\.bin are not read"):
        EagleDrafter.load(eagle_target("authors"), tmp_path, gamma=GAMMA)


def test_the_first_folders_call_themselves_a_llama(tmp_path: Path) -> None:
    folder = save_eagle(tmp_path, "authors", architectures=["LlamaForCausalLM"])
    assert networks.read_config(folder).kind == "eagle3"
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match="is unknown"):
        networks.read_config(folder)


def test_the_estimated_memory_is_the_drafters(layout: str, tmp_path: Path) -> None:
    made = scene_of(layout, tmp_path).make()
    network = made.network
    told = registry.memory("eagle3", str(tmp_path), lookup_gamma=4, dtype=torch.float32)
    pools = network.keys.nbytes + network.values.nbytes + made.features.nbytes
    assert told.per_slot == pools / SLOTS + 2 * 4
    weights = sum(t.numel() * 4 for name, t in tensors_of(layout).items() if name not in ("d2t", "t2d"))
    assert weights <= memory(tmp_path, torch.float32)[0] <= 2 * weights + 4 * 64 * 32
