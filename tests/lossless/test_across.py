"""Lookup across requests: it changes no text, reveals no text of another key, and survives a restart."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import ask_as, drafts, tokens
from running import Server, run_forked, wait_until
from small_target import SmallTarget

from .conftest import ALL, EXACT, add_keys

pytestmark = pytest.mark.server
BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]


def across(answer: dict[str, Any]) -> int:
    return sum(entry["source"] == "across" for entry in drafts(answer)[0])


def test_texts_stay_and_keys_are_apart(
    start_hurried: Callable[..., Server], small_target: SmallTarget, prompts: list[str], tmp_path: Path
) -> None:
    store, keys = tmp_path / "texts", tmp_path / "keys.toml"
    secrets = add_keys(keys, "ann", "bob")
    flags = (*EXACT, *ALL, *small_target.flags(), "--lookup-across", "--lookup-store", str(store))
    start = partial(start_hurried, *flags, "--api-keys", str(keys))

    def all_of(server: Server, name: str, **more: Any) -> list[dict[str, Any]]:
        return [ask_as(server, secrets[name], prompt, **body, **more) for prompt in prompts[:4] for body in BODIES]

    def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
        return [tokens(answer) for answer in answers]

    server = start()
    alone = all_of(server, "bob")  # first, while the store is empty
    plain = ids(all_of(server, "ann", speculate=False, store=False))
    assert ids(alone) == plain
    server.kill()
    store.unlink(missing_ok=True)

    server = start()
    theirs = all_of(server, "ann")
    again = all_of(server, "ann")
    salted = all_of(server, "ann", cache_salt="a user of ann's")
    mine = all_of(server, "bob")
    for answers in (theirs, again, salted, mine):
        assert ids(answers) == plain
    assert sum(map(across, again)) > sum(map(across, theirs)) + 100
    assert [drafts(answer) for answer in mine] == [drafts(answer) for answer in alone]
    assert [drafts(answer) for answer in salted] == [drafts(answer) for answer in alone]
    secret = ask_as(server, secrets["bob"], "a b c d e f g h i j", temperature=0, store=False)
    assert server.stop() == 0
    assert store.stat().st_mode & 0o777 == 0o600

    before, server = store.read_bytes(), start()
    kept = all_of(server, "ann")
    assert ids(kept) == plain
    assert sum(map(across, kept)) >= 0.9 * sum(map(across, again))
    assert across(ask_as(server, secrets["bob"], prompts[0], temperature=0)) > 0
    unstored = ask_as(server, secrets["bob"], "a b c d e f g h i j", temperature=0)
    assert ids([unstored]) == ids([secret])
    assert across(unstored) == 0
    wait_until(lambda: store.read_bytes() != before, 30)
    server.kill()

    store.write_bytes(store.read_bytes()[:-2])
    refused = run_forked("serve", *flags, "--api-keys", str(keys))
    assert refused.returncode != 0
    assert f"--lookup-store {store}: it is damaged; remove it, or name another file" in refused.stderr
