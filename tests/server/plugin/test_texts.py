"""Stored texts for lookups across requests."""

from array import array
from types import SimpleNamespace

import pytest
from planning import Request
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from outrider.drafters.corpora import OWNERS, Corpora, Name
from outrider.kernels.cpu import native
from outrider.server.plugin.decode.optional.texts import TextKeeper
from outrider.server.plugin.options import RequestOptions

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

VOCAB = 100
IMAGE = 1_000_000 + (1 << 61)
"""A token that SGLang puts in place of an image's."""


def ask(keeper: TextKeeper, key: str, adapter: str | None = None, salt: str = "") -> int:
    """Number of a key's corpus; a dropped corpus returns with a new number."""
    params = SimpleNamespace(custom_params=RequestOptions(corpus=key).to_custom_params())
    tokens = array("q", [1, 2, 3])
    request = Request(
        rid="", sampling_params=params, origin_input_ids=tokens, lora_id=adapter, cache_salt=salt,
        multimodal_inputs=None,
    )  # fmt: skip
    return keeper.admitted(request)


def test_a_keys_adapters_displace_its_own_texts_alone() -> None:
    """The most recently used texts stay, and another key's."""
    keeper = TextKeeper(Corpora(4096), VOCAB)
    others = {key: ask(keeper, key) for key in ("bob", "cid")}
    numbers = {name: ask(keeper, "ann", name) for name in map(str, range(2 * OWNERS))}
    kept = list(numbers)[-(OWNERS - len(others)) :]
    for salt in ("", "salted"):
        assert len({ask(keeper, "ann", name, salt) for name in kept}) == len(kept)
    assert {name: ask(keeper, "ann", name) for name in kept} == {name: numbers[name] for name in kept}
    assert {key: ask(keeper, key) for key in others} == others


def test_keys_take_their_share_from_the_largest() -> None:
    """Until all have equal shares, the largest loses; then the key silent longest."""
    keeper = TextKeeper(Corpora(4096), VOCAB)
    adapters = [ask(keeper, "ann", f"adapter {n}") for n in range(OWNERS)]
    keys = {f"key {n}": ask(keeper, f"key {n}") for n in range(OWNERS - 1)}
    assert ask(keeper, "ann", f"adapter {OWNERS - 1}") == adapters[-1]
    assert {key: ask(keeper, key) for key in keys} == keys
    ask(keeper, "one more")
    assert ask(keeper, "key 0") == keys["key 0"]
    assert ask(keeper, "ann", f"adapter {OWNERS - 1}") != adapters[-1]


@pytest.mark.parametrize("images", [0, 1, 3])
def test_an_image_is_no_text(images: int) -> None:
    """The words around it can be drafted."""
    keeper, prompt, answer = TextKeeper(Corpora(1 << 10), VOCAB), array("q"), [7, 8, 9]
    for number in range(images):
        prompt.extend([10 + number, 11 + number, *[IMAGE + number] * 40])
    prompt.extend([4, 5, 6])
    req = Request(
        rid="a", lora_id=None, cache_salt=None, origin_input_ids=prompt, output_ids_through_stop=answer,
        finished_reason=FINISH_LENGTH(3), multimodal_inputs=SimpleNamespace() if images else None,
        sampling_params=SimpleNamespace(custom_params=RequestOptions(corpus="me").to_custom_params()),
    )  # fmt: skip
    assert keeper.admitted(req) == keeper.admitted(req) > 0
    keeper.finished(req)
    ((name, kept),) = keeper.corpora.contents()
    assert name == Name.of("me", "")
    texts = " ".join(map(str, kept.tolist())).split("-1")
    assert [text.split() for text in texts if text] == [
        *([str(10 + number), str(11 + number)] for number in range(images)), [*"456"], [*"456789"],
    ]  # fmt: skip
