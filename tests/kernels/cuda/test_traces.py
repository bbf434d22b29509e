"""Traces a decode step on fake CUDA tensors: no result is read back, and lengths change no operation."""

import shutil
from collections.abc import Callable

import pytest
import torch
from fake_cuda import Recorder, fake_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from outrider.drafters.base import DraftBatch
from outrider.drafters.block.heads import SEQUENTIAL_HEADS
from outrider.drafters.block.sampling import sample_block, sample_parallel
from outrider.kernels.acceptance import Verification, accept_logits
from outrider.kernels.attention import flat_attention
from outrider.kernels.cuda import native
from outrider.kernels.drafts import admit, weigh_drafts
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.noise import Purpose, streams, substreams, uniforms
from outrider.kernels.ragged import commit, flatten_bucket, write_cached_slots
from outrider.kernels.sampling import Rules, draw_tokens

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not native.available(), reason="needs a C++ compiler and Triton"
)
R, GAMMA, TIER, V, D = 5, 4, 16, 300, 64
FREE = "aten.empty", "aten.slice", "prim."
"""Prefixes of operations that launch no kernel."""


def decode_step(head: str | None) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda:0")

    def real(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.float32)

    rules = Rules(real(R), empty(R), real(R), real(R))
    anchors, seeds, seq_lens, rows = empty(R), empty(R), empty(R), empty(R)
    table = empty(8, 64, dtype=torch.int32)
    keys = substreams(streams(seeds, seq_lens, Purpose.DRAFT), GAMMA)
    batch = DraftBatch(anchors, seq_lens, table, rows, keys=keys, **rules._asdict())
    logits, hidden = real(R, GAMMA, V), real(R, GAMMA, D)
    if head is None:
        tokens, probs, confidence = sample_parallel(logits, batch, vocab=None)
    else:
        with torch.device("cuda:0"):
            markov = SEQUENTIAL_HEADS[head](_Shape)
        tokens, probs, confidence = sample_block(
            logits, hidden, batch, vocab=None, markov=markov.requires_grad_(False), confidence=None
        )
    confidence, _ = weigh_drafts(tokens, confidence, empty(R), rows, empty(8, 3), (real(6, GAMMA), real(6, GAMMA)))
    verify_lens, _ = admit(confidence, empty(R), empty(1), bounds=real(GAMMA), first=empty(R, dtype=torch.bool))
    flat = flatten_bucket(anchors, tokens, verify_lens, seq_lens, table, rows, TIER)
    ids, positions, slots, indptr, request, step = flat
    pool = real(512, 2, D)
    kv = FlatBatch(indptr, seq_lens + verify_lens + 1, rows, table, most_queries=GAMMA + 1)
    attended = flat_attention(real(TIER, 8, D), pool, pool, kv, scale=0.1, window=9)
    batch = Verification(
        tokens, verify_lens, indptr, uniforms=uniforms(streams(seeds, seq_lens, Purpose.ACCEPT), GAMMA),
        final_keys=streams(seeds, seq_lens, Purpose.FINAL), decided=empty(R, dtype=torch.bool),
        draft_probs=real(R, GAMMA, 8 * D),
    )  # fmt: skip
    row_keys = streams(seeds.index_select(0, request), positions + 1, Purpose.TOKEN)
    accept_lens, out = accept_logits(batch, request, attended.flatten(1).float(), rules, row_keys)
    draw_tokens(logits.select(1, 0), rows, rules, keys.select(1, 0).contiguous())
    new_seq_lens, bonus, kept = commit(accept_lens, out, seq_lens, request, step, slots)
    assert new_seq_lens.shape == bonus.shape == (R,)
    assert ids.shape == kept.shape == (TIER,)
    assert out.shape == (R, GAMMA + 1)
    assert (probs is None) or probs.shape == (R, GAMMA, V)


class _Shape:
    vocab_size, hidden_size, markov_rank, logit_size = V, D, 16, V


def traced(step: Callable[[], None]) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    with fake_cuda() as recorder, torch.inference_mode():
        step()
    return recorder.operations


@pytest.mark.parametrize("head", [None, *SEQUENTIAL_HEADS])
def test_a_decode_step_neither_waits_nor_changes_shape(head: str | None) -> None:
    operations = traced(lambda: decode_step(head))
    names = {name for name, _ in operations}
    for expected in ("streams", "numbers", "sample", "admit", "flatten", "attention", "outcome", "commit"):
        assert f"{expected}_kernel" in names
    assert not [shape for _, shapes in operations for shape in shapes if any(not isinstance(n, int) for n in shape)]


@pytest.mark.parametrize("dim", [80, 96, 256, 512])
def test_heads_of_any_published_size_take_one_kernel(dim: int) -> None:
    """Torch would take a dozen operations for every 128 positions."""

    def step() -> None:
        numbers = torch.empty(R + 1, dtype=torch.int64, device="cuda:0")
        table = torch.empty(8, 4096, dtype=torch.int32, device="cuda:0")
        pool = torch.empty(512, 2, dim, device="cuda:0")
        batch = FlatBatch(numbers, numbers[:R], numbers[:R], table, most_queries=1, longest=4096)
        outputs.append(flat_attention(torch.empty(R, 8, dim, device="cuda:0"), pool, pool, batch, scale=0.1))

    outputs: list[torch.Tensor] = []
    asked = [name for name, _ in traced(step) if not name.startswith(FREE)]
    assert asked == ["aten.new_zeros.default", "attention_kernel"]
    assert outputs[0].shape == (R, 8, dim)


def test_flashinfers_list_of_cached_slots_takes_one_kernel() -> None:
    def step() -> None:
        numbers = torch.empty(R + 2, dtype=torch.int32, device="cuda:0")
        table = torch.empty(8, 64, dtype=torch.int32, device="cuda:0")
        write_cached_slots(torch.empty(99, dtype=torch.int32, device="cuda:0"), table, numbers, numbers, numbers)

    assert [name for name, _ in traced(step) if not name.startswith(FREE)] == ["cached_slots_kernel"]


@pytest.mark.parametrize("fault", ["item", "nonzero", "cpu", "mask"])
def test_an_operation_that_waits_is_caught(fault: str) -> None:
    def step() -> None:
        x = torch.empty(4, device="cuda:0")
        {"item": x.sum().item, "nonzero": x.nonzero, "cpu": x.cpu, "mask": lambda: x[x > 0]}[fault]()

    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException, AssertionError)):
        traced(step)


def with_lengths(lens: list[int], bucket: int | None) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Operations that flatten and commit these lengths; bucket None: without padding."""
    rows = torch.arange(R)
    given = rows, rows[:, None].expand(R, GAMMA), torch.tensor(lens), rows, torch.zeros(8, 64).int(), rows
    with Recorder() as recorder:
        flat = flatten_bucket(*given, sum(lens) + R if bucket is None else bucket)
        commit(torch.ones(R).long(), torch.zeros(R, GAMMA + 1).long(), rows, flat[4], flat[5], flat[2])
    return recorder.operations


def test_lengths_of_one_bucket_take_the_same_operations() -> None:
    assert with_lengths([0, 4, 1, 3, 0], TIER) == with_lengths([1, 1, 2, 0, 1], TIER)
    assert with_lengths([0, 4, 1, 3, 0], None) != with_lengths([1, 1, 2, 0, 1], None)
