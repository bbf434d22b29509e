"""A block-diffusion model's profile and draft graphs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from profile_samples import profile
from refusals import refuses

from outrider.profiles import draft_graphs, store
from outrider.profiles.draft_graphs import TEMPERATURES
from outrider.profiles.store import Profile
from outrider.scheduler.spiffy.calibration import untuned_graph
from outrider.scheduler.spiffy.graph import DraftGraph
from outrider.server.model.target import Model
from outrider.server.plugin.loading.from_profile import load_graphs, load_round_cost
from outrider.server.settings import profile_lookup
from outrider.server.settings.model_kinds import with_diffusion
from outrider.server.settings.settings import Settings

CONFIG = {"architectures": ["SDARForCausalLM"], "vocab_size": 151936, "block_size": 8}
STATIC: dict[str, Any] = {"unmasking": "static"}
GRAPHS = {"greedy": untuned_graph(8, 1, 4), "sampled": untuned_graph(8, 1, 6)}


def found(model: Model, **given: Any) -> Settings:
    return with_diffusion(Settings(device="cpu", dtype="bfloat16", activations="float", **given), model)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(profile_lookup, "roots", lambda: [tmp_path / "profiles"])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(100))
    return Model(str(folder), "it", CONFIG, folder)


def save(
    model: Model, settings: Settings, change: Callable[[list[dict[str, Any]]], Any] = lambda graphs: None
) -> Profile:
    graphs = [
        draft_graphs.to_json(GRAPHS[name], profile_lookup.graph_fingerprint(settings, model, name))
        for name in TEMPERATURES
    ]
    change(graphs)
    made = profile("mine", profile_lookup.fingerprint(settings, model))
    return store.save(made, profile_lookup.roots()[0], None, graphs)


def same(one: DraftGraph, other: DraftGraph) -> bool:
    return (one.nodes, one.parents) == (other.nodes, other.parents)


def test_the_profile_that_fits_is_found_and_loaded(model: Model) -> None:
    settings = found(model, **STATIC)
    untuned, unmeasured = profile_lookup.with_profile(settings, model)
    assert unmeasured
    graphs = load_graphs(untuned.plugin_config)
    assert all(same(graph, untuned_graph(8, 1)) for graph in graphs.values())
    assert load_round_cost(untuned.plugin_config).measured is None
    saved = save(model, settings)
    tuned, unmeasured = profile_lookup.with_profile(settings, model)
    assert not unmeasured
    assert tuned.profile == str(saved.folder)
    graphs = load_graphs(tuned.plugin_config)
    assert same(graphs[False], GRAPHS["greedy"])
    assert same(graphs[True], GRAPHS["sampled"])
    cost = load_round_cost(tuned.plugin_config).measured
    assert cost is not None
    assert cost.points == saved.points


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"unmasking": "threshold"}, "drafter: 'spiffy static 1 block 8', here 'spiffy threshold 0.95 block 8'"),
        (STATIC | {"unmasking_tokens": 2}, "drafter: 'spiffy static 1 block 8', here 'spiffy static 2 block 8'"),
        (STATIC | {"block_size": 4}, "drafter: 'spiffy static 1 block 8', here 'spiffy static 1 block 4'"),
    ],
)
def test_another_policy_or_block_has_another_profile(model: Model, given: dict[str, Any], says: str) -> None:
    save(model, found(model, **STATIC))
    assert profile_lookup.with_profile(found(model, **given), model)[1]
    told = refuses(says, profile_lookup.with_profile, found(model, profile="mine", **given), model)
    assert "Measure this one: outrider tune" in told


def test_other_weights_have_another_profile(model: Model) -> None:
    save(model, found(model, **STATIC))
    assert model.folder is not None
    (model.folder / "model.safetensors").write_bytes(bytes(99) + b"x")
    assert profile_lookup.with_profile(found(model, **STATIC), model)[1]
    named = found(model, profile="mine", **STATIC)
    refuses(r"target: '[0-9a-f]{16}', here '[0-9a-f]{16}'", profile_lookup.with_profile, named, model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda graphs: graphs[0]["fingerprint"].update(model="abc"), "model 'abc', here"),
        (lambda graphs: graphs[1]["fingerprint"].update(policy="static 2"), "policy 'static 2', here 'static 1'"),
        (lambda graphs: graphs[0]["fingerprint"].update(temperature="hot"), "one of each of"),
        (lambda graphs: graphs.pop(), "one of each of"),
        (lambda graphs: graphs[0].pop("nodes"), "damaged"),
        (lambda graphs: graphs[0].pop("fingerprint"), "damaged"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_graphs_that_were_calibrated_for_something_else_are_refused(
    model: Model, change: Callable[[list[dict[str, Any]]], Any], says: str, named: bool
) -> None:
    save(model, found(model, **STATIC), change)
    settings = found(model, profile="mine" if named else None, **STATIC)
    assert "outrider tune" in refuses(says, profile_lookup.with_profile, settings, model)


def test_a_profile_without_graphs_is_refused(model: Model) -> None:
    saved = save(model, found(model, **STATIC))
    assert saved.graphs is not None
    saved.graphs.unlink()
    said = r"lacks draft-graphs\.json; measure anew: outrider tune"
    refuses(said, profile_lookup.with_profile, found(model, **STATIC), model)
