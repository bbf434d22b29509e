"""Send requests to an engine from this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine


async def generate(
    manager: Any, prompt: str | list[int], *, stream: bool = False, logprobs_from: int | None = None, **sampling: Any
) -> dict[str, Any]:
    """Return one complete answer of SGLang's tokenizer manager: `text`, `output_ids` and `meta_info`.

    Asks the first of several engines; `worker_rpc.read` returns its records. stream: receive the tokens of
    every step, as a streaming client does. logprobs_from: return the prompt's logprobs from this token on. Cancelling
    the coroutine aborts the request.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import GenerateReqInput

    apart = manager.server_args.disaggregation_mode != "null"
    key = "text" if isinstance(prompt, str) else "input_ids"
    request = GenerateReqInput(
        **{key: prompt},
        sampling_params=sampling,
        stream=stream,
        return_logprob=logprobs_from is not None,
        logprob_start_len=logprobs_from,
        routed_dp_rank=0,
        log_metrics=False,  # no client's request
        bootstrap_host=FAKE_BOOTSTRAP_HOST if apart else None,  # no other server takes part
        bootstrap_room=0 if apart else None,
    )
    answer: dict[str, Any] = {}
    async for piece in manager.generate_request(request):  # cancelling it makes SGLang abort the request
        answer = piece
    return answer


async def run_beside(
    manager: Any, prompts: Sequence[list[int]], new_tokens: int, options: Sequence[dict[str, Any] | None]
) -> None:
    """Answer prompts concurrently, with exactly `new_tokens` each. options: custom parameters of each.

    Answers are streamed, as to most clients, because bringing tokens to clients takes time on the same cores.
    """
    await asyncio.gather(
        *(
            generate(
                manager,
                prompt,
                temperature=0.0,
                max_new_tokens=new_tokens,
                ignore_eos=True,
                custom_params=option,
                stream=True,
            )
            for prompt, option in zip(prompts, options, strict=True)
        )
    )


def chat_ids(manager: Any, question: str) -> list[int]:
    """Return the token ids of one user turn in the model's chat format, ready for the answer."""
    turn = [{"role": "user", "content": question}]
    ids: list[int] = manager.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return ids


async def answer(engine: Engine, question: str, new_tokens: int, **sampling: Any) -> None:
    """Have one user turn answered with at most `new_tokens`, or as many as the context leaves; skip it if none."""
    ids = chat_ids(engine.tokenizer_manager, question)
    room = engine.context_length - len(ids) - 1
    if room > 0:
        await generate(engine.tokenizer_manager, ids, max_new_tokens=min(new_tokens, room), **sampling)
