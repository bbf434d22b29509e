"""Folders of LoRA adapters, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.server.errors import UserError
from outrider.server.machine import hardware
from outrider.server.model.target import Model
from outrider.server.settings.adapters import with_adapters
from outrider.server.settings.settings import Settings

CONFIG = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **CONFIG))


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "one", model, 1)


def test_a_digest_depends_on_the_content(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    digest = AdapterFolder.open(folder).digest()
    same, other, scaled = (tmp_path / name for name in ("same", "other", "scaled"))
    assert AdapterFolder.open(write_adapter(same, model, 1)).digest() == digest
    assert AdapterFolder.open(write_adapter(other, model, 2)).digest() != digest
    assert AdapterFolder.open(write_adapter(scaled, model, 1, lora_alpha=5)).digest() != digest


def test_weights_and_their_scale(folder: Path) -> None:
    adapter = AdapterFolder.open(folder)
    adapter.check(CONFIG)
    assert len(adapter.shapes) == 14
    weights = adapter.weights()
    assert {name: (down.shape, up.shape) for name, (down, up) in weights.items()} == adapter.shapes
    assert adapter.scale(4) == 2.0
    by_root = write_adapter(
        folder.parent / "two", LlamaForCausalLM(LlamaConfig(vocab_size=8, **CONFIG)), 2, use_rslora=True
    )
    assert AdapterFolder.open(by_root).scale(4) == 4.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "DoRA changes the lengths"),
        ("bias", "all", "it changes biases"),
        ("modules_to_save", ["lm_head"], "it replaces whole modules"),
        ("peft_type", "IA3", "it is no LoRA adapter"),
        ("alpha_pattern", {"q_proj": 3}, "its scale differs"),
        ("lora_alpha", None, "no number lora_alpha"),
    ],
)
def test_unsupported_adapters_are_refused(folder: Path, field: str, value: Any, message: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=message):
        AdapterFolder.open(folder)


def test_damaged_folders(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        AdapterFolder.open(folder / "none")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, weights)
    with pytest.raises(ValueError, match="only A and B of linear layers"):
        AdapterFolder.open(folder)
    save_file({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(2, 16)}, weights)
    with pytest.raises(ValueError, match="that fit each other"):
        AdapterFolder.open(folder)
    weights.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read"):
        AdapterFolder.open(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="it has no adapter_model"):
        AdapterFolder.open(folder)
    config.write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        AdapterFolder.open(folder)
    config.unlink()
    with pytest.raises(ValueError, match="it has no adapter_config"):
        AdapterFolder.open(folder)


def test_adapters_of_another_model(folder: Path) -> None:
    adapter = AdapterFolder.open(folder)
    with pytest.raises(ValueError, match="it changes layer 1 of 1"):
        adapter.check(CONFIG | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="has 16 hidden numbers, the model 32"):
        adapter.check(CONFIG | {"hidden_size": 32})


def test_flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("here", "tiny", CONFIG, folder)

    def given(*paths: str, **more: Any) -> Settings:
        return with_adapters(Settings(device=more.pop("device", "cpu"), lora_paths=paths, **more), model)

    assert given(f"a={folder}", f"b={folder}").lora_paths == (f"a={folder}", f"b={folder}")
    assert not given().has_adapters
    assert given(enable_lora=True).has_adapters
    for paths, message in (
        ((str(folder),), "takes NAME=FOLDER"),
        ((f"={folder}",), "takes NAME=FOLDER"),
        ((f"a={folder}", f"a={folder}"), "the name a is taken"),
        ((f"tiny={folder}",), "the name tiny is taken"),
        (("a=/no/such",), "the adapter a in /no/such: there is no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            given(*paths)
    with pytest.raises(UserError, match="not divided over --tp-size"):
        given(f"a={folder}", sglang_flags=("--tp-size", "2"), engines=1)
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    assert given(f"a={folder}", device="cuda").has_adapters
    with pytest.raises(UserError, match="goes with --lora-paths"):
        given(enable_lora=True, device="cuda")


def test_adapters_that_sglang_would_misread_are_refused_on_gpus(model: PreTrainedModel, tmp_path: Path) -> None:
    options: dict[str, Any]
    for name, options, message in (
        ("root", {"use_rslora": True}, "rank-stabilised"),
        ("key", {"modules": ("q_proj", "k_proj")}, r"only together with model\.layers\.0\.self_attn\.v_proj"),
        ("up", {"modules": ("up_proj",)}, r"only together with model\.layers\.0\.mlp\.gate_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            AdapterFolder.open(write_adapter(tmp_path / name, model, 1, **options)).check_for_sglang()
    AdapterFolder.open(write_adapter(tmp_path / "all", model, 1)).check_for_sglang()
