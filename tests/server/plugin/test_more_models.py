"""Our versions of SGLang's models."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

from outrider.server.plugin.loading import more_models

WIDTH, ORIGINAL, LONGEST = 32, 16, 64
FACTORS = {"short": [1.0 + i / 10 for i in range(WIDTH // 2)], "long": [2.0 + i for i in range(WIDTH // 2)]}


@pytest.mark.parametrize(("served", "chosen"), [(None, "long"), (LONGEST, "long"), (17, "long"), (16, "short")])
def test_the_context_chooses_long_ropes_factors(
    served: int | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with SGLang's own table, for every position."""
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: SimpleNamespace(context_length=served))
    theirs = Phi3LongRoPEScaledRotaryEmbedding(
        WIDTH, WIDTH, LONGEST, ORIGINAL, 5000, True, torch.float32, FACTORS["short"], FACTORS["long"]
    )
    ours: Any = more_models._one_table(theirs, SimpleNamespace(rope_parameters={}))
    assert type(ours).forward_native is RotaryEmbedding.forward_native
    assert ours.cos_sin_cache.shape == (LONGEST, WIDTH)
    expected = getattr(theirs, f"{chosen}_cos_sin_cache")
    torch.testing.assert_close(ours.cos_sin_cache[: len(expected)], expected)
    stated: Any = more_models._one_table(theirs, SimpleNamespace(rope_parameters={"attention_factor": 3.0}))
    torch.testing.assert_close(stated.cos_sin_cache, ours.cos_sin_cache * 3 / theirs.long_mscale)
