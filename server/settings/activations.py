"""Choose `--activations auto`: the format that multiplies one row with this model's blocks faster on this processor.

The choice changes texts, so it must not vary from start to start. It is measured once for a processor, a number format
and the kinds of a model's blocks. The cache folder keeps the result for later starts.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.kernels.blocks import ACTIVATIONS, KINDS, block_depth, block_linear, group_blocks, pack_blocks
from outrider.kernels.cache import cache_root
from outrider.kernels.cpu import native
from outrider.profiles import store
from outrider.profiles.fingerprint import cpu_name
from outrider.storage.replacing import replace as replace_files

from ..errors import UserError
from ..machine import hardware
from ..model.target import Model
from ..plugin.loading.gguf_weights import EMBEDDING, GgufWeights, is_prepared
from . import profile_lookup
from .settings import Settings

MARGIN = 1.1
"""Least ratio of float's time to int8's for which int8 is chosen: float is the more accurate of the two."""
SAMPLE_BYTES = 32 << 20
"""Bytes of a weight to multiply with, at most: more than caches hold, and quick to lay out."""
ROUNDS = 15


class WeightSample(NamedTuple):
    """rows: of the largest weight of a kind [outputs, bytes of a row]. weighing: bytes of all weights of that kind."""

    rows: torch.Tensor
    depth: int
    weighing: int


def with_activations(settings: Settings, model: Model, say: Callable[[str], None] = lambda line: None) -> Settings:
    """Replace `auto` by a format. say: receives the reason, in one line.

    A profile shipped for this model and processor decides, if there is one.

    Raises UserError if the user asks for int8 and no weight can be multiplied in int8.
    """
    if settings.activations == "float":
        return settings
    reason = obstacle(settings, model)
    if settings.activations == "int8":
        if reason is not None:
            raise UserError(f"--activations int8: {reason}; leave it out")
        return settings
    if reason is not None:
        return replace(settings, activations="float")
    shipped = _of_shipped_profile(settings, model)
    if shipped is not None:
        return replace(settings, activations=shipped)
    milliseconds, place = measured(settings, model)
    share = milliseconds["int8"] / milliseconds["float"]
    chosen = "int8" if milliseconds["float"] >= MARGIN * milliseconds["int8"] else "float"
    say(f"Activations {chosen}: with int8 one row takes {share:.2f} of its time with float, as measured for {place}")
    return replace(settings, activations=chosen)


def _of_shipped_profile(settings: Settings, model: Model) -> str | None:
    """Return the activations of a model's shipped profile for this processor; None without such a profile."""
    by_format = {profile_lookup.number_format(replace(settings, activations=name)): name for name in ACTIVATIONS}
    measured = [profile.fingerprint for profile in store.readable(store.SHIPPED)]
    here = [each for each in measured if each.device == cpu_name() and each.dtype in by_format]
    return next((by_format[each.dtype] for each in here if each.target == profile_lookup.digest(model)), None)


def obstacle(settings: Settings, model: Model) -> str | None:
    """Return the reason why this engine cannot multiply integers; None if it can."""
    if settings.resolved_device != "cpu":
        return "it is made for CPUs"
    if settings.quantization != "none":
        return f"--quantization {settings.quantization} rounds activations as well"
    if not native.available():
        return "it needs the compiled kernels, which do not run here"
    in_file = model.folder is not None and is_prepared(model.folder)
    if in_file and settings.parallel.tp_size > 1:
        return "a GGUF file over several ranks is expanded"
    if not _kinds(model):
        return (
            f"it is for weights in blocks (GGUF, AWQ, GPTQ), and {model.name} has none "
            "(--quantization int8 rounds its weights as well)"
        )
    return None


def _groups_of(model: Model) -> int:
    """Group size of an AWQ or GPTQ checkpoint, in numbers; 0 for any other model."""
    config = model.config.get("quantization_config") or model.config.get("compression_config") or {}
    return int(config.get("group_size") or 0)


