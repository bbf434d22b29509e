import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_drafters import CONFIGS, save_target

from outrider.drafters.block.config import BlockConfig
from outrider.drafters.chain import network
from outrider.drafters.chain.drafter import ChainDrafter
from outrider.drafters.diffusion import drafter
from outrider.drafters.diffusion.drafter import DiffusionDrafter
from outrider.kernels.attention import Scores, bounded_attention, torch_attention
from outrider.kernels.flat_batch import FlatBatch


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{i} w{i + 1}"]}) + "\n" for i in range(20)))
    return path


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flat: FlatBatch, **how: Any) -> torch.Tensor:
    return (torch_attention if flat.longest is None else bounded_attention)(q, k, v, flat, Scores(**how))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters work as on a GPU, where the host does not know which texts are encoded."""
    for kind in (DiffusionDrafter, ChainDrafter):
        monkeypatch.setattr(kind, "__init__", _made_elsewhere(kind.__init__))
    for module in (drafter, network):
        monkeypatch.setattr(module, "flat_attention", _attend)


def _made_elsewhere(made: Callable[..., None]) -> Callable[..., None]:
    def make_one(self: Any, *args: Any, **how: Any) -> None:
        made(self, *args, **how)
        self.on_host, self.compiled, self.shortens = False, None, False

    return make_one


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "device":
        request.getfixturevalue("device")
    return request.param
