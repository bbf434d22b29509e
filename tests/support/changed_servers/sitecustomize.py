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
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
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

    def learn_nothing(cost: Any, *step: Any) -> None:
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


CHANGES = {
    "overlap": {
        "sglang.srt.managers.scheduler": say_so,
        "outrider.server.processes.sglang_args": ask_for_overlap,
        "sglang.srt.managers.overlap_utils": stand_in_for_streams,
        "outrider.server.plugin.decode.worker": keep_lengths,
    },
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
