"""Answers of the tiny target, and a learner's command line."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_drafters import save_target

from outrider.drafters.learning import start
from outrider.drafters.learning.answers import Answer
from outrider.drafters.training.decode import decode
from outrider.drafters.training.logs import held_out
from outrider.drafters.training.store import digest
from outrider.drafters.training.target import TargetModel


@pytest.fixture(scope="session")
def learned_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("learned-target"))


@pytest.fixture(scope="session")
def answers(learned_target: Path) -> list[Answer]:
    """30 greedy answers to training prompts, and 16 to held-out ones: enough for several gate attempts."""
    target = TargetModel.load(str(learned_target), dtype=torch.float32)
    prompts: dict[bool, list[list[int]]] = {False: [], True: []}
    for i in range(2000):
        ids = target.chat_ids([f"w{i % 7} w{i % 11} w{i % 89}"])
        side = prompts[held_out(digest(ids))]
        if len(side) < (16 if side is prompts[True] else 30) and ids not in side:
            side.append(ids)
    asked = prompts[False] + prompts[True]
    texts = decode(
        target, asked, [0.0] * len(asked), max_new_tokens=40, stop_ids=target.stop_ids, seeds=[0] * len(asked)
    )
    made = [Answer(asked[text.number], text.ids, 0.0) for text in texts if len(text.ids) > 1]
    assert len(made) == 46
    return made


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "dspark")


@pytest.fixture(scope="session")
def starts(learned_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("start") / "drafter"
        start.write_start(folder, str(learned_target), kind)
        return folder

    return made


@pytest.fixture
def start_folder(starts: Callable[[str], Path], kind: str) -> Path:
    return starts(kind)


@pytest.fixture
def general(tmp_path: Path) -> Path:
    path = tmp_path / "general.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{3 * i} w{i} w{60 - i} w1"}) + "\n" for i in range(9)))
    return path


@pytest.fixture
def command(tmp_path: Path, learned_target: Path, kind: str, start_folder: Path, general: Path) -> list[str]:
    fixed = ["--folder", str(tmp_path / "learner"), "--target", str(learned_target), "--kind", kind]
    fixed += ["--start", str(start_folder), "--general", str(general)]
    return [*fixed, "--dtype", "float32", "--lookup-gamma", "15"]
