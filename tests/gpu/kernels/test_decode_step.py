"""A decode step never waits, and decides the same as a CUDA graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_device import INTERPRETED, captured, differing, nobody_waits, triton
from random_decoder import Decoder, decoder

from outrider.scheduler.buckets import TokenBuckets


@pytest.fixture(scope="module")
def made() -> tuple[Decoder, int]:
    return decoder()


@pytest.mark.skipif(INTERPRETED, reason="the host waits for itself")
@torch.inference_mode()
def test_a_step_never_waits(made: tuple[Decoder, int]) -> None:
    decoder, requests = made
    bucket = TokenBuckets(requests, decoder.gamma + 1).round_up(3 * requests)
    given, other = (decoder.given(requests, bucket - requests, seed) for seed in (0, 1))
    decoder.step(given, bucket)  # compiles
    torch.cuda.synchronize()
    with nobody_waits():
        decoder.step(other, bucket)
    torch.cuda.synchronize()


@pytest.mark.skipif(INTERPRETED, reason="the host waits for itself")
@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x.cpu()])
def test_a_planted_wait_is_noticed(wait: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), nobody_waits():
        wait(x)


@torch.inference_mode()
def test_a_graph_of_every_bucket_replays_other_texts(made: tuple[Decoder, int]) -> None:
    decoder, most = made
    sizes = TokenBuckets(most, decoder.gamma + 1).sizes
    pool = None if INTERPRETED else torch.cuda.graph_pool_handle()
    with triton():
        for bucket in sizes[::5] if INTERPRETED else sizes:
            requests = min(most, max(1, bucket // 3))
            budget = min(bucket - requests, requests * decoder.gamma)
            given = decoder.given(requests, budget, bucket)
            replay = captured(partial(decoder.step, given, bucket), pool)
            for seed in range(1 if INTERPRETED else 3):
                texts = decoder.given(requests, budget // (seed + 1), 1000 * seed + bucket)
                given.take(texts)
                replayed = [x.clone() for x in replay()]
                assert differing(replayed, decoder.step(texts, bucket)) == 0, bucket
