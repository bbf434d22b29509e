"""Changes the test servers from inside.

Python imports this file in every process with its folder on the path. OUTRIDER_TEST_CHANGES names the changes; a
process forked by `server_forks.py` applies its own by `make`.

overlap: on a CPU too, scheduling overlaps with the forward as on a GPU: SGLang's own loop, its future map, and steps
that begin before the last result. The change requests overlap and adds `record_stream`. The host does not hear text
lengths during a step. See `--overlap` in tests/conftest.py.

one-call: the server ends if layers do not run in one call of our kernels or need SGLang's batch objects, where it would
fall back silently.

swapped-adapters: a planted fault. Two LoRA adapters in one verification are swapped.

hurries: learners are polled, and `--lookup-store` is written, ten times as often.

profile-costs: step costs are the profile's, so that the planner decides alike on every machine.

any-chunks: prompts are read in chunks of random lengths, with decode steps and other prompts between them.

failures: optional parts fail by the file in OUTRIDER_TEST_FAILURES; see `Failing`.
"""

import os
import random
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def ask_for_overlap(module: ModuleType) -> None:
    """Change `server/processes/sglang_args.py` to request overlap."""
    parse = module.parse_flags

    def overlapping(flags: Sequence[str]) -> dict[str, Any]:
        return parse(flags) | {"disable_overlap_schedule": False}

    module.parse_flags = overlapping  # type: ignore[attr-defined]


def stand_in_for_streams(module: ModuleType) -> None:
    """Change SGLang's `overlap_utils.py`: tensors record no streams."""
    module.torch.Tensor.record_stream = lambda tensor, stream: None


def say_so(module: ModuleType) -> None:
    """Change SGLang's `scheduler.py`: its overlapped loop logs that it runs."""
    loop = module.Scheduler.event_loop_overlap

    def overlapping(scheduler: Any) -> None:
        print("this scheduler's steps overlap", file=sys.stderr, flush=True)
        loop(scheduler)

    module.Scheduler.event_loop_overlap = overlapping


def keep_lengths(module: ModuleType) -> None:
    """Change `server/plugin/decode/worker.py`: the host learns lengths from results only, as on a GPU."""
    read = module.rows_and_lengths

    def late(batch: Any, width: int) -> Any:
        at = batch.req_pool_indices_cpu
        return read(SimpleNamespace(reqs=batch.reqs, req_pool_indices_cpu=at, seq_lens_cpu=None), width)

    module.rows_and_lengths = late  # type: ignore[attr-defined]


DECIDING_SECONDS = 0.0005


def keep_the_profiles_costs(module: ModuleType) -> None:
    """Change `scheduler/cost/model.py` to learn no step times."""

    def learn_nothing(cost: Any, *step: Any, **times: Any) -> None:
        cost.deciding = lambda requests: DECIDING_SECONDS

    module.StepCost.observe = module.StepCost.observe_deciding = learn_nothing  # type: ignore[attr-defined]


def hurry(name: str) -> Callable[[ModuleType], None]:
    """A change of a module that divides its constant `name`, in seconds, by ten."""

    def change(module: ModuleType) -> None:
        setattr(module, name, getattr(module, name) / 10)

    return change


def demand(function: str) -> Callable[[ModuleType], None]:
    """A change of a module of `server/plugin/cpu/`: the server ends where `function` finds no fast path."""

    def change(module: ModuleType) -> None:
        find = getattr(module, function)

        def found(*args: Any) -> Any:
            path = find(*args)
            if path is None:
                raise RuntimeError(f"{function} leaves this model to SGLang's own code, which is slower")
            return path

        setattr(module, function, found)

    return change


def swap_adapters(module: ModuleType) -> None:
    """Change `server/plugin/cpu/direct_forward.py` to swap adapters."""
    verify = module.DirectForward.verify

    def swapped(direct: Any, flat: Any, seq_lens: Any, rows: Any, reqs: Sequence[Any]) -> Any:
        ids = list(dict.fromkeys(req.lora_id for req in reqs if req.lora_id))
        other = dict(zip(ids, reversed(ids), strict=True))
        changed = [SimpleNamespace(lora_id=other.get(req.lora_id), multimodal_inputs=None) for req in reqs]
        return verify(direct, flat, seq_lens, rows, changed)

    module.DirectForward.verify = swapped


def cut_anywhere(module: ModuleType) -> None:
    """Change `server/plugin/hooks/prompt_chunks.py`: random chunk lengths within the cache's room."""
    decide, numbers = module.PromptReader._decide, random.Random(5)

    def at_random(reader: Any, *args: Any) -> tuple[int, int]:
        tokens, limit = decide(reader, *args)
        if tokens == module.AS_CONFIGURED:
            return tokens, limit
        if reader.answering and numbers.random() < 0.4:
            return module.DECODE_FIRST, 0
        cut = numbers.randint(1, limit) if limit else int(2 ** numbers.triangular(0, 10, 0))  # 42 tokens on average
        if cut < (limit or tokens):
            print("a chunk is cut at random", flush=True)
        return (tokens - limit + cut, cut) if limit else (cut, 0)

    module.PromptReader._decide = at_random


