"""Every architecture of SGLang's registry is served or refused."""

import json
from collections import Counter
from pathlib import Path

import pytest
import showing_states
from own_process import found_by_fork
from refusals import refuses
from sglang_contracts import architectures
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.server.model import families, target
from outrider.server.model.families import BY_TRANSFORMERS, RECURRENT, REFUSED, SERVED
from outrider.server.model.target import Model
from outrider.server.plugin.text_alone import TEXT


def model_of(architecture: str, **config: object) -> Model:
    return Model("/model", "model", {"architectures": [architecture], **config}, Path("/model"))


def test_every_architecture_is_served_or_refused() -> None:
    """A new name must be compared in test_families_served.py, or its obstacle named."""
    listed = Counter([*SERVED, *(name for each in REFUSED for name in each.names.split())])
    assert not [name for name, count in listed.items() if count > 1]
    assert sorted(architectures() - listed.keys()) == []
    assert sorted(listed.keys() - architectures() - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}) == []


@pytest.mark.parametrize("refused", REFUSED, ids=lambda each: each.names.split()[0])
def test_unsupported_models_are_refused_in_one_line(refused: families.Refused) -> None:
    for name in refused.names.split():
        refuses(rf"^model \({name}\) is not served.*: .+", families.check, model_of(name), "cpu")
        if not refused.on_gpu:
            families.check(model_of(name), "cuda")


def test_served_and_unknown_models_pass() -> None:
    for name in (*SERVED, "NobodysModel"):
        families.check(model_of(name), "cpu")
    families.check(model_of("GraniteMoeHybridForCausalLM", layer_types=["attention"] * 2), "cuda")


@pytest.mark.parametrize("kind", sorted(families.STATEFUL))
def test_recurrent_layers_are_refused_whatever_the_architecture(kind: str) -> None:
    for device in ("cpu", "cuda"):
        model = model_of("NobodysModel", layer_types=["full_attention", kind])
        refuses("recurrent state", families.check, model, device)


def test_models_with_states_that_follow_accepted_tokens_are_served_on_cpus() -> None:
    """Configurations with three equal positions per token are served too."""
    of = {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": {"mrope_section": [2, 3, 3]}}
    for name in RECURRENT:
        families.check(model_of(name, **of), "cpu")
        refuses(rf"^model \({name}\) is not served on a GPU: .+", families.check, model_of(name, **of), "cuda")


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_tokens_with_three_positions_are_refused(field: str) -> None:
    for name in ("NobodysModel", "Qwen2_5_VLForConditionalGeneration"):
        refuses("M-RoPE", families.check, model_of(name, **{field: {"mrope_section": [2, 3, 3]}}), "cuda")


def test_texts_of_models_with_three_positions_are_served_on_cpus() -> None:
    for name in TEXT.values():
        families.check(model_of(name, rope_parameters={"mrope_section": [2, 3, 3]}), "cpu")


@pytest.mark.parametrize("text", ["text_config", None])
def test_a_text_model_is_found_in_a_model_with_images(text: str | None, tmp_path: Path) -> None:
    """Older folders have its fields at the top level."""
    fields = {"hidden_size": 8, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    whole = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]} | ({text: fields} if text else fields)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").touch()
    model = target.find(str(tmp_path))
    assert (model.config["architectures"], model.config["hidden_size"]) == (["Qwen2ForCausalLM"], 8)
    families.check(model, "cpu")
    refuses("M-RoPE", families.check, model, "cuda")


def test_models_by_transformers_import_its_code_alone() -> None:
    assert families.on_a_cpu(model_of("ApertusForCausalLM")) == families.TRANSFORMERS
    assert families.on_a_cpu(model_of("LlamaForCausalLM")) == ["LlamaForCausalLM"]


def test_a_model_of_several_parts_keeps_the_architecture_of_the_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["WholeForConditionalGeneration"], "quantization_config": {"quant_method": "awq"}, '
        '"text_config": {"architectures": ["Part"], "a": 1}}'
    )
    (tmp_path / "model.safetensors").touch()
    config = target.find(str(tmp_path)).config
    awq = {"quant_method": "awq"}
    assert config == {"architectures": ["WholeForConditionalGeneration"], "quantization_config": awq, "a": 1}


@pytest.mark.slow
def test_architectures_with_hidden_states() -> None:
    showing = set(found_by_fork(Path(showing_states.__file__)))
    assert showing >= families.SHOWING
    by_sglang = SERVED - BY_TRANSFORMERS - TEXT.keys()
    assert showing & by_sglang == families.SHOWING & by_sglang
