"""`--model outrider-dllm`: the embedded model with its delta."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from outrider.drafters.conversion.delta import FIELDS
from outrider.server.model import bundled_model, gguf_model, target


def test_the_folder_is_the_embedded_model_with_its_delta() -> None:
    model = target.find(bundled_model.DLLM_NAME)
    assert model.name == bundled_model.DLLM_NAME
    assert model.config["architectures"] == ["LlamaForCausalLM"]
    delta = json.loads((bundled_model.DELTA / "config.json").read_text())
    assert {name: model.config[name] for name in FIELDS} == {name: delta[name] for name in FIELDS}
    factors = load_file(bundled_model.DELTA / "model.safetensors")
    plain = gguf_model.unpack(bundled_model.prepare())
    assert model.folder is not None
    with (
        safe_open(plain / "model.safetensors", "pt") as before,
        safe_open(model.folder / "model.safetensors", "pt") as after,
    ):
        name = "model.layers.29.mlp.down_proj.weight"
        a, b = (
            factors[f"layers.29.down_proj.{part}"].float() * factors[f"layers.29.down_proj.{part}.scale"]
            for part in "ab"
        )
        expected = before.get_tensor(name).float() + b.T @ a
        assert not torch.equal(before.get_tensor(name), after.get_tensor(name))
        torch.testing.assert_close(after.get_tensor(name).float(), expected, atol=1e-6, rtol=2**-8)
        old, new = (file.get_tensor("model.embed_tokens.weight") for file in (before, after))
    changed = (old != new).any(1).nonzero()[:, 0].tolist()
    assert changed == [delta["mask_token_id"]]


def test_the_shipped_delta_takes_six_megabytes_at_most() -> None:
    assert sum(file.stat().st_size for file in bundled_model.DELTA.iterdir()) <= 6_000_000
