"""`--drafter auto` finds a drafter in folders and in the hub's cache."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from refusals import refuses
from safetensors.torch import load_file, save_file
from tiny_drafters import BEHIND, DFLASH, DIFFUSION, TINY, make_diffusion, make_model, save_target
from tiny_eagle import save_eagle
from tiny_mtp import save_mtp

from outrider.drafters.block.checkpoint import save_compact, save_plain
from outrider.server.cli import main
from outrider.server.model import target
from outrider.server.settings import checkpoints, drafter_search, learning
from outrider.server.settings.resolve import resolve
from outrider.server.settings.settings import Settings

DSPARK, EAGLE = "deepseek-ai/dspark_qwen3_8b_block7", "RedHatAI/Qwen3-8B-speculator.eagle3"
GAMMA = 3

Found = tuple[Settings, str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a name that has public drafters."""
    return save_target(tmp_path / "models" / "Qwen3-8B")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A repository's folder in an empty hub cache, as downloaded."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def make(repo: str) -> Path:
        root = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text("1" * 40)
        return root / "snapshots" / ("1" * 40)

    return make


def take(folder: Path, **settings: Any) -> Found:
    """Settings after the search, and its log line."""
    lines: list[str] = []
    asked = Settings(model=str(folder), gamma=GAMMA, **settings)
    resolved = drafter_search.with_found_drafter(asked, target.find(str(folder)), lines.append)
    (line,) = lines
    assert "\n" not in line
    return resolved, line


def test_without_drafters_none_is_found(folder: Path, hub: Callable[[str], Path]) -> None:
    settings, line = take(folder)
    assert settings.drafter == "auto"
    assert checkpoints.with_drafter_path(settings, target.find(str(folder))).drafter == "ngram"
    assert line == (
        f"Drafter ngram: no drafter of Qwen3-8B is here; public: {DSPARK} (--drafter-path fetches it; "
        f"all: outrider drafters {folder})"
    )
    other = save_target(folder.parent / "other")
    assert take(other)[1] == "Drafter ngram: no drafter of other is here"


def test_a_drafter_in_the_hubs_cache_is_taken_by_its_name(folder: Path, hub: Callable[[str], Path]) -> None:
    cached = save_eagle(hub(EAGLE), "speculators")
    settings, line = take(folder)
    assert (settings.drafter, settings.drafter_path) == ("eagle3", str(cached))
    assert line == f"Drafter eagle3: {EAGLE}, in the hub's cache, fits Qwen3-8B (--drafter ngram does without)"
    save_plain(make_model(TINY), hub(DSPARK))
    assert take(folder)[0].drafter == "dspark"


def test_the_target_itself_may_lie_in_the_hubs_cache(hub: Callable[[str], Path]) -> None:
    model = save_target(hub("Qwen/Qwen3-8B"))
    save_plain(make_model(TINY), hub(DSPARK))
    assert take(model)[0].drafter == "dspark"


@pytest.mark.parametrize("place", ["dspark_qwen3_8b_block7", DSPARK])
def test_a_sibling_folder_is_taken_by_its_name(folder: Path, hub: Callable[[str], Path], place: str) -> None:
    save_plain(make_model(TINY), folder.parent / place)
    settings, line = take(folder)
    assert (settings.drafter, settings.drafter_path) == ("dspark", str((folder.parent / place).resolve()))
    assert f"{DSPARK}, in {(folder.parent / place).parent}, fits" in line


def test_a_drafter_in_the_models_folder_comes_first(folder: Path, hub: Callable[[str], Path]) -> None:
    save_plain(make_model(TINY), hub(DSPARK))
    save_compact(make_diffusion(DIFFUSION), folder / "drafter")
    settings, line = take(folder)
    assert (settings.drafter, settings.drafter_path) == ("deer", str(folder / "drafter"))
    assert "in the model's folder, fits" in line


def test_a_requested_drafter_stays(folder: Path, hub: Callable[[str], Path]) -> None:
    save_compact(make_model(TINY), folder / "drafter")
    model = target.find(str(folder))
    for given in ({"drafter": "ngram"}, {"drafter_path": "elsewhere"}, {"drafter": "off"}):
        asked = Settings(model=str(folder), **given)  # type: ignore[arg-type]
        assert drafter_search.with_found_drafter(asked, model, pytest.fail) == asked


