"""Answers do not depend on how prompts are cut, nor on the work between their chunks."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asking import MODEL, asked, complete, tokens
from learned_drafters import offer, wait_until_tried
from metrics_page import until_retracted
from running import TAKES_MANY, ForkedServer, Server, changed
from small_target import SmallTarget

from outrider.drafters.learning.answers import AnswerReader

from .conftest import jagged_profile

CACHE = ("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "3072", "--no-lookup-across")
BODIES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}]
TOKENS = 32
CUT = "a chunk is cut at random"
"""`any-chunks` prints it."""
WHOLE = ("--max-pause", "0", "--chunked-prefill-size", "8192")


def long_prompts() -> list[list[int]]:
    """Prompts of 3 to 900 tokens; every third shares a beginning with the previous one."""
    draw, prompts = random.Random(11), list[list[int]]()
    for number, length in enumerate([900, 40, 500, 3, 900, 700, 64, 250, 300]):
        beginning = prompts[-1][: length // 2] if number % 3 == 2 else []
        prompts.append(beginning + [draw.randrange(20, 700) for _ in range(length - len(beginning))])
    return prompts


def answers(server: Server, at_once: int, *, speculate: bool, max_tokens: int = TOKENS, **body: Any) -> list[list[int]]:
    cases = [(prompt, each) for each in BODIES for prompt in long_prompts()]

    def ask(case: tuple[list[int], dict[str, Any]]) -> list[int]:
        body_of_all = {"max_tokens": max_tokens, "ignore_eos": True} | body
        return tokens(complete(server, case[0], speculate=speculate, **case[1], **body_of_all))[:TOKENS]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, cases))


@pytest.fixture(scope="module")
def adapter(adapter_folders: dict[str, Path]) -> tuple[str, ...]:
    return ("--lora-paths", f"sql={adapter_folders['sql']}")


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, small_target: SmallTarget, adapter: tuple[str, ...]
) -> Iterator[dict[str, list[list[int]]]]:
    """Answers by model to whole prompts, one at a time, without speculation."""
    log = tmp_path_factory.mktemp("whole") / "log"
    server = ForkedServer(log, *CACHE, *WHOLE, *small_target.flags("off"), *adapter).wait_until_ready()
    try:
        yield {model: answers(server, 1, speculate=False, model=model) for model in (MODEL, "sql")}
    finally:
        server.kill()


@pytest.fixture(scope="module")
def cut(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    small_target: SmallTarget,
    adapter: tuple[str, ...],
) -> Iterator[Server]:
    """Cuts prompts at random; without shared prefixes it reads them in order of arrival."""
    folder = tmp_path_factory.mktemp("cut")
    made = {"model": str(small_target.folder), "drafter": "dspark", "drafter_path": str(small_target.dspark)}
    flags = (*CACHE, "--chunked-prefill-size", "8192", "--profile", str(jagged_profile(folder, **made)), *adapter)
    flags += (request.param,) if request.param else ()
    changes = changed("any-chunks", "profile-costs") | TAKES_MANY
    with ForkedServer(folder / "log", *flags, *small_target.flags(), **changes) as server:
        yield server


SHARING = pytest.mark.parametrize("cut", [""], indirect=True)


@pytest.mark.server
@pytest.mark.parametrize(
    ("cut", "model"), [("", MODEL), ("", "sql"), ("--disable-radix-cache", MODEL)], indirect=["cut"]
)
def test_cut_prompts_have_the_answers_of_whole_ones(cut: Server, whole: dict[str, list[list[int]]], model: str) -> None:
    cuts = cut.output().count(CUT)
    assert answers(cut, 8, speculate=True, model=model) == whole[model]
    assert cut.output().count(CUT) > cuts + 3


@pytest.mark.server
@SHARING
def test_a_cache_too_small_for_all(cut: Server, whole: dict[str, list[list[int]]]) -> None:
    """Requests are retracted while prompts are half read."""

    def ask() -> None:
        assert answers(cut, 18, speculate=True, max_tokens=120) == whole[MODEL]

    until_retracted(cut.url, ask)


@pytest.mark.server
@SHARING
def test_clients_that_leave_while_their_prompt_is_read(cut: Server, whole: dict[str, list[list[int]]]) -> None:
    draw = random.Random(3)

    def leave(number: int) -> None:
        prompt = [draw.randrange(20, 700) for _ in range(900)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "stream": number % 2 == 0}
        with asked(cut, "/v1/completions", body):
            pass

    with ThreadPoolExecutor(4) as pool:
        leaving = [pool.submit(leave, number) for number in range(16)]
        assert answers(cut, 8, speculate=True) == whole[MODEL]
        assert all(each.result() is None for each in leaving)


@pytest.mark.server
@pytest.mark.parametrize("drafter", ["dspark", "eagle3"], indirect=True)
def test_drafters_exchanged_while_prompts_are_half_read(
    start_learning: Callable[..., Server],
    small_target: SmallTarget,
    drafter: str,
    whole: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    """One drafter reads the beginning of a prompt, the next one its end; stored answers have whole prompts."""
    folder = tmp_path / "learned"
    server = start_learning("--chunked-prefill-size", "8192", change="any-chunks")
    with ThreadPoolExecutor(1) as pool:
        for number, broken in enumerate((True, False)):
            asking = pool.submit(answers, server, 8, speculate=True)
            offer(folder, f"000{number + 1}", small_target, broken=broken, drafter=drafter)
            wait_until_tried(folder, f"000{number + 1}")
            assert asking.result() == whole[MODEL]
    assert answers(server, 8, speculate=True) == whole[MODEL]
    assert server.output().count(CUT) > 3
    assert server.stop() == 0
    kept = [(answer.prompt_ids, answer.response_ids) for answer in AnswerReader(folder).read()]
    cases = [prompt for _ in BODIES for prompt in long_prompts()]
    assert sorted(kept) == sorted([*zip(cases, whole[MODEL], strict=True)] * 3)
