"""A drafter for each API key: no text changes, and keys share neither drafts nor prefixes."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asking import ask_as, drafts
from learned_drafters import offer, wait_for_state
from metrics_page import MetricsPage
from running import Server, free_port, wait_until
from small_target import SmallTarget

from outrider.drafters.learning.answers import ServerState
from outrider.drafters.learning.owners import Owner
from outrider.server.cli.main import main
from outrider.server.http.keys import key_file

pytestmark = pytest.mark.server
BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.7}]
SURE = BODIES[:2]
"""Request bodies with a determined text."""
NAMES = ("ann", "bob", "closed")
"""Keys; the last one allows no learning."""
Asked = tuple[str, str, dict[str, Any]]


def learner_of(key: str) -> str:
    return Path(Owner(key).learner).name


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    made = {name: key_file.new() for name in NAMES}
    for name, secret in made.items():
        digest = key_file.digest(secret.encode())
        key_file.add(tmp_path / "keys.toml", key_file.Key(name=name, digest=digest, learn=name != "closed"))
    return made


@pytest.fixture
def start(
    start_learning: Callable[..., Server], tmp_path: Path, secrets: dict[str, str]
) -> Callable[[], tuple[Server, str]]:
    """Starts a server; returns it and the address of its metrics."""

    def started() -> tuple[Server, str]:
        port = free_port()
        flags = ("--learn-per", "key", "--learn-keys", "2", "--api-keys", str(tmp_path / "keys.toml"))
        return start_learning(*flags, "--metrics-port", str(port)), f"http://127.0.0.1:{port}"

    return started


def texts(
    server: Server, secrets: dict[str, str], asked: list[Asked], *, speculate: bool, at_once: int = 6
) -> list[list[int]]:
    """Token ids for each (key, prompt, body) with a determined text."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda a: ask_as(server, secrets[a[0]], a[1], speculate=speculate, **a[2]), asked))
    decided = zip(asked, answers, strict=True)
    return [answer["choices"][0]["token_ids"] for (_, _, body), answer in decided if body in SURE]


def test_no_key_sees_another_keys_requests(
    start: Callable[[], tuple[Server, str]],
    secrets: dict[str, str],
    small_target: SmallTarget,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    """Drafts, confidences and cache hits do not depend on another key."""
    some = prompts[:3]
    server, _ = start()
    alone = [ask_as(server, secrets["bob"], prompt, **body) for prompt in some for body in SURE]
    server.kill()
    folder = tmp_path / "learned" / "keys"
    assert main(["learn", "forget", "--key", "bob", "--learn-folder", str(tmp_path / "learned")]) == 0
    assert not (folder / learner_of("bob") / "answers").exists()

    server, metrics = start()
    theirs = [ask_as(server, secrets["ann"], prompt, **body) for prompt in some for body in SURE]
    offer(folder / learner_of("ann"), "0001", small_target, broken=True)
    wait_for_state(folder / learner_of("ann"), in_use="0001")
    changed = [ask_as(server, secrets["ann"], prompt, **body) for prompt in some for body in SURE]
    mine = [ask_as(server, secrets["bob"], prompt, **body) for prompt in some for body in SURE]
    assert [drafts(answer) for answer in mine] == [drafts(answer) for answer in alone]
    assert [drafts(answer) for answer in changed] != [drafts(answer) for answer in alone]  # learning has an effect
    for answers in (theirs, changed, mine):
        ids = [answer["choices"][0]["token_ids"] for answer in answers]
        assert ids == [answer["choices"][0]["token_ids"] for answer in alone]
    page = MetricsPage(metrics)
    cached = {name: page.value("outrider_key_tokens_total", key=name, kind="cached") for name in NAMES}
    again = [ask_as(server, secrets["bob"], prompt, **SURE[0]) for prompt in some]
    more = MetricsPage(metrics).value("outrider_key_tokens_total", key="bob", kind="cached")
    assert again
    assert cached["ann"] > 0
    assert more > cached["bob"]
    first = [answer["usage"]["prompt_tokens"] for answer in mine]
    assert cached["bob"] < sum(first[::2])  # only the second of each pair found the first one's prefix


def test_texts_stay_through_exchange_roll_back_kill_and_removal(
    start: Callable[[], tuple[Server, str]],
    secrets: dict[str, str],
    small_target: SmallTarget,
    prompts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "learned"
    ann, bob = (root / "keys" / learner_of(name) for name in ("ann", "bob"))
    asked = [(name, prompt, body) for prompt in prompts[:3] for body in BODIES for name in NAMES]
    server, metrics = start()
    plain = texts(server, secrets, asked, speculate=False)
    assert texts(server, secrets, asked, speculate=True) == plain
    wait_until(lambda: (ann / "key.json").is_file() and (bob / "key.json").is_file(), 30)
    assert not (root / "keys" / learner_of("closed")).exists()
    assert json.loads((ann / "key.json").read_text()) == {"name": "ann"}

    for _ in range(3):  # the acceptance of the drafter in use becomes known
        assert texts(server, secrets, asked, speculate=True) == plain
    offer(bob, "0001", small_target, broken=False)
    with ThreadPoolExecutor(1) as pool:
        while_exchanged = pool.submit(texts, server, secrets, asked * 2, speculate=True)
        offer(ann, "0001", small_target, broken=True)
        wait_for_state(bob, in_use="0001")
        assert while_exchanged.result() == plain * 2
    for _ in range(20):
        assert texts(server, secrets, asked, speculate=True) == plain
        if ServerState.read(ann).refused:
            break
    wait_for_state(ann, in_use=None, refused=["0001"])
    wait_for_state(bob, in_use="0001", refused=[])
    page = MetricsPage(metrics)
    assert page.value("outrider_learn_rollbacks_total") == 1
    assert page.value("outrider_learn_promotions_total") == 2
    assert not [s for f in page.families.values() if f.name.startswith("outrider_learn") for s in f.samples if s.labels]

    server.process.kill()
    server.process.wait()
    server, metrics = start()
    assert texts(server, secrets, asked, speculate=True) == plain
    wait_until(lambda: MetricsPage(metrics).value("outrider_learn_in_use") == 1, 30)
    capsys.readouterr()
    assert main(["learn", "status", "--learn-folder", str(root)]) == 0
    assert "key bob" in capsys.readouterr().out
    assert main(["learn", "status", "--key", "bob", "--json", "--learn-folder", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["in_use"] == "0001"
    assert main(["learn", "export", "--key", "bob", "--out", str(tmp_path / "out"), "--learn-folder", str(root)]) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert main(["learn", "status", "--key", "nobody", "--learn-folder", str(root)]) == 1

    key_file.remove(tmp_path / "keys.toml", "bob")
    wait_until(lambda: not bob.exists(), 30)
    wait_until(lambda: MetricsPage(metrics).value("outrider_learn_in_use") == 0, 30)
    left = [each for each in asked if each[0] != "bob"]
    assert texts(server, secrets, left, speculate=True) == texts(server, secrets, left, speculate=False)
    assert ann.is_dir()
