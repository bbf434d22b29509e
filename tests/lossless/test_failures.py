"""Makes every optional call of a step fail, one after another, in servers under load: no text changes.

The calls are listed from the source: a new one must be added here.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import MODEL, ask_as, complete, tokens
from diffusion_servers import ALL, GREEDY, OFF, SEEDED, serve
from failing_parts import PLUGIN, Failures, direct_calls, optional_calls
from learned_drafters import offer, wait_until_tried
from running import HTTP, ForkedServer, Server, free_port
from small_target import SmallTarget
from tiny_diffusion import TinyDiffusion

from outrider.server.http.keys import key_file

from .conftest import SHARING, add_keys, jagged_profile

BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
KEYS = {
    "adapters:admitted", "adapters:drafted", "adapters:flush", "drafting:_draft", "drafting:observe",
    "drafting:prefilled", "learning:begins", "learning:drafted", "learning:finished", "lookups:admitted",
    "lookups:finished", "lookups:save", "metrics:drafted", "metrics:flush", "metrics:observe_time",
    "own_drafters:admitted", "own_drafters:drafted", "own_drafters:finished", "planning:_curve", "planning:admit",
    "planning:begin", "planning:finish", "planning:flush", "planning:interrupt", "prompts:_decide",
    "prompts:launched", "prompts:observe", "questions:_live", "tracing:_tell", "tracing:admitted", "tracing:sent",
}  # fmt: skip
"""Calls of a server with adapters, a drafter for each key, and lookup across requests."""
KEY_GONE = {"own_drafters:drop_owner"}
SHARED = {"calibration:observe", "learning:take", "planning:plan_again", "questions:lambda", "questions:outrider_state"}
"""The same with one drafter that learns and assesses itself."""
DIFFUSION = {
    "drafting:choose", "drafting:learn", "drafting:remember", "metrics:_count", "metrics:_record", "metrics:flush",
    "planning:_time",
}  # fmt: skip
GRAMMARS = {"grammars:_follow", "grammars:_forced"}
PAIR = {"drafting:_keep_state", "drafting:_restore_state"}
"""Tested in test_disaggregation.py."""
DEVICE = {"tracing:_copied"}
"""Tested in tests/server/plugin/test_trace.py."""
INSIDE = {"_set_up", "_set_up_stages", "_draft", "primary_draft_kv_pool", "init_cuda_graphs", "outrider_state"}
INSIDE |= {"outrider_live", "forget_records"}
"""Functions of workers and stages that run at the start, or through the boundary."""


def test_every_optional_call_has_a_place() -> None:
    assert optional_calls() == KEYS | KEY_GONE | SHARED | DIFFUSION | GRAMMARS | PAIR | DEVICE


def test_optional_parts_are_called_through_the_boundary_alone() -> None:
    decode = PLUGIN / "decode"
    assert direct_calls(decode / "worker.py", INSIDE) == {"_decode: self.planning.least_bucket"}
    for name in ("base", "leader", "follower", "draft", "verify", "accept", "commit"):
        assert not direct_calls(decode / f"{name}.py", INSIDE)
    assert not direct_calls(decode / "optional" / "part.py", {"tables", "save"})
    assert direct_calls(PLUGIN / "diffusion" / "spiffy.py", {"_time"}) == {"generate: self.drafting.nothing"}


def ask_all(
    server: Server, secrets: list[str], models: tuple[str, ...], prompts: list[str], *, speculate: bool
) -> list[list[int]]:
    """Token ids for each key, model and prompt, greedily and with a seed, eight at once."""
    cases = list(itertools.product(secrets, models, prompts, BODIES))

    def ask(case: tuple[str, str, str, dict[str, Any]]) -> list[int]:
        secret, model, prompt, body = case
        return tokens(ask_as(server, secret, prompt, speculate=speculate, model=model, **body))

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, cases))


@pytest.mark.server
def test_with_drafters_for_keys_and_adapters(
    tmp_path: Path, small_target: SmallTarget, adapter_folders: dict[str, Path], prompts: list[str]
) -> None:
    failures = Failures(tmp_path / "failures", metrics=free_port())
    gone = [f"gone-{number}" for number in range(6)]
    secrets = add_keys(tmp_path / "keys.toml", "ann", "bob", *gone)
    stay = [secrets["ann"], secrets["bob"]]
    made = {"model": str(small_target.folder), "drafter": "dspark", "drafter_path": str(small_target.dspark)}
    profile = jagged_profile(tmp_path, **made)
    with ForkedServer(
        tmp_path / "log", *SHARING, *small_target.flags(), "--profile", str(profile), "--learn",
        "--learn-folder", str(tmp_path / "learned"), "--learn-per", "key", "--api-keys", str(tmp_path / "keys.toml"),
        "--lookup-across", "--lookup-store", str(tmp_path / "texts"), "--enable-lora",
        "--lora-paths", f"sql={adapter_folders['sql']}", "--metrics-port", str(failures.metrics),
        **failures.environment,
    ) as server:  # fmt: skip
        ask = partial(ask_all, server, stay, (MODEL, "sql"), prompts[:2])
        plain = ask(speculate=False)

        def use() -> None:
            assert ask(speculate=True) == plain
            live = HTTP.get(f"{server.url}/outrider/live", headers={"Authorization": f"Bearer {stay[0]}"}, timeout=20)
            assert live.status_code in (200, 503), live.text

        def lose_two_keys() -> None:
            ask_all(server, [secrets[name] for name in gone[:2]], (MODEL,), prompts[:1], speculate=True)
            for _ in range(2):
                key_file.remove(tmp_path / "keys.toml", gone.pop(0))
            use()

        use()
        failures.of_each(server, KEYS, use)
        failures.of_each(server, KEY_GONE, lose_two_keys)


@pytest.mark.server
def test_with_a_drafter_that_learns(tmp_path: Path, small_target: SmallTarget, prompts: list[str]) -> None:
    failures, learned = Failures(tmp_path / "failures"), tmp_path / "learned"
    names = map("{:04}".format, itertools.count(1))
    with ForkedServer(
        tmp_path / "log", *SHARING, *small_target.flags("eagle3"), "--learn", "--learn-folder", str(learned),
        **failures.environment,
    ) as server:  # fmt: skip
        ask = partial(ask_all, server, ["none"], (MODEL,), prompts[:4])
        plain = ask(speculate=False)

        def use() -> None:
            assert ask(speculate=True) == plain

        def learn() -> None:
            for name in itertools.islice(names, 2):
                offer(learned, name, small_target, broken=False, drafter="eagle3")
                wait_until_tried(learned, name)
                use()

        def tune() -> None:
            said = HTTP.post(f"{server.url}/outrider/tune", json={"quick": True, "rounds": 1}, timeout=60)
            assert said.status_code == 500, said.text
            use()

        ways = {"calibration": use, "learning": learn, "planning": learn, "questions": tune}
        for call in sorted(SHARED):
            failures.of_each(server, [call], ways[call.partition(":")[0]])
        use()


@pytest.mark.server
def test_with_grammars(tmp_path: Path, small_target: SmallTarget, prompts: list[str]) -> None:
    failures, bodies = Failures(tmp_path / "failures"), [body | {"regex": "(yes, |no, ){20}"} for body in BODIES]
    flags = (*SHARING, *small_target.flags(), "--planner", "verify-all")

    def ask(*, speculate: bool) -> list[list[int]]:
        cases = itertools.product(prompts[:4], bodies)
        return [tokens(complete(server, prompt, speculate=speculate, max_tokens=24, **body)) for prompt, body in cases]

    with ForkedServer(tmp_path / "log", *flags, **failures.environment) as server:
        plain = ask(speculate=False)

        def use() -> None:
            assert ask(speculate=True) == plain

        use()
        failures.of_each(server, GRAMMARS, use)


@pytest.mark.server
def test_with_block_diffusion(tmp_path: Path) -> None:
    failures = Failures(tmp_path / "failures")
    for served in serve(tmp_path, TinyDiffusion(tied=False), *ALL, threshold=None, **failures.environment):
        prompts = served.prompts([9, 14, 22, 5])

        def ask(**options: Any) -> list[list[int]]:
            return [answer for body in (GREEDY, SEEDED) for answer in served.ask_all(prompts, 24, 4, **body, **options)]  # noqa: B023

        plain = ask(**OFF)

        def use() -> None:
            assert ask() == plain  # noqa: B023

        use()
        failures.of_each(served.server, DIFFUSION, use)
