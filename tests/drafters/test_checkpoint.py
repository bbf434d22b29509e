"""Checkpoint folders: both storages, refusals, and agreement with SGLang's loaders."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from own_process import found_by_fork
from safetensors.torch import load_file, save_file
from scenes import BLOCKS
from tiny_drafters import CONFIGS, DFLASH, DIFFUSIONS, TINY, TRUNCATED, make_diffusion, make_model, make_target
from transformers import LlamaConfig

from outrider.drafters import networks
from outrider.drafters.block.checkpoint import (
    WEIGHTS,
    check_target,
    load,
    plain_name,
    save_compact,
    save_plain,
    target_identity,
)
from outrider.drafters.block.drafter import BlockDrafter
from outrider.drafters.block.model import DraftModel
from outrider.drafters.config_file import CheckpointError


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(params=[*BLOCKS, *DIFFUSIONS])
def model(request: pytest.FixtureRequest) -> DraftModel:
    name = request.param
    return make_model(BLOCKS[name]) if name in BLOCKS else make_diffusion(DIFFUSIONS[name])


def test_plain_folder_round_trips(model: DraftModel, tmp_path: Path) -> None:
    config = model.config
    save_plain(model, tmp_path, torch.float32)
    again = networks.load_any(tmp_path, dtype=torch.float32)
    assert again.config == dataclasses.replace(config, draft_vocab_size=None)
    assert networks.read_config(tmp_path).kind == config.kind
    contexts = config.hidden_size if getattr(model, "lilicorr", None) else 0
    _, state = networks.memory(tmp_path, torch.float32)
    assert state == 4 * (2 * config.num_layers * config.num_kv_heads * config.head_dim + contexts)
    for name, value in again.state_dict().items():
        mine = model.state_dict()[name]
        assert torch.equal(value[model.vocab] if name == "markov_head.w2.weight" else value, mine), name


def test_compact_folder_keeps_one_part_in_254(model: DraftModel, tmp_path: Path) -> None:
    save_compact(model, tmp_path)
    again = networks.load_any(tmp_path, dtype=torch.float32)
    assert again.config == model.config
    assert torch.equal(again.vocab, model.vocab)
    for name, value in again.state_dict().items():
        mine = model.state_dict()[name].float()
        limit = mine.abs().amax(-1, keepdim=True) / (254 if mine.ndim == 2 and mine.shape[0] > 1 else 128)
        assert ((value - mine).abs() <= limit * 1.001).all(), name


def test_public_folders_load(tmp_path: Path) -> None:
    """They have prefixed names, shared weights inside, and settings in `dflash_config`."""
    model = make_model(DFLASH)
    save_plain(model, tmp_path)
    tensors = {f"model.{n}": v for n, v in load_file(tmp_path / WEIGHTS).items()}
    shared = {"lm_head.weight": torch.zeros(2, 2), "model.embed_tokens.weight": torch.zeros(2, 2)}
    save_file({**tensors, **shared}, tmp_path / WEIGHTS)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("outrider", "target_layer_ids", "mask_token_id"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = load(tmp_path)
    assert again.config.target_layers == DFLASH.target_layers
    assert again.config.gamma == DFLASH.gamma
    assert torch.equal(again.fc.weight, model.fc.weight.bfloat16())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3.*is unknown"),
        ({"target_layer_ids": [1, 3, 6]}, r"\[1, 3, 6\] must rise within 0\.\.4"),
        ({"target_layer_ids": [1, 3, 5]}, r"within 0\.\.4: of 6 layers all but the last can be read"),
        ({"target_layer_ids": [3, 1]}, r"\[3, 1\] must rise"),
        ({"target_layer_ids": [1, 1]}, r"\[1, 1\] must rise"),
        ({"target_layer_ids": [-1, 1]}, r"\[-1, 1\] must rise"),
        ({"target_layer_ids": []}, r"\[\] must rise"),
        ({"target_layer_ids": [1, 0], "num_target_layers": 0}, r"must rise from 0"),
        ({"block_size": None}, "no 'block_size'"),
        ({"mask_token_id": 96}, "mask_token_id 96 is outside"),
        ({"markov_head_type": "lstm"}, "lstm.*vanilla, gated, rnn"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"is_causal": True}, "is_causal"),
        ({"hidden_size": 48}, r"fc.weight: \[32, 96\] in the checkpoint, \[48, 144\] by its config"),
        ({"num_hidden_layers": 3}, "lacks layers.2"),
        ({"num_hidden_layers": 1}, "does not know: layers.1"),
    ],
)
def test_unfit_folders_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    save_plain(make_model(TINY), tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def target_config(**changes: object) -> SimpleNamespace:
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 6, "vocab_size": 96}
    return SimpleNamespace(**(shape | changes))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-100], lambda data: data[:100], lambda data: b"", lambda data: bytes(100) + data[100:]],
    ids=["without its end", "beginning alone", "empty", "other beginning"],
)
def test_damaged_files_are_noticed(damage: Callable[[bytes], bytes], compact: bool, tmp_path: Path) -> None:
    (save_compact if compact else save_plain)(make_model(DFLASH), tmp_path)
    path = tmp_path / WEIGHTS
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged") as raised:
        load(tmp_path)
    assert "\n" not in str(raised.value)


def test_weights_that_are_no_numbers_are_noticed(tmp_path: Path) -> None:
    model = make_model(DFLASH)
    model.fc.weight[3, 5] = torch.nan
    save_plain(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"fc\.weight has values that are not finite"):
        load(tmp_path)


def test_damaged_config_is_noticed(tmp_path: Path) -> None:
    save_plain(make_model(DFLASH), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        load(tmp_path)


def test_a_wrong_target_is_refused_with_the_difference(tmp_path: Path) -> None:
    embedding = torch.randn(96, 32)
    identity = target_identity(target_config(), embedding)
    save_compact(make_model(dataclasses.replace(TRUNCATED, target=identity)), tmp_path)
    drafter = BlockDrafter.load(make_target(target_config(), embedding), tmp_path)
    assert drafter.model.config.target == identity
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 8, the drafter was trained for 6"):
        BlockDrafter.load(make_target(target_config(num_hidden_layers=8), embedding), tmp_path)
    with pytest.raises(CheckpointError, match=r"embedding is .*, the drafter was trained for"):
        BlockDrafter.load(make_target(target_config(), torch.randn(96, 32)), tmp_path)
    with pytest.raises(CheckpointError, match=r"hidden_size is 64.*vocab_size is 100"):
        check_target(TINY, {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 6})


def test_a_drafter_that_reads_the_last_layer_is_refused() -> None:
    """Even if the checkpoint lacks its target's number of layers: the last layer's output cannot be captured."""
    unsaid = dataclasses.replace(TINY, num_target_layers=0)
    target = {"hidden_size": 32, "vocab_size": 96}
    check_target(unsaid, target | {"num_hidden_layers": 6})
    check_target(unsaid, target)
    with pytest.raises(CheckpointError, match=r"\[1, 3, 4\] must rise within 0\.\.3: of 5 layers all but the last"):
        check_target(unsaid, target | {"num_hidden_layers": 5})


def test_identity_does_not_depend_on_dtype() -> None:
    embedding = torch.randn(96, 32).bfloat16()
    assert target_identity(target_config(), embedding) == target_identity(target_config(), embedding.float())


@pytest.mark.slow
def test_stock_sglang_loads_our_folders(tmp_path: Path) -> None:
    pytest.importorskip("sglang")
    target = tmp_path / "target"
    LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(target)  # fmt: skip
    kinds = ["dspark", "truncated", "rnn", "gated", "behind", "dflash"]
    models = [make_model(CONFIGS[kind]) for kind in kinds]
    for kind, model in zip(kinds, models, strict=True):
        save_plain(model, tmp_path / kind, torch.float32)
    program = Path(__file__).with_name("sglang_loads.py")
    folders = [str(tmp_path / kind) for kind in kinds]
    for kind, model, loaded in zip(kinds, models, found_by_fork(program, str(target), *folders), strict=True):
        assert loaded["unfilled"] == [], kind
        assert loaded["block_size"] == model.config.gamma + (kind == "dflash")
        assert loaded["sample_from_anchor"] == model.config.sample_from_anchor
        assert loaded["layers"] == len(model.config.target_layers)
        ours = load(tmp_path / kind, dtype=torch.float32).state_dict()
        renamed = {sglang_name(name): digest(value) for name, value in ours.items()}
        assert loaded["digests"] == renamed, kind


def sglang_name(name: str) -> str:
    name = name.replace(".qkv.", ".self_attn.qkv_proj.").replace(".gate_up.", ".mlp.gate_up_proj.")
    return plain_name(name)


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