def measured(settings: Settings, model: Model) -> tuple[dict[str, float], Path]:
    """Return milliseconds by activations, for this processor and the model's kinds of blocks, and their file.

    Measures them if the file is missing.
    """
    from filelock import FileLock

    known: dict[str, Any] = {
        "processor": cpu_name(),
        "instruction_set": hardware.instruction_set(),
        "dtype": settings.resolved_dtype,
        "kinds": _kinds(model),
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    path = cache_root() / "activations" / f"{digest}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            choice = _read(path)
            if choice is None:
                choice = _measure(settings, _samples(model))
                replace_files({path: json.dumps(known | {"milliseconds": choice}, indent=1) + "\n"})
    except ValueError as error:
        raise UserError(f"{model.name} has a weight that cannot be multiplied: {error}") from None
    except OSError as error:
        raise UserError(f"--activations auto keeps its choice in {path.parent}: {error}; name float or int8") from None
    return choice, path


def _read(path: Path) -> dict[str, float] | None:
    """Return the milliseconds in a file; None if it is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text())["milliseconds"]
        if all(kept[name] > 0 for name in ACTIVATIONS):
            return {name: float(kept[name]) for name in ACTIVATIONS}
    return None


def _kinds(model: Model) -> list[str]:
    """Return the kinds of the blocks that the model multiplies with, sorted."""
    if model.folder is not None and is_prepared(model.folder):
        return sorted({kind for kind, _, _ in _multiplied(GgufWeights(model.folder))})
    return [f"GROUPS_{groups}"] if (groups := _groups_of(model)) else []


def _multiplied(weights: GgufWeights) -> Iterator[tuple[str, str, int]]:
    """Yield the kind, name and bytes of each weight of a file that is multiplied in blocks."""
    for name, stored in weights.stored.items():
        looked_up = name == f"{EMBEDDING}.weight" and not weights.tied
        if stored.kind in KINDS and len(stored.shape) > 1 and not looked_up:
            yield stored.kind, name, stored.size


def _samples(model: Model) -> dict[str, WeightSample]:
    """Return some rows of the largest weight of each kind of blocks."""
    if model.folder is None or not is_prepared(model.folder):
        return _sample_of_groups(model)
    weights = GgufWeights(model.folder)
    largest: dict[str, tuple[int, str]] = {}
    total: dict[str, int] = {}
    for kind, name, size in _multiplied(weights):
        largest[kind] = max(largest.get(kind, (0, "")), (size, name))
        total[kind] = total.get(kind, 0) + size
    samples = {}
    for kind, (_, name) in largest.items():
        depth = weights.stored[name].shape[-1]
        rows = weights.raw(name).view(-1, depth // block_depth(kind) * KINDS[kind])
        samples[kind] = WeightSample(rows[: max(1, SAMPLE_BYTES // rows.shape[1])].clone(), depth, total[kind])
    return samples


def _sample_of_groups(model: Model) -> dict[str, WeightSample]:
    """Return random codes in a layer's shape: a checkpoint's come in several orders, and values do not matter."""
    groups = _groups_of(model)
    depth = -(-int(model.config.get("hidden_size") or 4096) // groups) * groups
    outputs = min(int(model.config.get("intermediate_size") or depth), max(1, SAMPLE_BYTES * 2 // depth))
    codes = torch.randint(0, 16, (outputs, depth), dtype=torch.uint8)
    shared = (outputs, depth // groups)
    rows, kind = group_blocks(codes, torch.full(shared, 8), torch.full(shared, 2.0**-8))
    return {kind: WeightSample(rows, depth, rows.numel())}


def _measure(settings: Settings, samples: dict[str, WeightSample]) -> dict[str, float]:
    """Return the milliseconds of one row through all blocks of a model, by activations.

    Takes the processor time of one thread, the shortest of several turns: other work on the machine disturbs it least,
    and a busy moment must not decide for good.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    total = dict.fromkeys(ACTIVATIONS, 0.0)
    try:
        for kind, (rows, depth, weighing) in samples.items():
            x = torch.randn(1, depth, dtype=getattr(torch, settings.resolved_dtype))
            arms = {name: pack_blocks(rows, kind, len(rows), depth, activations=name) for name in ACTIVATIONS}
            shortest = dict.fromkeys(arms, float("inf"))
            for _ in range(ROUNDS):
                for name, weight in arms.items():
                    start = time.thread_time()
                    block_linear(x, weight)
                    shortest[name] = min(shortest[name], time.thread_time() - start)
            for name, seconds in shortest.items():
                total[name] += seconds * 1e3 * weighing / rows.numel()
    finally:
        torch.set_num_threads(before)
    return total
