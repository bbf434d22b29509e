"""Engines of `outrider bench peers` that need packages of their own: run by the Python of their environment.

    python isolated.py '{"engine": "vllm", "model": FOLDER, "gguf": FILE, "dtype": …, "requests": …, "context": …,
                         "threads": …}'

It imports nothing of ours, and speaks as `baselines` does: a line of JSON when it is ready, then one for each line
with a job. Both engines get what Outrider gets here: token ids, in process, without HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from itertools import count
from typing import Any, TextIO

Reply = dict[str, float]
CONTEXT, REQUESTS = 8192, 128
"""vLLM's limits, where no more is asked for: tokens of a request, and the default of its server on a CPU."""


def vllm(setup: dict[str, Any], replies: TextIO) -> None:
    """vLLM's asynchronous engine: as ours, the front end here and the engine in another process."""
    cores = sorted(os.sched_getaffinity(0))[: setup["threads"]]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    names = count()
    with open(os.path.join(setup["model"], "config.json"), encoding="utf-8") as file:
        longest: int = json.load(file)["max_position_embeddings"]

    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=setup["model"],
                dtype=setup["dtype"],
                enable_prefix_caching=False,
                # What vLLM keeps of a compilation goes by its limits: so they are the same whatever is asked for.
                max_model_len=min(longest, max(CONTEXT, setup["context"])),
                max_num_seqs=max(REQUESTS, setup["requests"]),
            )
        )

        async def generate(prompt: list[int], sampling: Any) -> int:
            tokens = 0
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, str(next(names))):
                tokens = len(output.outputs[0].token_ids)
            return tokens

        async def work(job: dict[str, Any]) -> Reply:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=job["new_tokens"],
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            slots = asyncio.Semaphore(job["concurrency"])

            async def one(prompt: list[int]) -> int:
                async with slots:
                    return await generate(prompt, sampling)

            start = time.perf_counter()
            tokens = sum(await asyncio.gather(*map(one, job["prompts"])))
            return {"seconds": time.perf_counter() - start, "tokens": tokens}

        reply(replies, {"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            reply(replies, await work(json.loads(line)))
        engine.shutdown()

    asyncio.run(serve())


def openvino(setup: dict[str, Any], replies: TextIO) -> None:
    """OpenVINO GenAI's continuous batching on the GGUF file; its pipeline has no server."""
    import numpy
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = setup["requests"]
    scheduler.max_num_batched_tokens = 2**31 - 1  # what its LLMPipeline takes: a prompt in one piece
    threads = {"INFERENCE_NUM_THREADS": setup["threads"]}
    pipeline = ContinuousBatchingPipeline(setup["gguf"], scheduler, "CPU", threads)
    names = count()

    def work(job: dict[str, Any]) -> Reply:
        config = GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job["new_tokens"]
        config.ignore_eos, config.do_sample = True, False
        start = time.perf_counter()
        waiting = [Tensor(numpy.array([prompt], numpy.int64)) for prompt in reversed(job["prompts"])]
        running: list[Any] = []
        tokens = 0
        while waiting or running:
            while waiting and len(running) < job["concurrency"]:
                running.append(pipeline.add_request(next(names), waiting.pop(), config))
            pipeline.step()
            for handle in [h for h in running if h.get_status().name != "RUNNING"]:
                running.remove(handle)
                tokens += sum(len(output.generated_ids) for output in handle.read_all())
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    reply(replies, {"ready": True})
    for line in sys.stdin:
        reply(replies, work(json.loads(line)))


def reply(replies: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=replies, flush=True)


ENGINES = {"vllm": vllm, "openvino": openvino}

if __name__ == "__main__":
    # Engines write to standard output as they like: replies go to what it was, everything else to standard error.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])
    ENGINES[arguments["engine"]](arguments, channel)
