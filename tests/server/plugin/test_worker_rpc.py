"""Commands to the engine from callers that may be cancelled."""

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

from outrider.server.plugin import worker_rpc


class Manager:
    """An engine that answers each message after a while, or never. done: the executed commands."""

    def __init__(self, *, answers: bool = True) -> None:
        self.done: list[str] = []
        self.answers = answers
        self.communicator = FanOutCommunicator(self.send, fan_out=1)

    def send(self, request: SetInternalStateReq) -> None:
        if self.answers:
            asyncio.get_running_loop().call_later(0.05, self.answer, request)

    def answer(self, request: SetInternalStateReq) -> None:
        self.done += request.server_args
        self.communicator.handle_recv(SetInternalStateReqOutput(updated=True))

    async def set_internal_state(self, request: SetInternalStateReq) -> Any:
        return await self.communicator(request)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.07], ids=["before it is sent", "before the answer", "inside"])
def test_a_measurement_that_is_cancelled_leaves_the_engine_serving(seconds: float) -> None:
    """The next command gets its own answer."""
    manager = Manager()

    async def measure() -> None:
        async with worker_rpc.measuring(manager):
            await asyncio.sleep(1)

    async def run() -> list[str]:
        work = asyncio.ensure_future(measure())
        await asyncio.sleep(seconds)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        assert work.cancelled()
        left = list(manager.done)
        await worker_rpc.command(manager, worker_rpc.FORGET)
        assert manager.done == [*left, worker_rpc.FORGET]
        return left

    assert asyncio.run(run()) == [worker_rpc.MEASURE, worker_rpc.SERVE]


def test_a_stalled_engine_does_not_delay_callers_that_give_up() -> None:
    async def measure(manager: Manager) -> None:
        async with worker_rpc.measuring(manager):
            await asyncio.sleep(1)

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await worker_rpc.command(Manager(answers=False), worker_rpc.SAVE)
        work = asyncio.ensure_future(measure(Manager(answers=False)))
        await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.sleep(0.01)

    ending = threading.Thread(target=asyncio.run, args=[run()], daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