def plain(config: Any, **changes: Any) -> Callable[[Path], object]:
    """Save a drafter whose configuration has these changes."""
    return lambda path: save_plain(make_model(replace(config, **changes)), path)


def eagle(**changes: Any) -> Callable[[Path], object]:
    return lambda path: save_eagle(path, **changes)


def configured(text: str) -> Callable[[Path], object]:
    """A folder with a config.json and no weights."""
    return lambda path: (path.mkdir(parents=True), (path / "config.json").write_text(text))


BEYOND = {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}
CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "hidden size": (plain(TINY, hidden_size=64), "hidden_size is 32, the drafter was trained for 64"),
    "vocabulary": (plain(DFLASH, vocab_size=80), "vocab_size is 96, the drafter was trained for 80"),
    "layers": (plain(BEHIND, num_target_layers=12), "num_hidden_layers is 6, the drafter was trained for 12"),
    "layers of a head": (eagle(eagle_config=BEYOND), r"target_layer_ids \[1, 3, 9\] must rise within 0..4"),
    "vocabulary of a head": (eagle(vocab_size=100), "trained for 100"),
    "length": (plain(TINY, gamma=2), "it drafts 2 tokens at most; say --gamma 2"),
    "no weights": (configured(json.dumps(TINY.to_json())), "has no model.safetensors"),
    "no drafter": (configured('{"architectures": ["Other"]}'), "is unknown"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_mismatched_drafter_is_refused_with_the_reason(tmp_path: Path, hub: Callable[[str], Path], what: str) -> None:
    make, reason = CHANGES[what]
    folder = save_target(tmp_path / "other")
    make(folder / "drafter")
    settings = Settings(model=str(folder), gamma=GAMMA)
    (one,) = drafter_search.candidates(settings, target.find(str(folder)))
    assert not one.fits
    resolved, line = take(folder)
    assert resolved == settings
    for said in (one.obstacle, line):
        assert re.search(reason, said)


def test_a_damaged_drafter_is_skipped(folder: Path, hub: Callable[[str], Path]) -> None:
    """Its header is sound, but not its weights."""
    cached = hub(DSPARK)
    save_plain(make_model(TINY), cached)
    save_eagle(hub(EAGLE), "speculators")
    file = cached / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-64:] = b"\xff" * 64  # NaN
    file.write_bytes(content)
    assert take(folder)[0].drafter == "eagle3"


