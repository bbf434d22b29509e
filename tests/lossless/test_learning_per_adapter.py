"""A drafter for each LoRA adapter: no text changes, and each drafts for its adapter alone."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapters import is_greedy, merged, write_adapter
from asking import MODEL, ask_as, drafts
from learned_drafters import offer, wait_for_state
from metrics_page import metric
from running import HTTP, Server, wait_until
from small_target import SmallTarget
from transformers import PreTrainedModel

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.drafters.learning.answers import Answer, AnswerReader, ServerState
from outrider.drafters.learning.owners import Owner
from outrider.server.cli.main import main

pytestmark = pytest.mark.server
BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.7}]
SURE = BODIES[:2]
"""Request bodies with a determined text."""
NAMES = (MODEL, "sql", "poems")
Asked = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def folders(small_target: SmallTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters that change every answer; the last one is loaded later."""
    root = tmp_path_factory.mktemp("adapters")
    names = ("sql", "poems", "later")
    return {n: write_adapter(root / n, small_target.model, seed, strength=1.0) for seed, n in enumerate(names)}


@pytest.fixture(scope="module")
def exact(small_target: SmallTarget, folders: dict[str, Path]) -> dict[str, PreTrainedModel]:
    return {MODEL: small_target.model} | {name: merged(small_target.folder, path) for name, path in folders.items()}


@pytest.fixture
def start(start_learning: Callable[..., Server], folders: dict[str, Path]) -> Callable[[], Server]:
    paths = ",".join(f"{name}={folders[name]}" for name in NAMES[1:])
    return lambda: start_learning("--learn-per", "adapter", "--enable-lora", "--lora-paths", paths)


def learner(root: Path, name: str, folder: Path) -> Path:
    return root / Owner(name, AdapterFolder.open(folder).digest()).learner


def texts(server: Server, asked: list[Asked], *, speculate: bool, at_once: int = 6) -> list[list[int]]:
    """Token ids for each (model, prompt, body) with a determined text."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda a: ask_as(server, "none", a[1], speculate=speculate, model=a[0], **a[2]), asked))
    decided = zip(asked, answers, strict=True)
    return [answer["choices"][0]["token_ids"] for (_, _, body), answer in decided if body in SURE]


def greedy_answers(folder: Path, count: int) -> list[Answer]:
    """The first `count` greedy answers in a learner's folder."""
    answers: list[Answer] = []

    def there() -> bool:
        answers[:] = [answer for answer in AnswerReader(folder).read() if answer.temperature == 0]
        return len(answers) >= count

    wait_until(there, 30)
    assert len(answers) == count
    return answers


