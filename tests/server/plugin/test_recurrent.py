"""Recurrent states of a ragged verification follow the accepted tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from outrider.server.plugin import attention_backends
from outrider.server.plugin.cpu.recurrent import RecurrentBackend
from outrider.server.plugin.spec_inputs import indptr, ragged_layout, verify_input

REQUESTS, LAYERS, KEY_HEADS, HEADS, KEY, VALUE, TAPS = 3, 2, 1, 2, 16, 16, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
ROWS, SLOTS = torch.tensor([4, 0, 2]), torch.tensor([3, 5, 1])
LENGTH = 24


class Pool:
    """SGLang's pool: slots by row, one layer's tensors as views."""

    def __init__(self) -> None:
        self.req_to_token = torch.zeros(6, 64, dtype=torch.int32)
        self.slots = torch.zeros(6, dtype=torch.int32)
        self.slots[ROWS] = SLOTS.int()
        self.conv = torch.zeros(LAYERS, 7, CHANNELS, TAPS - 1)
        self.temporal = torch.zeros(LAYERS, 7, HEADS, VALUE, KEY)

    def get_mamba_indices(self, rows: torch.Tensor) -> torch.Tensor:
        return self.slots[rows]

    def mamba2_layer_cache(self, layer: int) -> Any:
        return SimpleNamespace(conv=[self.conv[layer]], temporal=self.temporal[layer])


class Served:
    """A backend with its layers, and their inputs at each position."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.pool = Pool()
        self.backend = RecurrentBackend(
            SimpleNamespace(device="cpu", req_to_token_pool=self.pool, token_to_kv_pool=SimpleNamespace())
        )
        self.layers = [self._layer(number, draw) for number in range(LAYERS)]
        self.texts = torch.randn(LAYERS, REQUESTS, LENGTH, CHANNELS + 2 * HEADS, generator=draw)

    @staticmethod
    def _layer(number: int, draw: torch.Generator) -> Any:
        return SimpleNamespace(
            layer_id=number, num_q_heads=KEY_HEADS, num_k_heads=KEY_HEADS, num_v_heads=HEADS,
            q_dim=KEY_HEADS * KEY, k_dim=KEY_HEADS * KEY, v_dim=HEADS * VALUE,
            conv_weights=torch.randn(CHANNELS, TAPS, generator=draw),
            A_log=torch.randn(HEADS, generator=draw), dt_bias=torch.randn(HEADS, generator=draw),
        )  # fmt: skip

    def run(self, mode: ForwardMode, begins: list[int], lens: list[int], wrong_from: list[int]) -> list[torch.Tensor]:
        """Outputs [lens, LAYERS, HEADS, VALUE]. Tokens from wrong_from on differ."""
        counts = torch.tensor(lens)
        spec = verify_input(counts, ragged_layout(indptr(counts), sum(lens)), 8, False)
        seq_lens = torch.tensor(begins) + (0 if mode.is_target_verify() else counts)
        self.backend.init_forward_metadata(
            SimpleNamespace(
                forward_mode=mode, seq_lens=seq_lens, req_pool_indices=ROWS, spec_info=spec, extend_seq_lens=counts
            )
        )
        outputs = []
        for layer, texts in zip(self.layers, self.texts, strict=True):
            places = zip(texts, begins, lens, wrong_from, strict=True)
            rows = torch.cat([self._rows(*each) for each in places])
            mixed, a, b = rows.split([CHANNELS, HEADS, HEADS], -1)
            outputs.append(self.backend.forward(layer=layer, forward_batch=None, mixed_qkv=mixed, a=a, b=b)[0])
        return list(torch.stack(outputs, 1).split(lens))

    @staticmethod
    def _rows(text: torch.Tensor, begin: int, count: int, wrong_from: int) -> torch.Tensor:
        rows = text[begin : begin + count].clone()
        rows[wrong_from:] *= -1
        return rows


STEPS = [([3, 1, 5], [2, 1, 1]), ([1, 4, 2], [1, 4, 1]), ([4, 2, 3], [4, 1, 3])]
"""Verified tokens of each request, and accepted ones, step by step."""


def decode(served: Served) -> list[torch.Tensor]:
    """Outputs of accepted tokens, after a prompt of 5, 1 and 7 tokens."""
    begins = [5, 1, 7]
    kept = served.run(ForwardMode.EXTEND, [0, 0, 0], begins, begins)
    for lens, accepted in STEPS:
        outputs = served.run(ForwardMode.TARGET_VERIFY, begins, lens, accepted)
        runner: Any = SimpleNamespace(attn_backend=served.backend)
        attention_backends.commit_states(runner, torch.tensor(accepted))
        kept = [torch.cat([old, new[:count]]) for old, new, count in zip(kept, outputs, accepted, strict=True)]
        begins = [begin + count for begin, count in zip(begins, accepted, strict=True)]
    return kept


def expected(lens: list[int]) -> tuple[list[torch.Tensor], Pool]:
    served = Served()
    return served.run(ForwardMode.EXTEND, [0, 0, 0], lens, lens), served.pool


def test_states_follow_accepted_tokens() -> None:
    """The bits are equal in every layer."""
    served = Served()
    results = decode(served)
    outputs, pool = expected([len(each) for each in results])
    for one, other in zip(results, outputs, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(served.pool.temporal, pool.temporal)
    assert torch.equal(served.pool.conv, pool.conv)


@pytest.mark.parametrize("part", ["slide", "replay"])
def test_states_that_follow_drafts_are_detected(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the planted fault, all verified tokens advance the windows, or the states."""
    from outrider.server.plugin.cpu import recurrent

    honest = getattr(recurrent.gated_delta, part)

    def by_drafts(tokens: Any, states: Any, counts: torch.Tensor) -> None:
        honest(tokens, states, states.indptr.diff())

    monkeypatch.setattr(recurrent.gated_delta, part, by_drafts)
    results = decode(Served())
    monkeypatch.undo()
    outputs, _ = expected([len(each) for each in results])
    assert not all(torch.allclose(one, other, atol=1e-3) for one, other in zip(results, outputs, strict=True))


def test_a_prompt_in_pieces_gives_the_same() -> None:
    served = Served()
    first = served.run(ForwardMode.EXTEND, [0, 0, 0], [2, 9, 4], [2, 9, 4])
    second = served.run(ForwardMode.EXTEND, [2, 9, 4], [7, 1, 5], [7, 1, 5])
    outputs, pool = expected([9, 10, 9])
    for one, rest, whole in zip(first, second, outputs, strict=True):
        assert torch.equal(torch.cat([one, rest]), whole)
    assert torch.equal(served.pool.temporal, pool.temporal)
