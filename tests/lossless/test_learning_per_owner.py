"""A drafter for each API key or LoRA adapter: no text changes, each drafts for its owner alone, and keys do not share
prefixes."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from adapters import is_greedy
from asking import MODEL, ask_as, drafts, tokens
from learned_drafters import offer, wait_for_state
from metrics_page import MetricsPage, metric
from running import HTTP, Server, free_port, wait_until
from small_target import SmallTarget
from transformers import PreTrainedModel

from outrider.drafters.adapter_folder import AdapterFolder
from outrider.drafters.learning.answers import Answer, AnswerReader, ServerState
from outrider.drafters.learning.owners import Owner
from outrider.server.cli.main import main
from outrider.server.http.keys import key_file

from .conftest import add_keys

pytestmark = pytest.mark.server
BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.7}]
SURE = BODIES[:2]
"""Request bodies with a determined text."""
KEYS = ("ann", "bob", "closed")
"""The last one allows no learning."""
NAMES = (MODEL, "sql", "poems")
Asked = tuple[str, str, dict[str, Any]]
"""Name of a key or model, prompt and body."""
Ask = Callable[..., dict[str, Any]]
"""Its arguments are a server, the name of a key or model, and a prompt; named ones as of `ask_as`."""


def by_name(ask: Ask, server: Server, names: tuple[str, ...], prompts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Answers with a determined text, for one name after another."""
    return {name: [ask(server, name, prompt, **body) for prompt in prompts for body in SURE] for name in names}


def texts(ask: Ask, server: Server, asked: list[Asked], *, speculate: bool) -> list[list[int]]:
    """Token ids of the answers with a determined text."""
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda a: ask(server, a[0], a[1], speculate=speculate, **a[2]), asked))
    return [tokens(answer) for (_, _, body), answer in zip(asked, answers, strict=True) if body in SURE]


def exchange(
    say: Callable[[int], list[list[int]]], plain: list[list[int]], small_target: SmallTarget, good: list[Path],
    bad: Path,
) -> None:  # fmt: skip
    """Promote drafters of learners while requests run, and one that is then taken back; no text changes.

    say: asks for all texts so many times.
    """
    for _ in range(3):  # the acceptance of the drafter in use becomes known
        assert say(1) == plain
    for folder in good:
        offer(folder, "0001", small_target, broken=False)
    with ThreadPoolExecutor(1) as pool:
        while_exchanged = pool.submit(say, 2)
        offer(bad, "0001", small_target, broken=True)
        for folder in good:
            wait_for_state(folder, in_use="0001")
        assert while_exchanged.result() == plain * 2
    for _ in range(20):
        assert say(1) == plain
        if ServerState.read(bad).refused:
            break
    wait_for_state(bad, in_use=None, refused=["0001"])
    for folder in good:
        wait_for_state(folder, in_use="0001", refused=[])


def learn(command: str, folder: Path, *flags: str) -> int:
    return main(["learn", command, *flags, "--learn-folder", str(folder)])


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ask_key(tmp_path: Path) -> Ask:
    secrets = add_keys(tmp_path / "keys.toml", *KEYS[:2]) | add_keys(tmp_path / "keys.toml", KEYS[2], learn=False)
    return lambda server, name, prompt, **body: ask_as(server, secrets[name], prompt, **body)


@pytest.fixture
def start_for_keys(
    start_learning: Callable[..., Server], tmp_path: Path, ask_key: Ask
) -> Callable[[], tuple[Server, str]]:
    """Starts a server; returns it and the address of its metrics."""

    def started() -> tuple[Server, str]:
        port = free_port()
        flags = ("--learn-per", "key", "--learn-keys", "2", "--api-keys", str(tmp_path / "keys.toml"))
        return start_learning(*flags, "--metrics-port", str(port)), f"http://127.0.0.1:{port}"

    return started


def of_key(root: Path, key: str) -> Path:
    return root / Owner(key).learner


