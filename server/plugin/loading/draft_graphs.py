"""Loads the draft graphs that were calibrated for a block-diffusion model."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.profiles import store
from outrider.scheduler.draft_graphs.fingerprint import by_temperature
from outrider.scheduler.draft_graphs.graph import DraftGraph
from outrider.scheduler.draft_graphs.untuned import untuned_graph

from ..config import PluginConfig


def load_graphs(config: PluginConfig) -> dict[bool, DraftGraph]:
    """Draft graphs by whether a request is sampled; without a profile the graph that is the same for every model."""
    assert config.diffusion is not None
    if not (Path(config.profile) / store.PROFILE).is_file():
        untuned = untuned_graph(config.diffusion.block_size, config.step_tokens)
        return {False: untuned, True: untuned}
    profile = store.read(Path(config.profile))
    if profile.graphs is None:
        raise ValueError(f"profile {profile.name} has no draft graphs; measure anew: outrider tune")
    graphs = by_temperature(json.loads(profile.graphs.read_text()))
    return {False: graphs["greedy"], True: graphs["sampled"]}