def test_without_hidden_states_a_drafter_that_needs_none_is_taken(tmp_path: Path, hub: Callable[[str], Path]) -> None:
    folder = save_target(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_compact(make_model(TINY), folder / "a")
    assert "SGLang shows drafters no hidden states of Qwen2ForCausalLM" in take(folder)[1]
    save_compact(make_diffusion(DIFFUSION), folder / "b")
    assert take(folder)[0].drafter == "deer"


def test_an_mtp_layer_is_the_last_choice(
    tmp_path: Path, hub: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_mtp(tmp_path / "models" / "own", "glm-4.5")
    settings, line = take(folder)
    assert (settings.drafter, settings.drafter_path) == ("mtp", str(folder))
    assert line == f"Drafter mtp: {folder}, in the model's checkpoint, fits own (--drafter ngram does without)"
    asked = checkpoints.with_drafter_path(Settings(model=str(folder), drafter="mtp"), target.find(str(folder)))
    assert (asked.drafter, asked.drafter_path) == ("mtp", str(folder))
    assert main.main(["drafters", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"mtp       {folder}, in the model's checkpoint, fits\n" in said
    assert f"--drafter auto takes mtp, {folder}\n" in said
    save_compact(make_diffusion(DIFFUSION), folder / "drafter")
    assert take(folder)[0].drafter == "deer"


def test_an_mtp_layer_that_cannot_draft_is_refused_with_the_reason(tmp_path: Path, hub: Callable[[str], Path]) -> None:
    folder = save_mtp(tmp_path / "own", "qwen3.5")
    model = target.find(str(folder))
    assert "--learn does not train a target's own MTP layer" in take(folder, learn=True)[1]

    def refusal(**settings: Any) -> str:
        asked = Settings(model=str(folder), drafter="mtp", **settings)
        return refuses("", checkpoints.with_drafter_path, asked, model)

    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"mtp.fc.weight_scale_inv": torch.ones(1)}, file)
    unknown = "drafter checkpoint has tensors this loader does not know: fc.weight_scale_inv"
    assert unknown in take(folder)[1]
    assert refusal() == f"--drafter mtp: {unknown}; use --drafter ngram"
    save_file({"model.norm.weight": tensors["mtp.norm.weight"]}, file)
    assert refusal() == f"--drafter mtp: {folder} has no MTP layer: no tensors mtp.*; use --drafter ngram"
    assert take(folder)[1] == "Drafter ngram: no drafter of own is here"
    assert "model.safetensors" not in refusal(drafter_path=str(save_target(tmp_path / "llama")))
    model = replace(model, folder=None, path="owner/own")
    assert refusal().startswith(f"{model.name} is not here yet; leave --drafter out")


def test_mtp_layers_draft_on_gpus_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_mtp(tmp_path / "own", "glm-4.5")
    monkeypatch.setattr("outrider.server.machine.hardware.has_gpu", lambda: True)
    assert take(folder)[1].startswith(f"Drafter mtp: {folder}")
    for given in ({"drafter": "mtp"}, {"drafter_path": str(folder)}):
        settings = Settings(model=str(folder), **given)  # type: ignore[arg-type]
        assert checkpoints.with_drafter_path(settings, target.find(str(folder))).drafter == "mtp"


def test_learning_starts_from_the_found_drafter(folder: Path, hub: Callable[[str], Path], tmp_path: Path) -> None:
    save_compact(make_model(replace(DFLASH, windows=(4, -1))), folder / "windows")
    given: dict[str, Any] = {"learn": True, "learn_folder": tmp_path / "learned"}
    settings, line = take(folder, **given)
    assert settings.drafter == "auto"
    assert line.startswith("Drafter untrained: ")
    model = target.find(str(folder))
    refused = drafter_search.candidates(Settings(model=str(folder), gamma=GAMMA, **given), model)
    assert "--learn does not train layers with sliding windows" in [one.obstacle for one in refused]
    save_eagle(folder / "head")
    settings = learning.with_start(take(folder, **given)[0], model)
    assert (settings.drafter, settings.drafter_path) == ("eagle3", str(folder / "head"))


def test_a_server_resolves_to_it_and_logs_it(folder: Path, hub: Callable[[str], Path]) -> None:
    save_compact(make_model(TINY), folder / "drafter")
    lines: list[str] = []
    resolved = resolve(Settings(model=str(folder), gamma=GAMMA, device="cpu", max_total_tokens=512), lines.append)
    assert (resolved.settings.drafter, resolved.settings.drafter_path) == ("dspark", str(folder / "drafter"))
    assert sum(line.startswith("Drafter dspark: ") for line in lines) == 1


def test_the_command_lists_them(folder: Path, hub: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    save_compact(make_model(TINY), folder / "drafter")
    save_eagle(hub(EAGLE), "speculators", vocab_size=100)
    assert main.main(["drafters", str(folder), "--gamma", "3", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in listed["drafters"]}
    own, head, absent = rows[str(folder / "drafter")], rows[EAGLE], rows[DSPARK]
    assert (listed["auto"], listed["hidden_size"]) == (str(folder / "drafter"), 32)
    assert own["fits"] is True
    assert own["draft_ms"] is own["known_from"] is None
    assert head["fits"] is False
    assert absent["fits"] is None
    assert absent["folder"] is None
    assert main.main(["drafters", str(folder), "--gamma", "3"]) == 0
    said = capsys.readouterr().out
    assert f"dspark    {folder / 'drafter'}, in the model's folder, fits\n" in said
    assert f"--drafter auto takes dspark, {folder / 'drafter'}\n" in said
    assert f"{DSPARK}, not here (https://github.com/deepseek-ai/DeepSpec)" in said


def test_the_command_lists_the_embedded_models_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["drafters", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["auto"] == "dspark" == checkpoints.with_drafter_path(Settings(), target.find(None)).drafter
    assert [row["name"] for row in listed["drafters"] if row["fits"]] == ["dspark", "dflash", "diffusion"]
