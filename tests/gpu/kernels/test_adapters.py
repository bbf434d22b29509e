"""SGLang's LoRA kernels in a ragged verification, eager and in a graph."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from gpu_device import INTERPRETED, ON, TOLERANCE

triton_backend = pytest.importorskip("sglang.srt.lora.backend.triton_backend")

WIDTH, SLOTS, RANK, DEPTH, SIZES = 5, 4, 4, 64, (32, 16, 16)
RANKS, SCALES = [0, RANK, 2], [0.0, 2.0, 0.5]
"""Ranks and scales of the slots: the model's, and two adapters'."""


class Unpinned:
    """torch for a host without pinned memory."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def tensor(self, *args, pin_memory=False, **kwargs):
        return torch.tensor(*args, **kwargs)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    from outrider.server.plugin.cuda.adapters import RaggedLoRABackend

    if INTERPRETED:
        monkeypatch.setattr(triton_backend, "torch", Unpinned())
    made = RaggedLoRABackend(max_loras_per_batch=3, device=ON, server_args=SimpleNamespace())
    made.init_decode_cuda_graph_batch_info(max_bs_in_cuda_graph=SLOTS, num_tokens_per_req=WIDTH)
    return made


def prepare(backend, lens: list[int], slots: list[int], graph: bool) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    layout = SimpleNamespace(verify_lens=torch.tensor(lens, device=ON))
    spec = SimpleNamespace(draft_token_num=WIDTH, ragged_verify_layout=layout)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=len(lens), spec_info=spec,
        input_ids=torch.zeros(sum(lens) + 3, dtype=torch.int64, device=ON),  # with padding
    )  # fmt: skip
    backend.prepare_lora_batch(batch, slots, RANKS, SCALES, graph)


@pytest.mark.parametrize("graph", [False, True])
def test_every_request_gets_its_own_adapter(backend, graph):
    draw = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, *SIZES], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    down, up = torch.randn(3, 3 * RANK, DEPTH, generator=draw), torch.randn(3, sum(SIZES), RANK, generator=draw)
    for lens, slots in (([3, 1, 5, 2], [1, 0, 2, 1]), ([1, 4], [2, 1]), ([5, 5, 5], [0, 1, 1])):
        prepare(backend, lens, slots, graph)
        rows = sum(lens) + 3
        x, base = torch.randn(rows, DEPTH, generator=draw), torch.randn(rows, sum(SIZES), generator=draw)
        expected, begin = base.double(), 0
        for length, slot in zip(lens, slots, strict=True):
            rank = RANKS[slot]
            for part, (first, last) in enumerate(pairwise(offsets)):
                a, b = down[slot, part * rank : (part + 1) * rank].double(), up[slot, first:last, :rank].double()
                change = SCALES[slot] * x[begin : begin + length].double() @ a.T @ b.T
                expected[begin : begin + length, first:last] += change
            begin += length
        output = backend.run_qkv_lora(
            x.to(ON), down.to(ON), up.to(ON), base_output=base.to(ON), output_offset=offsets.to(ON),
            output_offset_cpu=offsets, max_qkv_out_dim=max(SIZES),
        )  # fmt: skip
        error = (output.cpu().double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < TOLERANCE[torch.float32]


def test_a_graph_reads_the_same_arrays(backend):
    prepare(backend, [3, 1, 5, 2], [1, 0, 2, 1], True)
    before = backend.batch_info
    arrays = [each.data_ptr() for each in (before.seg_lens, before.seg_indptr, before.weight_indices)]
    prepare(backend, [2], [1], True)
    after = backend.batch_info
    assert arrays == [each.data_ptr() for each in (after.seg_lens, after.seg_indptr, after.weight_indices)]
    assert after.seg_lens.tolist() == [2, 0, 0, 0]
    assert after.seg_indptr.tolist() == [0, 2, 2, 2, 2]
    assert after.expected_tokens == 5