def post(server: Server, path: str, **body: str) -> None:
    answer = HTTP.post(f"{server.url}/{path}_lora_adapter", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_drafter_drafts_for_its_adapter_alone(
    start: Callable[[], Server], small_target: SmallTarget, folders: dict[str, Path], prompts: list[str], tmp_path: Path
) -> None:
    """Whatever an adapter has learned, the model and another adapter keep their drafts."""
    root, some = tmp_path / "learned", prompts[:2]

    def ask(server: Server, name: str) -> list[dict[str, Any]]:
        return [ask_as(server, "none", prompt, model=name, **body) for prompt in some for body in SURE]

    server = start()
    alone = {name: ask(server, name) for name in NAMES}
    server.kill()
    assert main(["learn", "forget", "--learn-folder", str(root)]) == 0

    server = start()
    sql = learner(root, "sql", folders["sql"])
    ask(server, "sql")
    offer(sql, "0001", small_target, broken=True)
    wait_for_state(sql, in_use="0001")
    changed = {name: ask(server, name) for name in ("poems", MODEL, "sql")}  # sql last: its drafter is soon rolled back
    assert [drafts(answer) for answer in changed["sql"]] != [drafts(answer) for answer in alone["sql"]]
    for name in ("poems", MODEL):
        assert [drafts(answer) for answer in changed[name]] == [drafts(answer) for answer in alone[name]]
    ids = {name: [answer["choices"][0]["token_ids"] for answer in answers] for name, answers in alone.items()}
    assert ids == {name: [answer["choices"][0]["token_ids"] for answer in answers] for name, answers in changed.items()}


def test_texts_stay_through_exchange_roll_back_kill_and_reload(
    start: Callable[[], Server],
    small_target: SmallTarget,
    folders: dict[str, Path],
    exact: dict[str, PreTrainedModel],
    prompts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "learned"
    sql, poems = (learner(root, name, folders[name]) for name in NAMES[1:])
    asked = [(name, prompt, body) for prompt in prompts[:3] for body in BODIES for name in NAMES]
    server = start()
    plain = texts(server, asked, speculate=False)
    assert texts(server, asked, speculate=True) == plain
    wait_until(lambda: (sql / "adapter.json").is_file() and (poems / "adapter.json").is_file(), 30)
    for name, folder in ((MODEL, root), ("sql", sql), ("poems", poems)):
        for answer in greedy_answers(folder, 2 * 3):
            assert [n for n in NAMES if is_greedy(exact[n], answer.prompt_ids, answer.response_ids)] == [name]

    for _ in range(3):  # the acceptance of the drafter in use becomes known
        assert texts(server, asked, speculate=True) == plain
    for folder in (sql, root):
        offer(folder, "0001", small_target, broken=False)
    with ThreadPoolExecutor(1) as pool:
        while_exchanged = pool.submit(texts, server, asked * 2, speculate=True)
        offer(poems, "0001", small_target, broken=True)
        for folder in (sql, root):
            wait_for_state(folder, in_use="0001")
        assert while_exchanged.result() == plain * 2
    for _ in range(20):
        assert texts(server, asked, speculate=True) == plain
        if ServerState.read(poems).refused:
            break
    wait_for_state(poems, in_use=None, refused=["0001"])
    for folder in (sql, root):
        wait_for_state(folder, in_use="0001", refused=[])

    server.process.kill()
    server.process.wait()
    server = start()
    assert texts(server, asked, speculate=True) == plain
    in_use = lambda: metric(server.url, "outrider_learn_in_use")  # noqa: E731
    wait_until(lambda: in_use() == 2, 30)

    post(server, "unload", lora_name="sql")
    wait_until(lambda: in_use() == 1, 30)
    post(server, "load", lora_name="sql", lora_path=str(folders["sql"]))
    assert texts(server, asked, speculate=True) == plain
    wait_until(lambda: in_use() == 2, 30)
    wait_for_state(sql, in_use="0001", refused=[])

    post(server, "unload", lora_name="sql")  # a new adapter of this name must not inherit from it
    post(server, "load", lora_name="sql", lora_path=str(folders["later"]))
    other = [("sql", prompt, body) for _, prompt, body in asked[:: len(NAMES)]]
    drafted = texts(server, other, speculate=True)
    assert drafted == texts(server, other, speculate=False)
    later = learner(root, "sql", folders["later"])
    wait_until(lambda: (later / "adapter.json").is_file(), 30)
    wait_until(lambda: in_use() == 1, 30)
    assert ServerState.read(later) == ServerState()
    kept = greedy_answers(later, 2 * 3)
    assert all(is_greedy(exact["later"], answer.prompt_ids, answer.response_ids) for answer in kept)

    server.kill()
    show = ["learn", "status", "--learn-folder", str(root)]
    capsys.readouterr()
    assert main([*show, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    named = {"sql": "sql", "poems": "poems", "later": "sql"}
    labels = {key: f"{name}@{AdapterFolder.open(folders[key]).digest()[:8]}" for key, name in named.items()}
    assert report["in_use"] == "0001"
    assert {each["adapter"]: each["in_use"] for each in report["adapters"]} == {
        labels["sql"]: "0001", labels["poems"]: None, labels["later"]: None
    }  # fmt: skip
    assert main([*show, "--adapter", "sql"]) == 1
    choices = capsys.readouterr().err.strip().rpartition("choose of ")[2]
    assert set(choices.split(", ")) == {labels["sql"], labels["later"]}
    assert main([*show, "--adapter", labels["sql"]]) == 0
    assert "drafter in use: 0001" in capsys.readouterr().out
    out = tmp_path / "out"
    export = ["learn", "export", "--adapter", labels["sql"], "--out", str(out), "--learn-folder", str(root)]
    assert main(export) == 0
    assert (out / "config.json").is_file()
    assert main(["learn", "forget", "--adapter", labels["sql"], "--learn-folder", str(root)]) == 0
    assert not (sql / "answers").exists()
    assert (root / "answers").exists()
    assert main([*show, "--adapter", "nobody"]) == 1
