"""A tiny model with recurrent layers and experts, in float32: neither speculation nor a cached prefix changes an
answer."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tiny_families
import tiny_mtp
import torch
from asking import MODEL, complete, tokens
from gguf_models import WIDTH
from metrics_page import MetricsPage, until_retracted
from running import TAKES_MANY, ForkedServer, Server, overlaps
from safetensors.torch import load_file, save_file

FEW = [33, 200, 54, 77, 93]
BODY = {"temperature": 0, "logit_bias": dict.fromkeys(map(str, FEW), 100.0)}
"""Answers have only a few tokens and never end: they repeat themselves, so much is drafted, and much of it wrong."""
LENGTHS = [3, 64, 65, 150, 1, 31, 129, 90, 12, 77]
"""Tokens of the prompts; above 64 they are read in pieces."""
ANSWERS = [60, 1, 48, 60, 60, 2, 60, 33, 60, 60]
ASKED = [([(7 * i * i + n) % 250 + 17 for i in range(n)], answer) for n, answer in zip(LENGTHS, ANSWERS, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    tiny_families.write("Qwen3NextForCausalLM", folder / "tiny")
    return folder


@contextmanager
def started(folder: Path, name: str, *flags: str, target: str = "tiny") -> Iterator[Server]:
    if overlaps():
        pytest.skip("SGLang keeps the states of prefixes only where steps do not overlap, as on CPUs")
    with ForkedServer(
        folder / f"log-{name}", "--model", str(folder / target), "--served-model-name", MODEL, "--dtype", "float32",
        "--max-total-tokens", "640", "--max-running-requests", "8", "--chunked-prefill-size", "64",
        *flags, **TAKES_MANY,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    with started(folder, "lookup") as server:
        yield server


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Server]:
    with started(folder, "alone", "--disable-radix-cache", "--drafter", "off") as server:
        yield server


@pytest.fixture(scope="module")
def plain(alone: Server) -> list[list[int]]:
    return [ask(alone, case, speculate=False) for case in ASKED]


def ask(served: Server, case: tuple[list[int], int], *, speculate: bool) -> list[int]:
    return tokens(complete(served, case[0], speculate=speculate, max_tokens=case[1], **BODY))


def test_one_at_a_time(served: Server, plain: list[list[int]]) -> None:
    before = MetricsPage(served.url)
    assert [ask(served, case, speculate=True) for case in ASKED] == plain
    after = MetricsPage(served.url)
    for name in ("accepted", "wasted"):  # states advanced by both kinds of steps
        name = f"outrider_{name}_tokens_total"
        assert after.value(name) - before.value(name) > 20


def test_many_at_once_in_a_cache_too_small_for_all(served: Server, plain: list[list[int]]) -> None:
    """Some requests are retracted or aborted: the next request in a row must not see old state."""
    asked = [*ASKED, *reversed(ASKED)]

    def ask_all() -> None:
        with ThreadPoolExecutor(len(asked) + 4) as pool:
            leaving = [pool.submit(leave, served, case) for case in ASKED[:4]]
            choices = list(pool.map(lambda i: ask(served, asked[i], speculate=i % 3 > 0), range(len(asked))))
            assert all(each.result() for each in leaving)
        assert choices == [*plain, *reversed(plain)]

    until_retracted(served.url, ask_all)
    assert [ask(served, case, speculate=True) for case in ASKED] == plain


@pytest.mark.parametrize(("asked", "speculate"), [(3, False), (0, False), (7, True), (4, True)])
def test_a_second_turn_reads_new_tokens_alone(asked: int, speculate: bool, served: Server, alone: Server) -> None:
    """The earlier turns' state comes from the cache: completely, if no draft past the answer's end was verified."""
    prompt, _ = ASKED[asked]
    said = ask(served, ASKED[asked], speculate=speculate)
    turn = [*prompt, *said, 21, 99, 130 + asked]
    answer = complete(served, turn, speculate=speculate, max_tokens=40, **BODY)
    assert tokens(answer) == ask(alone, (turn, 40), speculate=False)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    read = len(prompt) + len(said) - 1  # the last token of an answer is not read
    assert len(prompt) <= cached <= read if speculate else cached == read


def leave(served: Server, case: tuple[list[int], int]) -> bool:
    """Request a long answer, and hang up at its first token."""
    body = {"model": MODEL, "prompt": case[0], "max_tokens": 300, "stream": True, **BODY}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
        return any(line.startswith("data:") for line in answer.iter_lines())


@pytest.fixture(scope="module")
def with_mtp(folder: Path) -> Iterator[Server]:
    """The target with a random MTP layer, which `auto` takes. The head has only the few tokens' rows, so drafts are
    right by chance."""
    shutil.copytree(folder / "tiny", folder / "with-mtp")
    weights = load_file(file := folder / "with-mtp" / "model.safetensors")
    kept = torch.zeros(len(weights["lm_head.weight"]), 1).index_fill_(0, torch.tensor(FEW), 1.0)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * kept}, file)
    layout = "qwen3-next"
    shape = json.loads((folder / "tiny" / "config.json").read_text())
    fields = {name: shape[name] for name in tiny_mtp.FIELDS if name in shape}
    layer = tiny_mtp.layer_model(layout, **fields)
    tiny_mtp.add_mtp(folder / "with-mtp", tiny_mtp.published(layout, layer, tiny_mtp.joint(layout, size=WIDTH)))
    with started(folder, "mtp", "--no-lookup", "--planner", "verify-all", target="with-mtp") as server:
        yield server


@pytest.mark.server
def test_its_mtp_layer(with_mtp: Server, plain: list[list[int]]) -> None:
    assert "in the model's checkpoint, fits with-mtp" in with_mtp.output()
    assert [ask(with_mtp, case, speculate=True) for case in ASKED] == plain
    asked = [*ASKED, *reversed(ASKED)]

    def ask_all() -> None:
        with ThreadPoolExecutor(len(asked)) as pool:
            assert list(pool.map(lambda case: ask(with_mtp, case, speculate=True), asked)) == [*plain, *reversed(plain)]

    until_retracted(with_mtp.url, ask_all)
    page = MetricsPage(with_mtp.url)
    for name in ("accepted", "wasted"):
        assert page.value(f"outrider_{name}_tokens_total") > 10
