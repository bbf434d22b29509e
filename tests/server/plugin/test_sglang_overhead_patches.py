"""SGLang's decode step without the omitted parts does the same as SGLang's own."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import zmq
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from outrider.server.plugin.decode.base import HostResult
from outrider.server.plugin.hooks import sglang_overhead_patches
from outrider.server.plugin.hooks.platform import OutriderCpuPlatform


def make_batch() -> ScheduleBatch:
    ones = torch.ones(2)
    info = SamplingBatchInfo(ones, ones, ones, ones, True, True, False, False, False, vocab_size=8, device="cpu")
    info.penalizer_orchestrator = SimpleNamespace(is_required=False)
    algorithm = SimpleNamespace(is_none=lambda: False)
    return ScheduleBatch(
        reqs=[], sampling_info=info, seq_lens=ones, forward_mode=ForwardMode.DECODE, spec_algorithm=algorithm
    )


def test_changes_by_a_forward_are_undone():
    batch = make_batch()
    before = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}

    def forward():
        inside = batch.sampling_info
        assert inside is not before["sampling_info"]
        assert inside.penalizer_orchestrator is None
        assert inside.temperatures is before["sampling_info"].temperatures
        batch.forward_mode, batch.input_ids, batch.seq_lens = ForwardMode.TARGET_VERIFY, torch.ones(3), None
        raise RuntimeError("a step that fails")

    isolation = sglang_overhead_patches._forward_isolation(pytest.fail, None, batch, overlap=False)
    with pytest.raises(RuntimeError, match="fails"), isolation:
        forward()
    after = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    assert all(after[name] is value for name, value in before.items())
    assert batch.sampling_info.penalizer_orchestrator is not None


@pytest.mark.parametrize(("algorithm", "overlap"), [(True, False), (False, True)])
def test_other_workers_keep_sglangs_isolation(algorithm, overlap):
    batch = make_batch()
    batch.spec_algorithm = SimpleNamespace(is_none=lambda: algorithm)
    given = sglang_overhead_patches._forward_isolation(
        lambda *_, overlap: ("sglang", overlap), None, batch, overlap=overlap
    )
    assert given == ("sglang", overlap)


@pytest.mark.parametrize(("reasons", "sent"), [([None, None], False), ([None, {"type": "stop"}], True)])
def test_times_of_stages_are_sent_when_a_request_ends(reasons, sent):
    payload = SimpleNamespace(finished_reasons=reasons, time_stats=["stats", "stats"])
    assert (sglang_overhead_patches._without_time_stats(payload).time_stats is not None) == sent
    assert sglang_overhead_patches._without_time_stats(None) is None


def test_a_result_on_the_host_is_not_copied():
    tokens, recorded = torch.ones(3), []
    result = HostResult(next_token_ids=tokens, copy_done=SimpleNamespace(record=lambda: recorded.append(True)))
    result.copy_to_cpu(return_logprob=True)
    assert result.next_token_ids is tokens
    assert recorded


def test_requests_are_received_when_there_are_some():
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.bind("inproc://requests")
        push.connect("inproc://requests")
        receive = lambda flags: sglang_overhead_patches._receive_what_is_there(zmq.Socket.recv, pull, flags)  # noqa: E731
        for _ in range(2):
            for _ in range(2):
                with pytest.raises(zmq.ZMQError) as caught:
                    receive(zmq.NOBLOCK)
                assert caught.value.errno == zmq.EAGAIN
            push.send(b"one")
            push.send(b"two")
            assert pull.poll(1000)
            assert receive(zmq.NOBLOCK) == b"one"
            assert receive(0) == b"two"


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_equal_sglangs(page_size):
    def make(kind):
        return kind(64, page_size, torch.bfloat16, "cpu", None, need_sort=False)

    ours, theirs = make(OutriderCpuPlatform().get_paged_allocator_cls()), make(PagedTokenToKVPoolAllocator)
    given = []
    for size in (8, 20, 4, 12, 16, 8, 4):
        slots, expected = ours.alloc(size), theirs.alloc(size)
        assert (slots is None) == (expected is None)
        if slots is None:
            continue
        assert torch.equal(slots, expected)
        given.append(slots)
        if len(given) % 2 == 0:
            first = given.pop(0)
            ours.free(first)
            theirs.free(first)
        assert ours.available_size() == theirs.available_size()
    assert ours.alloc(65) is None
