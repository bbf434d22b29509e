"""Sends an engine requests that it cannot serve, past the checks of HTTP, while others stream: poison.py MODEL DRAFTER.

Prints as JSON the outcome of each, whether the other answers are unchanged, and the engine's seconds to end.
"""

import asyncio
import json
import sys
import time
from typing import Any

from outrider.server.plugin.options import KEY
from outrider.server.processes import client, session
from outrider.server.processes.engine import Engine
from outrider.server.settings.resolve import resolve
from outrider.server.settings.settings import Settings

POISONS: dict[str, dict[str, Any]] = {
    "top_k": {"sampling": {"top_k": 2**31, "temperature": 1.0}},
    "seed": {"sampling": {"sampling_seed": 2**63, "temperature": 1.0}},
    "bias key": {"sampling": {"logit_bias": {"49152": 1.0}}},
    "bias": {"sampling": {"logit_bias": {"5": 1e39}}},
    "stop token": {"sampling": {"stop_token_ids": {10**6}, "min_new_tokens": 2}},
    "stream interval": {"sampling": {"stream_interval": 0}},
    "option": {"sampling": {"custom_params": {KEY: {"unknown": 1}}}},
    "draft limit": {"sampling": {"custom_params": {KEY: {"gamma": "many"}}}},
    "level": {"sampling": {"custom_params": {KEY: {"min_tokens_per_second": "fast"}}}},
    "prompt": {"input_ids": [1, 10**6]},
    "top logprobs": {"return_logprob": True, "top_logprobs_num": 10**6},
    "logprob tokens": {"return_logprob": True, "token_ids_logprob": [10**6]},
}


async def poison(manager: Any, fields: dict[str, Any]) -> str:
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling = {"max_new_tokens": 8, **fields.get("sampling", {})}
    rest = {name: value for name, value in fields.items() if name != "sampling"}
    request = GenerateReqInput(**{"input_ids": [1, 2, 3], **rest}, sampling_params=sampling, stream=True)
    answer: dict[str, Any] = {}
    try:
        async for piece in manager.generate_request(request):
            answer = piece
    except Exception as error:
        return repr(error)
    reason = answer["meta_info"]["finish_reason"]
    return f"{int(reason.get('status_code') or 0)} {reason.get('message')}"


async def work(engine: Engine) -> dict[str, Any]:
    from sglang.srt.sampling.sampling_params import SamplingParams

    SamplingParams.verify = lambda *_: None  # type: ignore[method-assign]  # past the check
    manager = engine.tokenizer_manager
    plain = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True, "stream": True}

    async def others() -> list[list[int]]:
        answers = (client.generate(manager, [100 + k, 200, 300, 400], **plain) for k in range(2))
        return [answer["output_ids"] for answer in await asyncio.gather(*answers)]

    before = await others()
    running = asyncio.ensure_future(others())
    await asyncio.sleep(0.1)
    ends = {name: await asyncio.wait_for(poison(manager, fields), 30) for name, fields in POISONS.items()}
    meanwhile = not running.done()
    report = {"ends": ends, "meanwhile": meanwhile, "same": await running == before, "after": await others() == before}
    return report | {"worked": time.monotonic()}


def main(model: str, drafter: str) -> None:
    settings = Settings(
        model=model, drafter="dspark", drafter_path=drafter, threads=1, max_total_tokens=4096, tune=False,
        planner="verify-all",
    )  # fmt: skip
    report = session.run(resolve(settings), work)
    print(json.dumps(report | {"ending": time.monotonic() - report["worked"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
