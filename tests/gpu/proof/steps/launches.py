"""Step 1: host time of an operation, a launch, an upload and a graph, in torch and Triton without Outrider."""

from functools import partial

import torch
import triton
import triton.language as tl
from timing import DEVICE, captured, say, timed, wait, write


@triton.jit
def _add(x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < count) + 1, mask=at < count)


def main() -> None:
    x = torch.zeros(128, device=DEVICE)
    pinned = torch.zeros(64, dtype=torch.int64)
    there = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    results = {}

    def add_many(count: int) -> None:
        for _ in range(count):
            x.add_(1)

    results["operation of torch"] = timed(partial(add_many, 1), 2000)
    if DEVICE == "cuda":
        pinned = pinned.pin_memory()
        results["Triton launch"] = timed(lambda: _add[(1,)](x, 128, BLOCK=128), 2000)
        event = torch.cuda.Event()

        def come_back() -> None:
            pinned.copy_(there, non_blocking=True)
            event.record()
            event.synchronize()

        results["readback, waited for"] = timed(come_back, 500)
    results["pinned upload"] = timed(lambda: there.copy_(pinned, non_blocking=True), 2000)
    results["new pinned upload"] = timed(_upload, 500)
    for count in (1, 10, 100):
        replay = captured(partial(add_many, count))
        results[f"graph of {count}"] = timed(replay, 500)
        wait()
    for name, times in results.items():
        say(f"{name:24} host {times['host']:8.2f} µs, with the device {times['whole']:8.2f} µs")
    write("launches", results, unit="microseconds")


def _upload() -> torch.Tensor:
    made = torch.arange(64)
    return (made.pin_memory() if DEVICE == "cuda" else made).to(DEVICE, non_blocking=True)


if __name__ == "__main__":
    main()