def test_no_key_sees_another_keys_requests(
    start_for_keys: Callable[[], tuple[Server, str]], ask_key: Ask, small_target: SmallTarget, prompts: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Drafts, confidences and cache hits do not depend on another key."""
    root, some = tmp_path / "learned", prompts[:3]
    server, _ = start_for_keys()
    (alone,) = by_name(ask_key, server, ("bob",), some).values()
    server.kill()
    assert learn("forget", root, "--key", "bob") == 0
    assert not (of_key(root, "bob") / "answers").exists()

    server, metrics = start_for_keys()
    theirs = by_name(ask_key, server, ("ann",), some)["ann"]
    offer(of_key(root, "ann"), "0001", small_target, broken=True)
    wait_for_state(of_key(root, "ann"), in_use="0001")
    changed, mine = by_name(ask_key, server, ("ann", "bob"), some).values()
    assert [drafts(answer) for answer in mine] == [drafts(answer) for answer in alone]
    assert [drafts(answer) for answer in changed] != [drafts(answer) for answer in alone]  # learning has an effect
    for answers in (theirs, changed, mine):
        assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in alone]

    def cached(name: str) -> float:
        return metric(metrics, "outrider_key_tokens_total", key=name, kind="cached")

    of_bob = cached("bob")
    assert cached("ann") > 0
    assert of_bob < sum(answer["usage"]["prompt_tokens"] for answer in mine[::2])  # only second ones found a prefix
    ask_key(server, "bob", some[0], **SURE[0])
    assert cached("bob") > of_bob


def test_texts_stay_through_exchange_roll_back_kill_and_removal(
    start_for_keys: Callable[[], tuple[Server, str]], ask_key: Ask, small_target: SmallTarget, prompts: list[str],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root = tmp_path / "learned"
    ann, bob, closed = (of_key(root, name) for name in KEYS)
    asked = [(name, prompt, body) for prompt in prompts[:3] for body in BODIES for name in KEYS]
    server, metrics = start_for_keys()
    plain = texts(ask_key, server, asked, speculate=False)
    assert texts(ask_key, server, asked, speculate=True) == plain
    wait_until(lambda: (ann / "key.json").is_file() and (bob / "key.json").is_file(), 30)
    assert not closed.exists()
    assert json.loads((ann / "key.json").read_text()) == {"name": "ann"}
    exchange(
        lambda times: texts(ask_key, server, asked * times, speculate=True), plain, small_target, good=[bob], bad=ann
    )
    page = MetricsPage(metrics)
    assert page.value("outrider_learn_rollbacks_total") == 1
    assert page.value("outrider_learn_promotions_total") == 2
    assert not [s for f in page.families.values() if f.name.startswith("outrider_learn") for s in f.samples if s.labels]

    server.process.kill()
    server.process.wait()
    server, metrics = start_for_keys()
    assert texts(ask_key, server, asked, speculate=True) == plain
    wait_until(lambda: metric(metrics, "outrider_learn_in_use") == 1, 30)
    capsys.readouterr()
    assert learn("status", root) == 0
    assert "key bob" in capsys.readouterr().out
    assert learn("status", root, "--key", "bob", "--json") == 0
    assert json.loads(capsys.readouterr().out)["in_use"] == "0001"
    assert learn("export", root, "--key", "bob", "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert learn("status", root, "--key", "nobody") == 1

    key_file.remove(tmp_path / "keys.toml", "bob")
    wait_until(lambda: not bob.exists(), 30)
    wait_until(lambda: metric(metrics, "outrider_learn_in_use") == 0, 30)
    left = [each for each in asked if each[0] != "bob"]
    assert texts(ask_key, server, left, speculate=True) == texts(ask_key, server, left, speculate=False)
    assert ann.is_dir()


# -- adapters ---------------------------------------------------------------------------------------------------------


def ask_model(server: Server, name: str, prompt: str, **body: Any) -> dict[str, Any]:
    return ask_as(server, "none", prompt, model=name, **body)


@pytest.fixture
def start_with_adapters(
    start_learning: Callable[..., Server], adapter_folders: dict[str, Path]
) -> Callable[[], Server]:
    paths = ",".join(f"{name}={adapter_folders[name]}" for name in NAMES[1:])
    return lambda: start_learning("--learn-per", "adapter", "--enable-lora", "--lora-paths", paths)


def of_adapter(root: Path, name: str, folder: Path) -> Path:
    return root / Owner(name, AdapterFolder.open(folder).digest()).learner


def greedy_answers(folder: Path, count: int) -> list[Answer]:
    """The greedy answers in a learner's folder; waits until there are `count`."""
    answers: list[Answer] = []

    def there() -> bool:
        answers[:] = [answer for answer in AnswerReader(folder).read() if answer.temperature == 0]
        return len(answers) >= count

    wait_until(there, 30)
    assert len(answers) == count
    return answers


def load(server: Server, path: str, **body: str) -> None:
    answer = HTTP.post(f"{server.url}/{path}_lora_adapter", json=body | {"lora_name": "sql"}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_a_drafter_drafts_for_its_adapter_alone(
    start_with_adapters: Callable[[], Server], small_target: SmallTarget, adapter_folders: dict[str, Path],
    prompts: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    """Whatever an adapter has learned, the model and another adapter keep their drafts."""
    root, some = tmp_path / "learned", prompts[:2]
    server = start_with_adapters()
    alone = by_name(ask_model, server, NAMES, some)
    server.kill()
    assert learn("forget", root) == 0

    server = start_with_adapters()
    sql = of_adapter(root, "sql", adapter_folders["sql"])
    by_name(ask_model, server, ("sql",), some)
    offer(sql, "0001", small_target, broken=True)
    wait_for_state(sql, in_use="0001")
    changed = by_name(ask_model, server, ("poems", MODEL, "sql"), some)  # sql last: its drafter is soon rolled back
    for name in NAMES:
        same = [drafts(answer) for answer in changed[name]] == [drafts(answer) for answer in alone[name]]
        assert same == (name != "sql")
        assert [tokens(answer) for answer in changed[name]] == [tokens(answer) for answer in alone[name]]


def test_texts_stay_through_exchange_roll_back_kill_and_reload(
    start_with_adapters: Callable[[], Server], small_target: SmallTarget, adapter_folders: dict[str, Path],
    adapted: dict[str, PreTrainedModel], prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root = tmp_path / "learned"
    sql, poems = (of_adapter(root, name, adapter_folders[name]) for name in NAMES[1:])
    asked = [(name, prompt, body) for prompt in prompts[:3] for body in BODIES for name in NAMES]
    server = start_with_adapters()
    plain = texts(ask_model, server, asked, speculate=False)
    assert texts(ask_model, server, asked, speculate=True) == plain
    wait_until(lambda: (sql / "adapter.json").is_file() and (poems / "adapter.json").is_file(), 30)
    for name, folder in ((MODEL, root), ("sql", sql), ("poems", poems)):
        for answer in greedy_answers(folder, 2 * 3):
            assert [n for n in NAMES if is_greedy(adapted[n], answer.prompt_ids, answer.response_ids)] == [name]
    exchange(
        lambda times: texts(ask_model, server, asked * times, speculate=True), plain, small_target,
        good=[sql, root], bad=poems,
    )  # fmt: skip

    server.process.kill()
    server.process.wait()
    server = start_with_adapters()
    assert texts(ask_model, server, asked, speculate=True) == plain
    in_use = lambda: metric(server.url, "outrider_learn_in_use")  # noqa: E731
    wait_until(lambda: in_use() == 2, 30)

    load(server, "unload")
    wait_until(lambda: in_use() == 1, 30)
    load(server, "load", lora_path=str(adapter_folders["sql"]))
    assert texts(ask_model, server, asked, speculate=True) == plain
    wait_until(lambda: in_use() == 2, 30)
    wait_for_state(sql, in_use="0001", refused=[])

    load(server, "unload")  # a new adapter of this name must not inherit from it
    load(server, "load", lora_path=str(adapter_folders["later"]))
    other = [("sql", prompt, body) for _, prompt, body in asked[:: len(NAMES)]]
    drafted = texts(ask_model, server, other, speculate=True)
    assert drafted == texts(ask_model, server, other, speculate=False)
    later = of_adapter(root, "sql", adapter_folders["later"])
    wait_until(lambda: (later / "adapter.json").is_file(), 30)
    wait_until(lambda: in_use() == 1, 30)
    assert ServerState.read(later) == ServerState()
    kept = greedy_answers(later, 2 * 3)
    assert all(is_greedy(adapted["later"], answer.prompt_ids, answer.response_ids) for answer in kept)

    server.kill()
    capsys.readouterr()
    assert learn("status", root, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    named = {"sql": "sql", "poems": "poems", "later": "sql"}
    labels = {key: f"{name}@{AdapterFolder.open(adapter_folders[key]).digest()[:8]}" for key, name in named.items()}
    assert report["in_use"] == "0001"
    assert {each["adapter"]: each["in_use"] for each in report["adapters"]} == {
        labels["sql"]: "0001", labels["poems"]: None, labels["later"]: None
    }  # fmt: skip
    assert learn("status", root, "--adapter", "sql") == 1
    choices = capsys.readouterr().err.strip().rpartition("choose of ")[2]
    assert set(choices.split(", ")) == {labels["sql"], labels["later"]}
    assert learn("status", root, "--adapter", labels["sql"]) == 0
    assert "drafter in use: 0001" in capsys.readouterr().out
    assert learn("export", root, "--adapter", labels["sql"], "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert learn("forget", root, "--adapter", labels["sql"]) == 0
    assert not (sql / "answers").exists()
    assert (root / "answers").exists()
    assert learn("status", root, "--adapter", "nobody") == 1
