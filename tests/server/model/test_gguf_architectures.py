"""Every architecture served from GGUF files, compared with the transformers model that was written."""

import re
from pathlib import Path

import gguf_models
import pytest
import torch
from gguf_models import MODELS, PROMPT, logprobs
from transformers import AutoModelForCausalLM

from outrider.server.model import gguf_architectures, gguf_model, target

README = Path(__file__).parents[3] / "server" / "README.md"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def test_every_architecture_has_a_model_here() -> None:
    assert {model.architecture for model in MODELS.values()} == gguf_architectures.SUPPORTED.keys()


def test_the_readme_names_all_architectures_and_types() -> None:
    (row,) = re.findall(r"^\| (llama .*) \| (.*) \|$", README.read_text(), re.MULTILINE)
    architectures, types = (re.sub(r" \(.*?\)", "", cell).split(", ") for cell in row)
    assert architectures == list(gguf_architectures.SUPPORTED)
    assert types == list(gguf_model.TYPES)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_written_models(tmp_path: Path, name: str) -> None:
    expected = gguf_models.write(name, tmp_path / "tiny.gguf", "Q8_0")
    folder = target.plain_folder(str(tmp_path / "tiny.gguf"))
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logprobs(ours, PROMPT), logprobs(expected, PROMPT), atol=2e-5, rtol=1e-5)
