"""Changes servers of tests from inside. Python imports this file in every process where its folder is on the path;
OUTRIDER_TEST_CHANGES names the changes; a process forked by `server_forks.py` makes its own by `make`.

overlap: scheduling overlaps with the forward on a CPU, as SGLang has it on a GPU: with its own loop, its future map,
and steps that begin before the last one's result is there. A CPU's streams and events do nothing, so what is missing is
that SGLang is asked to, and `record_stream`. The host is not told how long texts are while a step is under way. See
`--overlap` in tests/conftest.py.

one-call: a model whose layers do not run in one call of our kernels, or not without SGLang's batch objects, ends the
server. It says nothing of its own when SGLang's code stays.

swapped-adapters: a planted fault. Where requests with two LoRA adapters are verified together, each gets the other's.

hurries: a server that learns looks for new drafters ten times as often, and one with `--lookup-store` writes it ten
times as often.

profile-costs: steps cost what the profile says, however long they take here, so that the planner decides alike on every
machine.

any-chunks: prompts are read in chunks of random lengths with decode steps and other prompts between them.

failures: optional parts of speculation fail on request, in the file that OUTRIDER_TEST_FAILURES names; see `Failing`.
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
    """Change `server/processes/sglang_args.py`: overlap is asked for, as if by a flag behind `--`."""
    parse = module.parse_flags

    def overlapping(flags: Sequence[str]) -> dict[str, Any]:
        return parse(flags) | {"disable_overlap_schedule": False}

    module.parse_flags = overlapping  # type: ignore[attr-defined]


def stand_in_for_streams(module: ModuleType) -> None:
    """Change SGLang's `overlap_utils.py`: tensors record no streams."""
    module.torch.Tensor.record_stream = lambda tensor, stream: None


def say_so(module: ModuleType) -> None:
    """Change SGLang's `scheduler.py`: its overlapped loop says that it runs."""
    loop = module.Scheduler.event_loop_overlap

    def overlapping(scheduler: Any) -> None:
        print("this scheduler's steps overlap", file=sys.stderr, flush=True)
        loop(scheduler)

    module.Scheduler.event_loop_overlap = overlapping


def keep_lengths(module: ModuleType) -> None:
    """Change `server/plugin/decode/worker.py`: the host hears of lengths with results alone, as on a GPU."""
    read = module.rows_and_lengths

    def late(batch: Any, width: int) -> Any:
        at = batch.req_pool_indices_cpu
        return read(SimpleNamespace(reqs=batch.reqs, req_pool_indices_cpu=at, seq_lens_cpu=None), width)

    module.rows_and_lengths = late  # type: ignore[attr-defined]


DECIDING_SECONDS = 0.0005


def keep_the_profiles_costs(module: ModuleType) -> None:
    """Change `scheduler/cost/model.py`: nothing is learnt of steps."""

    def learn_nothing(cost: Any, *step: Any, **times: Any) -> None:
        cost.deciding = DECIDING_SECONDS

    module.StepCost.observe = module.StepCost.observe_deciding = learn_nothing  # type: ignore[attr-defined]


def hurry(name: str) -> Callable[[ModuleType], None]:
    """A change of a module: its constant `name`, seconds between two turns, is a tenth."""

    def change(module: ModuleType) -> None:
        setattr(module, name, getattr(module, name) / 10)

    return change


def demand(function: str) -> Callable[[ModuleType], None]:
    """A change of a module of `server/plugin/cpu/`: where its `function` finds no fast path, the server ends."""

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
    """Change `server/plugin/cpu/direct_forward.py`: adapters change places."""
    verify = module.DirectForward.verify

    def swapped(direct: Any, flat: Any, seq_lens: Any, rows: Any, reqs: Sequence[Any]) -> Any:
        ids = list(dict.fromkeys(req.lora_id for req in reqs if req.lora_id))
        other = dict(zip(ids, reversed(ids), strict=True))
        changed = [SimpleNamespace(lora_id=other.get(req.lora_id), multimodal_inputs=None) for req in reqs]
        return verify(direct, flat, seq_lens, rows, changed)

    module.DirectForward.verify = swapped


def cut_anywhere(module: ModuleType) -> None:
    """Change `server/plugin/hooks/prompt_chunks.py`: chunks are random, within what the cache has room for."""
    decide, numbers = module.PromptReader._decide, random.Random(5)

    def at_random(reader: Any, *args: Any) -> tuple[int, int]:
        tokens, limit = decide(reader, *args)
        if tokens == module.AS_CONFIGURED:
            return tokens, limit
        if reader.answering and numbers.random() < 0.4:
            return module.DECODE_FIRST, 0
        if limit:
            fewer = numbers.randint(1, limit)
            return tokens - limit + fewer, fewer
        return int(2 ** numbers.triangular(0, 10, 0)), 0  # 42 tokens on average

    module.PromptReader._decide = at_random


class Failing:
    """Raises in calls through `Boundary.run`. The file has three words: a number, which differs each time; a call, as
    its part and name; and the place: before, within (behind half of the calls that it makes) or after it. A new number
    switches everything on again."""

    def __init__(self) -> None:
        self.words = ["", "", ""]
        self.made: int | None = None  # calls that it makes, once that is known
        self.renewed: set[int] = set()

    def look(self) -> None:
        """Read the file."""
        words = Path(os.environ["OUTRIDER_TEST_FAILURES"]).read_text().split()
        if words and words != self.words:
            self.words, self.made = words, None
            self.renewed.clear()

    def is_new(self, each: Any) -> bool:
        """True the first time that this object is seen since the file has changed."""
        new = id(each) not in self.renewed
        self.renewed.add(id(each))
        return new

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, which fails."""

        def fails(*args: Any, **options: Any) -> Any:
            place = self.words[2]
            if place == "within":
                return self.run_half(call, *args, **options)
            if place == "after":
                call(*args, **options)
            raise RuntimeError(f"planted {place} {call.__name__}")

        return fails

    def run_half(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The first time count the calls that it makes; then fail behind half of them."""
        made = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal made
            made += event == "call"
            if self.made is not None and made > self.made // 2:
                raise RuntimeError(f"planted within {call.__name__}, in {frame.f_code.co_name}")

        sys.setprofile(count)
        try:
            found = call(*args, **options)
        finally:
            sys.setprofile(None)
        if self.made is not None:
            raise RuntimeError(f"planted within {call.__name__}, at its end")
        self.made = made
        return found


FAILING = Failing()


def fail_on_request(module: ModuleType) -> None:
    """Change `server/plugin/decode/boundary.py`: calls fail that are to."""
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
    """Change `server/plugin/decode/requests.py`: drafts that were stopped go on with the next number."""
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
        "outrider.server.plugin.decode.texts": hurry("SAVE_SECONDS"),
    },
    "profile-costs": {"outrider.scheduler.cost.model": keep_the_profiles_costs},
}
CHANGED: dict[str, Callable[[ModuleType], None]] = {}


def make(names: str) -> None:
    """Make these changes: of modules that are imported now, of the others when they are."""
    for name in names.split():
        for module, change in CHANGES[name].items():
            if module not in CHANGED and module in sys.modules:
                change(sys.modules[module])
            CHANGED[module] = change


class Finder(MetaPathFinder):
    """Finds modules as Python does, and changes those that are to be."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = CHANGED.get(fullname)
        found = PathFinder.find_spec(fullname, path, target) if change else None
        if change is None or found is None or found.loader is None:
            return None
        execute = found.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        found.loader.exec_module = changed  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, Finder())
make(os.environ.get("OUTRIDER_TEST_CHANGES", ""))
