"""The engines that `outrider bench peers` compares, each in a process of its own.

The process reads jobs from its standard input, one line of JSON each, and writes seconds and tokens of each to its
standard output. All engines get the same token ids and make the same number of tokens: temperature 0, the end token
does not end an answer, no prefix cache. None is asked over HTTP, which would cost one more than another. Those of
`isolated` run in environments of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import UserError
from ..plugin.options import RequestOptions
from ..processes import session
from ..settings.resolve import resolve
from ..settings.settings import Settings
from . import environments, harness, isolated

if TYPE_CHECKING:
    from ..processes.engine import Engine

XLLAMACPP = "xllamacpp==2026.10.11549"


@dataclass(frozen=True, slots=True)
class Setup:
    """How a process starts its engine.

    settings: Outrider's, of which the other engines use model, type and limits.
    gguf: the file of llama.cpp and OpenVINO, "" where neither is compared. requests: in flight, at most.
    context: prompt and answer together, at most. threads: processors to use.
    """

    engine: str
    settings: Settings
    gguf: str
    requests: int
    context: int
    threads: int


@dataclass(frozen=True, slots=True)
class Job:
    """prompts: token ids. new_tokens: of each answer. concurrency: requests in flight. speculate: only for Outrider."""

    prompts: list[list[int]]
    new_tokens: int
    concurrency: int
    speculate: bool = True


Generate = Callable[[list[int], Job], Awaitable[int]]
"""Answers one prompt of a job; returns how many tokens the answer has."""


async def answer_all(job: Job, generate: Generate) -> dict[str, float]:
    """Seconds and tokens of all answers of a job, in a closed loop with `concurrency` requests in flight."""
    counts, seconds = await harness.closed_loop(lambda prompt: generate(prompt, job), job.prompts, job.concurrency)
    return {"seconds": seconds, "tokens": sum(counts)}


async def _serve_jobs(work: Callable[[Job], Awaitable[dict[str, float]]], replies: TextIO) -> None:
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await work(Job(**json.loads(line)))), file=replies, flush=True)


def _outrider(setup: Setup, replies: TextIO) -> None:
    from ..processes import client
    from ..tune.first import measure_first

    resolved = resolve(setup.settings)

    async def measurement(engine: Engine) -> None:
        await measure_first(engine, resolved, harness.say)

        async def generate(prompt: list[int], job: Job) -> int:
            answer = await client.generate(
                engine.tokenizer_manager,
                prompt,
                **_sampling(job),
                custom_params=RequestOptions(enabled=job.speculate).to_custom_params(),
            )
            return len(answer["output_ids"])

        await _serve_jobs(lambda job: answer_all(job, generate), replies)

    session.run(resolved, measurement)


def _sglang(setup: Setup, replies: TextIO) -> None:
    """SGLang's own attention and layers in plain torch. On a CPU it does not start without a platform; that is ours."""
    from ..plugin.hooks.register import PLATFORM_ONLY

    os.environ[PLATFORM_ONLY] = "1"
    os.environ["SGLANG_PLUGINS"] = "outrider"
    from ..model import target

    path = target.plain_folder(setup.settings.model)
    import sglang

    engine = sglang.Engine(
        model_path=path,
        device="cpu",
        dtype=setup.settings.dtype,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        max_running_requests=setup.settings.max_running_requests,
        max_total_tokens=setup.settings.max_total_tokens,
        log_level="error",
    )

    async def generate(prompt: list[int], job: Job) -> int:
        answer = await engine.async_generate(input_ids=prompt, sampling_params=_sampling(job))
        return len(answer["output_ids"])

    try:
        engine.loop.run_until_complete(_serve_jobs(lambda job: answer_all(job, generate), replies))
    finally:
        engine.shutdown()


def _sampling(job: Job) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": job.new_tokens, "ignore_eos": True}


def _transformers(setup: Setup, replies: TextIO) -> None:
    """Batches of `concurrency` prompts, padded on the left; the next begins when all answers of one are done."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..model import target

    torch.set_num_threads(setup.threads)
    path = target.plain_folder(setup.settings.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, setup.settings.dtype)).eval()

    def batch(prompts: Sequence[list[int]], new_tokens: int) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return int((out.shape[1] - longest) * len(prompts))

    async def work(job: Job) -> dict[str, float]:
        start, tokens = time.perf_counter(), 0
        for first in range(0, len(job.prompts), job.concurrency):
            tokens += batch(job.prompts[first : first + job.concurrency], job.new_tokens)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    asyncio.run(_serve_jobs(work, replies))


def _llama_cpp(setup: Setup, replies: TextIO) -> None:
    xllamacpp = import_xllamacpp()
    params = xllamacpp.CommonParams()
    params.model.path = setup.gguf
    params.n_parallel = setup.requests
    params.n_ctx = setup.requests * setup.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup.threads
    params.cache_prompt = False
    params.verbosity = -1
    server = xllamacpp.Server(params)
    pool = ThreadPoolExecutor(setup.requests)

    async def generate(prompt: list[int], job: Job) -> int:
        body = {"prompt": prompt, "n_predict": job.new_tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "cache_prompt": False}
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(pool, server.handle_completions, body)
        if "usage" not in answer:
            raise UserError(f"llama.cpp refuses a prompt: {str(answer)[:200]}")
        return int(answer["usage"]["completion_tokens"])

    asyncio.run(_serve_jobs(lambda job: answer_all(job, generate), replies))


def import_xllamacpp() -> Any:
    """llama.cpp's bindings; raises UserError with the way to install them."""
    try:
        import xllamacpp
    except ImportError:
        raise UserError(
            f"the llama.cpp arm needs a package: pip install --no-deps {XLLAMACPP} installs it; "
            "or leave llama.cpp out of --arms"
        ) from None
    return xllamacpp


ENGINES = {"outrider": _outrider, "sglang": _sglang, "transformers": _transformers, "llama.cpp": _llama_cpp}


def command(setup: Setup) -> tuple[list[str], dict[str, str]]:
    """What starts the engine's process, and its variables; the environment of an isolated engine is made if need be."""
    if setup.engine in isolated.ENGINES:
        from ..model import target

        known = {name: getattr(setup, name) for name in ("engine", "gguf", "requests", "context", "threads")}
        folder = target.plain_folder(setup.settings.model) if setup.engine == "vllm" else ""  # OpenVINO reads the GGUF
        known |= {"model": folder, "dtype": setup.settings.dtype}
        python = environments.prepare(setup.engine)
        return [str(python), isolated.__file__, json.dumps(known)], environments.surroundings()
    ours = [sys.executable, "-c", "from outrider.server.bench.baselines import main; main()"]
    # PYTHONSAFEPATH for its own processes too: packages, not the folder's files.
    return [*ours, json.dumps(asdict(setup))], os.environ | {"PYTHONSAFEPATH": "1"}


def main() -> int:
    """What runs in the process of an engine that is not isolated; its argument is the setup."""
    # Engines write to standard output as they like: replies go to what it was, everything else to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    fields = json.loads(sys.argv[1])
    setup = Setup(**(fields | {"settings": Settings(**fields["settings"])}))
    try:
        ENGINES[setup.engine](setup, replies)
    except UserError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return 1
    return 0
