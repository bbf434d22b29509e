"""Texts that are kept for lookups across requests, of prompts with images too."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from outrider.drafters.corpora import Corpora, Name
from outrider.kernels.cpu import native
from outrider.server.plugin.decode.texts import TextKeeper
from outrider.server.plugin.options import RequestOptions

VOCAB = 100
IMAGE = 1_000_000 + (1 << 61)
"""A token that SGLang puts in the place of an image's."""


class Request(SimpleNamespace):
    """The part of SGLang's request that is read."""

    __hash__ = object.__hash__


@pytest.mark.skipif(not native.available(), reason="no compiled kernels here")
@pytest.mark.parametrize("images", [0, 1, 3])
def test_an_image_is_no_text(images: int) -> None:
    """It cannot be drafted; the words around it can."""
    keeper, prompt, answer = TextKeeper(Corpora(1 << 10), VOCAB), array("q"), [7, 8, 9]
    for number in range(images):
        prompt.extend([10 + number, 11 + number, *[IMAGE + number] * 40])
    prompt.extend([4, 5, 6])
    req = Request(
        rid="a", lora_id=None, cache_salt=None, origin_input_ids=prompt, output_ids_through_stop=answer,
        finished_reason=FINISH_LENGTH(3), multimodal_inputs=SimpleNamespace() if images else None,
        sampling_params=SimpleNamespace(custom_params=RequestOptions(corpus="me").to_custom_params()),
    )  # fmt: skip
    assert keeper.admit(req) == keeper.admit(req) > 0
    keeper.finished("a")
    ((name, kept),) = keeper.corpora.contents()
    assert name == Name.of("me", "")
    texts = " ".join(map(str, kept.tolist())).split("-1")
    assert [text.split() for text in texts if text] == [
        *([str(10 + number), str(11 + number)] for number in range(images)), [*"456"], [*"456789"],
    ]  # fmt: skip
