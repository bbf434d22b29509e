"""MtpDrafter: the chain of Transformers' layer, for checkpoints of every layout, and its refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scenes import GAMMA, LENGTHS, SLOTS, Scene, mtp_target, pages
from tiny_drafters import assert_same_draft, batch
from tiny_mtp import JOINED, LAYOUTS, VOCAB, Reference, add_mtp, save_mtp

from outrider.drafters import networks
from outrider.drafters.config_file import CheckpointError
from outrider.drafters.mtp.checkpoint import is_carried, load
from outrider.drafters.mtp.config import MtpConfig
from outrider.drafters.mtp.drafter import MtpDrafter
from outrider.drafters.mtp.experts import joined


def scene_of(layout: str, folder: Path) -> Scene:
    return Scene.named(f"mtp {layout}", folder)


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.usefixtures("compiled", "place")
def test_drafts_equal_transformers_layer(layout: str, tmp_path: Path) -> None:
    scene_of(layout, tmp_path).check_drafts(Reference(layout, *mtp_target(layout).weights()))


def test_a_rounded_layer_drafts_nearly_the_same(layout: str, tmp_path: Path) -> None:
    scene, target = scene_of(layout, tmp_path), mtp_target(layout)
    embedding, head = target.weights()
    rounded = dataclasses.replace(target, weights=lambda: (embedding, head), dtype=torch.bfloat16)
    probs = []
    for each in (target, rounded):
        made, table = MtpDrafter.load(each, tmp_path, gamma=GAMMA), pages()
        made.allocate(SLOTS)
        scene.observe(made, table, 1, 0, 30)
        draft = made.propose(batch(table, [1], [30], 20.0))
        probs.append(draft.probs[0, 0])
    assert float((probs[0] - probs[1]).abs().sum()) < 0.1


@pytest.mark.parametrize("layout", ["qwen3-next", "qwen3.5 with experts", "glm with groups"])
def test_a_gpus_path_drafts_the_same(layout: str, tmp_path: Path) -> None:
    """The experts' weights are adjacent, and the host does not know the steps' lengths."""
    scene = scene_of(layout, tmp_path)
    (made, table), (other, _) = scene.observed(), scene.observed()
    other.on_host = other.shortens = False
    experts, weights = other.network.mlp, load(tmp_path, dtype=torch.float32)
    experts.joined = joined(weights.tensors, experts.config.count)
    assert layout == JOINED or not any(".experts." in name for name in weights.tensors)
    for temperature in (0.0, 1.0):
        asking = batch(table, [0, 1, 2], list(LENGTHS), temperature)
        draft, wanted = other.propose(asking), made.propose(asking)
        assert_same_draft(draft, wanted)


def test_only_the_layer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_mtp(tmp_path, "qwen3.5")
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if "mtp" in name}
    save_file({"model.embed_tokens.weight": torch.full((4,), torch.nan)}, folder / "model.safetensors")
    assert not is_carried(folder)
    add_mtp(folder, tensors)
    assert is_carried(folder)
    load(folder)  # it would report that the embedding is NaN


def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    stored = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        stored.pop(name, None)
        if value is not None:
            stored[name] = value
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("layout", "tensors", "message"),
    [
        ("qwen3.5", {"mtp.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}, "know: layers.0.mlp.up_proj.w"),
        ("qwen3.5", {"mtp.layers.1.mlp.up_proj.weight": torch.ones(1)}, "does not know: layers.1.mlp"),
        ("qwen3.5", {"mtp.embed_tokens.weight": torch.ones(1)}, "does not know: embed_tokens"),
        ("qwen3-next", {"mtp.layers.0.mlp.experts.7.up_proj.weight": None}, "lacks layers.0.mlp.experts.7.up_proj.w"),
        ("glm-4.5", {"model.layers.6.self_attn.q_norm.weight": None}, "lacks layers.0.self_attn.q_norm.weight"),
        ("glm-4.5", {"model.layers.6.eh_proj.weight": torch.ones(4, 4)}, r"fc.weight: \[4, 4\] in the checkpoint"),
        ("glm-4.5", {"model.layers.6.enorm.weight": torch.full((32,), torch.nan)}, "has values that are not finite"),
    ],
)
def test_mismatches_are_refused(
    tmp_path: Path, layout: str, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    changed(save_mtp(tmp_path, layout), **tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_layers_that_are_not_built_here_are_refused_by_name(tmp_path: Path) -> None:
    save_mtp(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MiMoForCausalLM"]}))
    with pytest.raises(CheckpointError, match="MTP layers of MiMoForCausalLM are not supported; supported are Qwen3N"):
        load(tmp_path)
    assert not is_carried(tmp_path)


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic"}}])
def test_shapes_that_are_not_built_here_are_refused_by_name(changes: dict[str, Any]) -> None:
    config = {"architectures": ["Qwen3NextForCausalLM"], "num_attention_heads": 2, "hidden_size": 32} | changes
    with pytest.raises(CheckpointError, match=r"hidden_act 'gelu'|rope_type 'dynamic'"):
        MtpConfig.from_json(config)


def test_a_layer_of_another_target_is_refused(tmp_path: Path) -> None:
    folder = save_mtp(tmp_path)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 9, its own is 6"):
        MtpDrafter.load(mtp_target("qwen3-next", num_hidden_layers=9), folder, gamma=GAMMA)
    with pytest.raises(CheckpointError, match=r"vocab_size is 80, its own is 96"):
        networks.check_target(folder, {"vocab_size": 80})


def test_memory_is_known_beforehand(layout: str, tmp_path: Path) -> None:
    folder = save_mtp(tmp_path, layout)
    weights = load(folder, dtype=torch.float32)
    fixed, per_slot = networks.memory(folder, torch.float32)
    stored = sum(value.numel() for value in weights.tensors.values())
    config = weights.config
    assert fixed == 4 * (stored + VOCAB * config.hidden_size + 64 * config.rotary_dim)
    made = MtpDrafter.load(mtp_target(layout), folder, gamma=GAMMA)
    made.allocate(SLOTS)
    kept = (made.network.keys, made.network.values, made.features)
    assert per_slot * SLOTS == sum(x.numel() * 4 for x in kept)
