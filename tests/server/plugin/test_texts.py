"""The engine's part in lookups across requests: whose texts are kept."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.drafters.corpora import OWNERS, Corpora
from outrider.kernels.cpu import native
from outrider.server.plugin.decode.texts import TextKeeper
from outrider.server.plugin.options import RequestOptions

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")


class Request(SimpleNamespace):
    """A request that, as SGLang's, can be referred to weakly."""

    __slots__ = ("__weakref__",)


def ask(keeper: TextKeeper, key: str, adapter: str | None = None, salt: str = "") -> int:
    """Number of the corpus in which a key's request is looked up; a corpus that was dropped comes back with another."""
    params = SimpleNamespace(custom_params=RequestOptions(corpus=key).to_custom_params())
    request = Request(rid="", sampling_params=params, origin_input_ids=[1, 2, 3], lora_id=adapter, cache_salt=salt)
    return int(keeper.admit([request])[0])


def test_a_keys_adapters_displace_its_own_texts_alone() -> None:
    """The last ones asked for stay, salted or not; another key's stay whatever comes."""
    keeper = TextKeeper(Corpora(4096))
    others = {key: ask(keeper, key) for key in ("bob", "cid")}
    numbers = {name: ask(keeper, "ann", name) for name in map(str, range(2 * OWNERS))}
    kept = list(numbers)[-(OWNERS - len(others)) :]
    for salt in ("", "salted"):
        assert len({ask(keeper, "ann", name, salt) for name in kept}) == len(kept)
    assert {name: ask(keeper, "ann", name) for name in kept} == {name: numbers[name] for name in kept}
    assert {key: ask(keeper, key) for key in others} == others


def test_keys_get_their_share_of_one_that_has_more() -> None:
    """Until each has as much; then the one that has been silent longest goes."""
    keeper = TextKeeper(Corpora(4096))
    adapters = [ask(keeper, "ann", f"adapter {n}") for n in range(OWNERS)]
    keys = {f"key {n}": ask(keeper, f"key {n}") for n in range(OWNERS - 1)}
    assert ask(keeper, "ann", f"adapter {OWNERS - 1}") == adapters[-1]
    assert {key: ask(keeper, key) for key in keys} == keys
    ask(keeper, "one more")
    assert ask(keeper, "key 0") == keys["key 0"]
    assert ask(keeper, "ann", f"adapter {OWNERS - 1}") != adapters[-1]
