"""A new drafter or planner takes one module and one registry entry."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.drafters import registry as drafters
from outrider.scheduler import registry as planners

DRAFTERS, PLANNERS = (*drafters.DRAFTERS, "sevens"), (*planners.PLANNERS, "halves")
FILES = {
    "sevens.py": """
import torch
from outrider.drafters.base import Draft, Drafter

class Sevens(Drafter):
    def __init__(self, gamma, device):
        self.gamma, self.device = gamma, device

    def propose(self, batch):
        shape = (len(batch.anchors), self.gamma)
        lens = torch.full(shape[:1], self.gamma)
        return Draft(torch.full(shape, 7, device=self.device), lens, torch.ones(shape), drafting=shape[0])
""",
    "halves.py": """
from outrider.scheduler.contract import Planner

class Halves(Planner):
    def __init__(self, gamma):
        self.most = gamma // 2

    def admit(self, confidence, draft_lens, budget):
        return draft_lens.clamp(max=self.most)
""",
    "entries.py": """
from outrider.drafters import registry as drafters
from outrider.scheduler import registry as planners

drafters.DRAFTERS["sevens"] = drafters.DrafterEntry("sevens:Sevens", ("gamma", "device"), "drafts of sevens")
planners.PLANNERS["halves"] = planners.PlannerEntry("halves:Halves", ("gamma",), "half of each draft")
""",
}
SETTINGS = """
from outrider.server.settings.settings import Settings
from outrider.server.errors import UserError

chosen = Settings(drafter="sevens", planner="halves", device="cpu").plugin_config
refused = []
for wrong in ({"drafter": "eagle"}, {"planner": "best"}):
    try:
        Settings(**wrong)
    except UserError as error:
        refused.append(str(error))
print(json.dumps([chosen.drafter, chosen.planner, *refused]))
"""
STEP = """
from types import SimpleNamespace
import torch
from outrider.drafters.base import DraftBatch
from outrider.server.plugin.config import PluginConfig
from outrider.server.plugin.loading.drafter import load_drafter
from outrider.server.plugin.loading.from_profile import load_plan

config = PluginConfig(drafter="sevens", planner="halves", gamma=4)
target = SimpleNamespace(hf_text_config=SimpleNamespace(vocab_size=96))
drafter = load_drafter(config, SimpleNamespace(model=None, model_config=target, dtype=torch.float32, device="cpu"))
planner, _ = load_plan(config)
nobody, some = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
draft = drafter.propose(
    DraftBatch(
        anchors=some, seq_lens=some, page_table=torch.zeros(2, 16, dtype=torch.int32), rows=some, temperatures=nobody,
        keys=some[:, None].expand(2, 4),
    )
)
print(json.dumps([draft.tokens.tolist(), draft.drafting, planner.admit(draft.confidence, draft.lens, None).tolist()]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The new modules, and entries that replace lines of the registries."""
    folder = tmp_path_factory.mktemp("new")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, code: str) -> str:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", f"import json, entries\n{code}"]
    environ = os.environ | {"PYTHONPATH": paths, "COLUMNS": "120"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "choices"),
    [
        (
            "serve",
            [
                f"{{auto,{','.join(DRAFTERS)},off}}",
                f"{{{','.join(PLANNERS)}}}",
                "sevens(draftsofsevens)",
                "halves(halfofeachdraft)",
            ],
        ),
        ("tune", [f"{{auto,{','.join(DRAFTERS)}}}"]),
        ("simulate", ["off,halves,verify-all,threshold"]),
    ],
)
def test_flags_know_it(command: str, choices: list[str], folder: Path) -> None:
    text = run(folder, f"from outrider.server.cli.main import main\nmain(['{command}', '--help'])")
    for choice in choices:
        assert choice in "".join(text.split()), text


def test_settings_take_it(folder: Path) -> None:
    assert json.loads(run(folder, SETTINGS)) == [
        "sevens",
        "halves",
        f"--drafter is one of auto, {', '.join(DRAFTERS)}, off, not 'eagle'",
        f"--planner is one of {', '.join(PLANNERS)}, not 'best'",
    ]


@pytest.mark.slow
def test_the_worker_drafts_and_plans_with_it(folder: Path) -> None:
    assert json.loads(run(folder, STEP)) == [[[7] * 4] * 2, 2, [2, 2]]