class Failing:
    """Raises in calls through `Boundary.run`.

    The file has three words: a number; the part and name of a call; and the place: before, within (halfway through its
    own calls) or after. A new number switches every part on again.
    """

    def __init__(self) -> None:
        self.words = ["", "", ""]
        self.made: int | None = None  # number of calls that it makes, once counted
        self.renewed: set[int] = set()

    def look(self) -> None:
        words = Path(os.environ["OUTRIDER_TEST_FAILURES"]).read_text().split()
        if words and words != self.words:
            self.words, self.made = words, None
            self.renewed.clear()

    def is_new(self, each: Any) -> bool:
        """True the first time that this object is seen since the file changed."""
        new = id(each) not in self.renewed
        self.renewed.add(id(each))
        return new

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with the failure planted."""

        def fails(*args: Any, **options: Any) -> Any:
            place = self.words[2]
            if place == "within":
                return self.run_half(call, *args, **options)
            if place == "after":
                call(*args, **options)
            raise RuntimeError(f"planted {place} {call.__name__}")

        return fails

    def run_half(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Count its calls the first time; later fail after half of them."""
        made = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal made
            made += event == "call"
            if self.made is not None and made > self.made // 2:
                raise RuntimeError(f"planted within {call.__name__}, in {frame.f_code.co_name}")

        sys.setprofile(count)
        try:
            result = call(*args, **options)
        finally:
            sys.setprofile(None)
        if self.made is not None:
            raise RuntimeError(f"planted within {call.__name__}, at its end")
        self.made = made
        return result


FAILING = Failing()


def fail_on_request(module: ModuleType) -> None:
    """Change `server/plugin/decode/boundary.py`: calls fail on request."""
    run = module.Boundary.run

    def planted(boundary: Any, part: str, otherwise: Any, call: Any, /, *args: Any, **options: Any) -> Any:
        FAILING.look()
        if FAILING.is_new(boundary):
            boundary.off.clear()
            boundary.counts = dict.fromkeys(boundary.counts, 0)
        name = getattr(call, "__name__", "").strip("<>")
        if FAILING.words[1] == f"{part}:{name}":
            call = FAILING.failing(call)
        return run(boundary, part, otherwise, call, *args, **options)

    module.Boundary.run = planted


def draft_again(module: ModuleType) -> None:
    """Change `server/plugin/decode/requests.py`: stopped drafts continue with the next number."""
    admit = module.RequestTable.admit

    def admitted(table: Any, *args: Any) -> None:
        FAILING.look()
        if FAILING.is_new(table):
            table.longest = table.gamma
        admit(table, *args)

    module.RequestTable.admit = admitted


CHANGES = {
    "failures": {
        "outrider.server.plugin.decode.boundary": fail_on_request,
        "outrider.server.plugin.decode.requests": draft_again,
    },
    "overlap": {
        "sglang.srt.managers.scheduler": say_so,
        "outrider.server.processes.sglang_args": ask_for_overlap,
        "sglang.srt.managers.overlap_utils": stand_in_for_streams,
        "outrider.server.plugin.decode.worker": keep_lengths,
    },
    "any-chunks": {"outrider.server.plugin.hooks.prompt_chunks": cut_anywhere},
    "one-call": {
        "outrider.server.plugin.cpu.fused_model": demand("_prepare"),
        "outrider.server.plugin.cpu.direct_forward": demand("direct_forward"),
    },
    "swapped-adapters": {"outrider.server.plugin.cpu.direct_forward": swap_adapters},
    "hurries": {
        "outrider.server.http.learning": hurry("LOOK_SECONDS"),
        "outrider.server.plugin.decode.optional.texts": hurry("SAVE_SECONDS"),
    },
    "profile-costs": {"outrider.scheduler.cost.model": keep_the_profiles_costs},
}
CHANGED: dict[str, Callable[[ModuleType], None]] = {}


def make(names: str) -> None:
    """Apply these changes: at once to imported modules, to the rest on import."""
    for name in names.split():
        for module, change in CHANGES[name].items():
            if module not in CHANGED and module in sys.modules:
                change(sys.modules[module])
            CHANGED[module] = change


class Finder(MetaPathFinder):
    """Finds modules as Python does, and applies the changes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = CHANGED.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
make(os.environ.get("OUTRIDER_TEST_CHANGES", ""))
