"""The default embedded model, in bfloat16 with shared prefixes: speculation and caching change no greedy or seeded
answer."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asking import complete
from metrics_page import MetricsPage
from running import Server

from outrider.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="bfloat16 rounds with the batch without the kernels")

SHARED = (
    "You help the readers of a small library. Answer in one or two plain sentences, and name the book that you mean. "
    "The library has novels, atlases, cookbooks and three dictionaries; it is open from nine to five. "
)
PENALTIES = {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    "greedy, penalised": {"temperature": 0} | PENALTIES,
    "seeded, penalised": {"temperature": 0.8, "top_p": 0.95, "seed": 5} | PENALTIES,
}


def ask(
    server: Server, prompts: list[str], kind: dict[str, Any], at_once: int, *, speculate: bool
) -> list[tuple[Any, ...]]:
    """Text, token ids, finish reason and length of every answer."""

    def one(number: int) -> tuple[Any, ...]:
        seed = {"seed": kind["seed"] + number} if "seed" in kind else {}
        answer = complete(server, prompts[number], speculate=speculate, max_tokens=40, **kind | seed)
        (choice,) = answer["choices"]
        return choice["text"], choice["token_ids"], choice["finish_reason"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, range(len(prompts))))


@pytest.mark.parametrize("name", KINDS)
def test_texts_are_equal(server: Server, prompts: list[str], name: str, request: pytest.FixtureRequest) -> None:
    """The second time, whole prompts and other requests' answers are cached."""
    if name == "greedy, penalised" and not request.config.getoption("--exhaustive"):
        pytest.skip("--exhaustive asks for what a seed and penalties do together and a greedy answer has alone")
    first = f"{name}: {SHARED}"
    asked = [first + prompts[0], *(first + prompt for prompt in prompts[2:7])]
    before = MetricsPage(server.url)
    cold = ask(server, asked, KINDS[name], 1, speculate=True)  # drafting pays
    middle = MetricsPage(server.url)
    plain = ask(server, asked, KINDS[name], len(asked), speculate=False)
    warm = ask(server, asked, KINDS[name], len(asked), speculate=True)
    after = MetricsPage(server.url)
    assert len({text for text, *_ in plain}) == len(asked)
    assert cold == plain
    assert warm == plain
    assert after.value("sglang:cached_tokens_total") - middle.value("sglang:cached_tokens_total") > 50 * len(asked)
    sampling, drafted = name[:6], "outrider_accepted_position_total"
    for position in ("1", "2"):  # the shipped drafter drafted several tokens, sampled ones too
        labels = {"sampling": sampling, "source": "model", "position": position}
        assert after.value(drafted, **labels) > before.value(drafted, **labels)
