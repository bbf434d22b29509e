"""Tiny models that read images, in float32: answers equal Transformers', with and without speculation."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from asking import MODEL
from metrics_page import metric
from PIL import Image
from running import HTTP, ForkedServer, Server
from tiny_images import BY_ARCHITECTURE, IMAGE, ReadsImages, data_url, in_request, noise

from outrider.server.http.requests.images import MAX_PATCHES
from outrider.server.plugin.text_alone import IMAGES

COUNT, FEW = 32, [33, 200, 54, 77, 93]
"""Length of an answer, and its only tokens, which repeat, so that much is drafted."""
BIAS = dict.fromkeys(FEW, 100.0)
FIRST, SECOND, WIDE = noise(1, 112, 168), noise(2, 112, 168), noise(3, 196, 84)
GREY = [Image.new("RGB", size, (90, 90, 90)) for size in ((112, 224), (224, 112))]
"""Equal pixels in different shapes."""
ASK, LONG = "What is it? It is it. What is it? It", "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": [FIRST, ASK]}],
    "another": [{"role": "user", "content": [SECOND, ASK]}],
    "in the middle": [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "It is a list."},
        {"role": "user", "content": ["And this?", WIDE, ASK]},
        {"role": "assistant", "content": "That is it."},
        {"role": "user", "content": [FIRST, SECOND, "and these?"]},
    ],
    "wide grey": [{"role": "user", "content": [GREY[0], ASK]}],
    "high grey": [{"role": "user", "content": [GREY[1], ASK]}],
    "none": [{"role": "user", "content": ASK}],
}


@pytest.fixture(scope="module", params=IMAGES)
def reads_images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReadsImages:
    return ReadsImages.write(request.param, tmp_path_factory.mktemp("images") / "tiny")


@pytest.fixture(scope="module")
def images_server(reads_images: ReadsImages) -> Iterator[Server]:
    """Reads prompts in pieces that cut images."""
    folder = reads_images.folder
    with ForkedServer(
        folder.parent / "log", "--model", str(folder), "--served-model-name", MODEL, "--dtype", "float32",
        "--max-total-tokens", "1024", "--chunked-prefill-size", "64", "--log-level", "info",
    ) as server:  # fmt: skip
        yield server


def ask(server: Server, messages: list[dict[str, Any]], *, speculate: bool, **more: Any) -> dict[str, Any]:
    body = {
        "model": MODEL, "messages": in_request(messages), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True,
        "logprobs": True, "speculation": {"enabled": speculate}, "skip_special_tokens": False, **more,
    }  # fmt: skip
    answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_all_that_read_images_are_tested() -> None:
    assert {*BY_ARCHITECTURE} == {*IMAGES}


@pytest.mark.parametrize("chat", CHATS)
def test_answers_equal_transformers(chat: str, reads_images: ReadsImages, images_server: Server) -> None:
    messages, decode = CHATS[chat], reads_images.tokenizer.decode
    free, biased = reads_images.greedy(messages, COUNT), reads_images.greedy(messages, COUNT, BIAS)
    before = metric(images_server.url, "outrider_accepted_tokens_total")
    for speculates in (True, False):
        answer = ask(images_server, messages, speculate=speculates)
        assert answer["usage"]["prompt_tokens"] == len(reads_images.prompt(messages)[0])
        assert text(answer) == decode(free[0])
        logprobs = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(free[1]), atol=2e-4, rtol=1e-4)
        answer = ask(images_server, messages, speculate=speculates, logit_bias=BIAS)
        assert text(answer) == decode(biased[0])
    assert metric(images_server.url, "outrider_accepted_tokens_total") > before


def test_another_image_is_another_prompt(reads_images: ReadsImages, images_server: Server) -> None:
    """Only the part before the image is shared; the same image is not read twice."""
    answers = {}
    for name in ("one", "another", "one"):
        answer = ask(images_server, CHATS[name], speculate=True)
        answers.setdefault(name, text(answer))
        assert text(answer) == answers[name]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    ids = reads_images.prompt(CHATS["one"])[0]
    assert cached == len(ids) - 1
    assert answers["one"] != answers["another"]
    third = noise(9, 112, 168)
    answer = ask(images_server, [{"role": "user", "content": [third, ASK]}], speculate=True)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == ids.index(IMAGE)


@pytest.mark.parametrize("seed", [None, 5])
def test_all_choices_see_all_images(seed: int | None, images_server: Server) -> None:
    alone = text(ask(images_server, CHATS["in the middle"], speculate=False))
    answer = ask(images_server, CHATS["in the middle"], speculate=True, n=3, seed=seed)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [alone] * 3


def test_many_at_once(images_server: Server) -> None:
    alone = {name: text(ask(images_server, CHATS[name], speculate=False, logit_bias=BIAS)) for name in CHATS}
    names = [*CHATS, *reversed(CHATS)]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = pool.map(
            lambda i: ask(images_server, CHATS[names[i]], speculate=i % 3 > 0, logit_bias=BIAS), range(12)
        )
        assert [text(answer) for answer in answers] == [alone[name] for name in names]


def test_tokens_of_images_are_the_placeholder_to_a_penalty(reads_images: ReadsImages, images_server: Server) -> None:
    ids, _ = reads_images.greedy(CHATS["one"], COUNT, penalty=1.5)
    for speculates in (True, False):
        answer = ask(images_server, CHATS["one"], speculate=speculates, repetition_penalty=1.5)
        assert text(answer) == reads_images.tokenizer.decode(ids)


REFUSED = {
    "a remote address": ({"url": "http://127.0.0.1:1/a.png"}, "fetches nothing"),
    "a file": ({"url": "file:///etc/passwd"}, "fetches nothing"),
    "a path": ({"url": "/etc/passwd"}, "fetches nothing"),
    "another kind": ({"url": "data:image/svg+xml;base64,AAAA"}, "fetches nothing"),
    "no base64": ({"url": "data:image/png;base64,A*"}, "not base64"),
    "no image": ({"url": "data:image/png;base64,AAAA"}, "no image of PNG"),
    "a size": ({"url": data_url(FIRST), "detail": "high"}, "cannot be set"),
    "a strip": ({"url": data_url(Image.new("L", (4100, 4)))}, "aspect ratio"),
    "too many pixels": ({"url": data_url(Image.new("1", (8192, 8192)))}, "are allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_is_no_image_is_refused_in_one_line(case: str, images_server: Server) -> None:
    image, reason = REFUSED[case]
    assert reason in refused(images_server, {"type": "image_url", "image_url": image})


def test_damaged_and_too_many_images_are_refused(reads_images: ReadsImages, images_server: Server) -> None:
    url = data_url(noise(4, 224, 224))
    cut = {"type": "image_url", "image_url": {"url": url[: url.index(",") + 1 + len(url) // 8 * 4]}}
    assert "damaged" in refused(images_server, cut)
    whole = {"type": "image_url", "image_url": {"url": url}}
    patches = int(reads_images.processor.get_number_of_image_patches(224, 224))
    assert "patches" in refused(images_server, *[whole] * (MAX_PATCHES // patches + 1))
    assert "places for 2 images" in refused(images_server, whole, {"type": "text", "text": "<|image_pad|>"})
    assert "takes text" in refused(images_server, whole, role="assistant")


def refused(server: Server, *parts: dict[str, Any], role: str = "user") -> str:
    body = {"model": MODEL, "messages": [{"role": role, "content": [*parts]}], "max_tokens": 4}
    answer = HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    return message
