"""Choose `--activations auto`: the format that multiplies one row with this model's blocks faster on this processor.

The choice changes texts, so it must not vary from start to start. It is measured once for a processor, a number format
and the kinds of a model's blocks. The cache folder keeps the result for later starts.
"""

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.kernels.blocks import ACTIVATIONS, KINDS, block_depth, pack_blocks
from outrider.kernels.cache import cache_root
from outrider.kernels.cpu import native
from outrider.kernels.linear import packed_linear
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
DEPTH, SAMPLE_BYTES = 4096, 32 << 20
"""Depth and bytes of the weight to multiply with: more than caches hold, and quick to lay out."""
ROUNDS = 15


def with_activations(settings: Settings, model: Model, say: Callable[[str], None] = lambda line: None) -> Settings:
    """Replace `auto` by a format. say: receives the reason, in one line.

    A profile shipped for this model and processor decides, if there is one; else a measurement. Raises UserError if
    the user asks for int8 and nothing can be multiplied in int8.
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
    if not _bytes_by_kind(model):
        return (
            f"it is for weights in blocks (GGUF, AWQ, GPTQ), and {model.name} has none "
            "(--quantization int8 rounds its weights as well)"
        )
    return None


def measured(settings: Settings, model: Model) -> tuple[dict[str, float], Path]:
    """Return milliseconds by activations, for this processor and the model's kinds of blocks, and their file.

    Measures them if the file is missing.
    """
    from filelock import FileLock

    sizes = _bytes_by_kind(model)
    known: dict[str, Any] = {
        "processor": cpu_name(),
        "instruction_set": hardware.instruction_set(),
        "dtype": settings.resolved_dtype,
        "kinds": sorted(sizes),
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    path = cache_root() / "activations" / f"{digest}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            choice = _read(path)
            if choice is None:
                choice = _measure(settings, sizes)
                replace_files({path: json.dumps(known | {"milliseconds": choice}, indent=1) + "\n"})
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


def _bytes_by_kind(model: Model) -> dict[str, int]:
    """Return the bytes of all weights that the model multiplies in blocks, by kind; any number for an AWQ or GPTQ
    checkpoint, which has one kind."""
    if model.folder is None or not is_prepared(model.folder):
        config = model.config.get("quantization_config") or model.config.get("compression_config") or {}
        kind = f"GROUPS_{config.get('group_size')}"
        return {kind: SAMPLE_BYTES} if kind in KINDS else {}
    weights = GgufWeights(model.folder)
    sizes = Counter[str]()
    for name, stored in weights.stored.items():
        looked_up = name == f"{EMBEDDING}.weight" and not weights.tied
        if stored.kind in KINDS and len(stored.shape) > 1 and not looked_up:
            sizes[stored.kind] += stored.size
    return sizes


def _measure(settings: Settings, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the milliseconds to multiply one row with `sizes` bytes of blocks of each kind, by activations.

    Takes the shortest processor time of one thread in several turns, which other work on the machine disturbs least:
    the choice is kept.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    total = dict.fromkeys(ACTIVATIONS, 0.0)
    try:
        x = torch.randn(1, DEPTH, dtype=getattr(torch, settings.resolved_dtype))
        for kind, size in sizes.items():
            width = DEPTH // block_depth(kind) * KINDS[kind]
            # No scale of these bytes is denormal or infinite; otherwise values do not matter.
            rows = torch.randint(16, 48, (SAMPLE_BYTES // width, width), dtype=torch.uint8)
            arms = {name: pack_blocks(rows, kind, len(rows), DEPTH, activations=name) for name in ACTIVATIONS}
            shortest = dict.fromkeys(arms, float("inf"))
            for _ in range(ROUNDS):
                for name, weight in arms.items():
                    start = time.thread_time()
                    packed_linear(x, weight)
                    shortest[name] = min(shortest[name], time.thread_time() - start)
            for name, seconds in shortest.items():
                total[name] += seconds * 1e3 * size / rows.numel()
    finally:
        torch.set_num_threads(before)
    return total
