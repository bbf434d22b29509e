"""Offers drafters to a server as a learner does."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_target import SmallTarget

from outrider.drafters import networks
from outrider.drafters.commands.train import read_drafter
from outrider.drafters.eagle.model import EagleModel
from outrider.drafters.training.target import TargetModel


def offer(folder: Path, name: str, small_target: SmallTarget, *, broken: bool, drafter: str = "dspark") -> None:
    """Put a candidate where the learner does: the drafter itself, or a random one."""
    model = read_drafter(small_target.drafters[drafter], drafter, TargetModel.load(str(small_target.folder)))
    if broken:
        torch.manual_seed(1)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
    made = folder / "made"
    networks.save(model, model.own["lm_head.weight"] if isinstance(model, EagleModel) else torch.empty(0), made)
    (made / "gate.json").write_text(json.dumps({"candidate_tau": 2.0, "in_use_tau": 1.0}))
    gamma = model.config.gamma
    np.savez(
        made / "held-out.npz", confidence=np.full((200, gamma), 0.5, np.float32), accepted=np.zeros(200, np.int64),
        reach=np.full(200, gamma), answer=np.arange(200) // 10,
    )  # fmt: skip
    (folder / "drafters").mkdir(exist_ok=True)
    made.rename(folder / "drafters" / name)


def wait_for_state(folder: Path, **wanted: Any) -> None:
    _wait(folder, lambda found: wanted.items() <= found.items(), wanted)


def wait_until_tried(folder: Path, name: str) -> None:
    """Wait until a drafter has been in use, as a bad one is soon rolled back."""
    _wait(folder, lambda found: found["in_use"] == name or name in found["refused"], name)


def _wait(folder: Path, there: Callable[[dict[str, Any]], bool], wanted: Any) -> None:
    state: dict[str, Any] = {}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (folder / "state.json").is_file():
            state = json.loads((folder / "state.json").read_text())
            if there(state):
                return
        time.sleep(0.1)
    pytest.fail(f"state.json is {state}, not {wanted}")
