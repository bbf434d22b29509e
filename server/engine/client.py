"""An engine without an HTTP server around it, for commands that measure."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.drafters.training.prompts import BadLine, read_samples
from outrider.server.engine.settings import DEVICES, DRAFTERS, DTYPES, QUANTIZATIONS, Settings
from outrider.server.engine.target import Model
from outrider.server.errors import UserError

if TYPE_CHECKING:
    from outrider.server.engine.engine import Engine

T = TypeVar("T")


def add_engine_arguments(parser: argparse.ArgumentParser, *, drafter: bool) -> None:
    """The flags of `outrider serve` that every measurement shares."""
    defaults = Settings()
    parser.add_argument("--model", metavar="PATH_OR_HUB_NAME", help="(default: the embedded model)")
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=defaults.quantization)
    parser.add_argument("--device", choices=DEVICES, default=defaults.device)
    if drafter:
        drafters = [name for name in DRAFTERS if name != "off"]
        parser.add_argument("--drafter", choices=drafters, default=defaults.drafter, help="(default: %(default)s)")
        parser.add_argument("--drafter-path", metavar="FOLDER", help="checkpoint (default: the shipped one)")
        parser.add_argument(
            "--lookup",
            action=argparse.BooleanOptionalAction,
            default=defaults.lookup,
            help="prompt lookup beside a dspark or dflash drafter (default: yes)",
        )
        parser.add_argument("--gamma", type=int, default=defaults.gamma, metavar="N", help="(default: %(default)s)")


def settings_of(args: argparse.Namespace, **others: Any) -> Settings:
    """Settings from the flags of `add_engine_arguments`; `others` are fixed by the measurement."""
    names = ("model", "dtype", "quantization", "device", "drafter", "drafter_path", "lookup", "gamma")
    return Settings(**{name: getattr(args, name) for name in names if hasattr(args, name)} | others)


def measure(
    settings: Settings, measurement: Callable[[Engine, Model], Awaitable[T]], *, find_profile: bool = True
) -> T:
    """Start the engine, run `measurement(engine, model)` on its event loop, stop the engine; the measurement's result.

    find_profile: plan by the profile that fits, if there is one; else settings.profile is a folder, whatever is in it.

    Raises UserError with one line where the engine cannot start.
    """
    from tqdm import tqdm

    from outrider.server.engine import checkpoints, memory, profile_lookup, target
    from outrider.server.engine import engine as engines

    # By default tqdm's lock is one between processes, which would be missed when the engine's processes are ended.
    tqdm.set_lock(threading.RLock())

    model = target.find(settings.model)
    settings = checkpoints.with_drafter_path(settings, model)
    if find_profile:
        settings, _ = profile_lookup.with_profile(settings, model)
    engine = engines.start(settings, model, memory.plan(settings, model))

    async def run() -> T:
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        engine.tokenizer_manager.auto_create_handle_loop()
        engine.tokenizer_manager.server_status = ServerStatus.Up
        return await measurement(engine, model)

    try:
        return asyncio.run(run())
    finally:
        engine.stop(engines.EXIT_SECONDS)


async def generate(manager: Any, prompt: str | list[int], **sampling: Any) -> dict[str, Any]:
    """One complete answer of SGLang's tokenizer manager: `text`, `output_ids` and `meta_info`."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    key = "text" if isinstance(prompt, str) else "input_ids"
    answer: dict[str, Any] = {}
    async for piece in manager.generate_request(GenerateReqInput(**{key: prompt}, sampling_params=sampling)):
        answer = piece
    return answer


def chat_ids(manager: Any, question: str) -> list[int]:
    """Token ids of one user turn in the model's chat format, ready for the answer."""
    turn = [{"role": "user", "content": question}]
    ids: list[int] = manager.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    return ids


def read_questions(path: Path) -> list[str]:
    """First user turns of a prompts file; raises UserError with file, line and reason."""
    if not path.is_file():
        raise UserError(f"--prompts {path} does not exist")
    try:
        questions = [sample.turns[0] for sample in read_samples(path)]
    except BadLine as error:
        raise UserError(str(error)) from None
    if not questions:
        raise UserError(f"--prompts {path} holds no prompts")
    return questions
