"""A scheduler imports only the modules of SGLang that its model needs."""

from pathlib import Path

from outrider.server.processes import model_modules


def test_modules_with_the_architecture_are_kept() -> None:
    folder = model_modules.sglangs()
    others = model_modules.unneeded(["LlamaForCausalLM"], folder)
    assert "llama" not in others
    assert {"qwen3", "gemma3_causal"} <= set(others)
    both = set(model_modules.unneeded(["LlamaForCausalLM", "Qwen3ForCausalLM"], folder))
    assert set(others) - both == {"qwen3"}


def test_lists_of_several_lines_and_names_within_names(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Big(Model): ...\n\nEntryClass = [\n    Model,\n    Big,\n]\n")
    (tmp_path / "b.py").write_text("class BigModel: ...\nEntryClass = BigModel\n")
    (tmp_path / "c.py").write_text("from a import Big  # a helper of b\n")
    assert model_modules.unneeded(["Big"], tmp_path) == ["b", "c"]


def test_all_modules_are_kept_for_an_unknown_architecture(tmp_path: Path) -> None:
    assert model_modules.unneeded(["NobodysModel"], model_modules.sglangs()) == []
    assert model_modules.unneeded([], model_modules.sglangs()) == []
    assert model_modules.environment(["NobodysModel"]) == {}
