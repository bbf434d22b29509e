"""Pack what a borrowed GPU machine without a network needs to run Outrider, in pieces that travel one by one.

The machine has Python 3.12, torch 2.11 for CUDA 13, Triton and a compiler; `requirements.txt` beside this names what it
lacks. sglang-kernel is repacked for one GPU architecture (Hopper's 9.0), its flash attention for bfloat16 and heads of
64 and 128. `unpack.py` travels with the pieces and installs them there.

  python deploy/gpu/pack.py                  into .gpu-pack, which git ignores
  python deploy/gpu/pack.py --piece-mb 20 --index-url ADDRESS
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
FATBIN, FATBIN_MAGIC, ZSTD_MAGIC = ".nv_fatbin", b"\x50\xed\x55\xba", b"\x28\xb5\x2f\xfd"
ARCHITECTURE = 90
KEPT = re.compile(r"sgl_kernel/(?!sm100/|flashmla_ops|infllm_ops|spatial_ops).*|sglang_kernel-.*|triton_kernels/.*")
VALUE_SIZE = re.compile(rb"CollectiveMainloopFwdSm90ILi\d+E.{1,160}?EEELi(\d+)E", re.DOTALL)
SIZES = {b"64", b"128"}
OTHER_TYPES = (b"half_t", b"float_e4m3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".gpu-pack"), help="(default: %(default)s)")
    parser.add_argument("--piece-mb", type=int, default=35, help="largest piece, in millions of bytes (default: 35)")
    parser.add_argument("--wheels", type=Path, help="where wheels are kept from run to run (default: OUT/wheels)")
    parser.add_argument("--python", default=sys.executable, help="of version 3.12, whose pip downloads")
    args, pip = parser.parse_known_args()
    if args.piece_mb < 1:
        parser.error(f"--piece-mb is at least 1, not {args.piece_mb}")
    wheels = args.wheels or args.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [args.python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*command, "-d", wheels, "-r", HERE / "requirements.txt", *pip], check=False).returncode:
        print("pack: pip could not download everything; --python must be of version 3.12", file=sys.stderr)
        return 1
    chosen = [repacked(wheel, args.out) for wheel in sorted(wheels.glob("*.whl"))]
    pieces = cut(chosen, args.out, args.piece_mb * 1_000_000)
    shutil.copy(HERE / "unpack.py", args.out)
    total = sum(path.stat().st_size for path in chosen)
    print(f"pack: {len(chosen)} wheels, {total / 1e6:.0f} MB, in {len(pieces)} pieces: {args.out}")
    return 0


def repacked(wheel: Path, out: Path) -> Path:
    """sglang-kernel without what the GPU does not run, made once; another wheel as it is."""
    if not wheel.name.startswith("sglang_kernel-"):
        return wheel
    small = out / "small" / wheel.name
    if small.exists():
        return small
    small.parent.mkdir(parents=True, exist_ok=True)
    unfinished = small.with_suffix(".new")
    record = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_LZMA) as new:
        for name in old.namelist():
            if name.endswith("/RECORD"):
                record.append(f"{name},,")
                where = name
                continue
            if not KEPT.fullmatch(name):
                continue
            content = old.read(name)
            if name.endswith(".so"):
                content = pruned(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
            new.writestr(name, content)
        new.writestr(where, "\n".join(record) + "\n")
    unfinished.rename(small)
    return small


def pruned(library: bytes) -> bytes:
    """The library with zeros for GPU code that is not used, so that it compresses; CUDA looks at no other entry."""
    found = bytearray(library)
    for start, size, architecture in entries(library):
        if architecture != ARCHITECTURE or not used(library[start : start + size]):
            found[start : start + size] = bytes(size)
    return bytes(found)


def entries(library: bytes) -> Iterator[tuple[int, int, int]]:
    """(place, bytes, architecture) of each GPU program in an ELF library, by the headers of CUDA's fat binaries."""
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
    """Where a section of an ELF file of 64 bits begins and ends; (0, 0) where there is none."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in headers:
        start = headers[names][4] + name
        if library[start : library.index(b"\0", start)].decode() == wanted:
            return offset, offset + length
    return 0, 0


def used(program: bytes) -> bool:
    """By the names of its kernels; a compressed one is looked at where the program zstd is installed."""
    if program[:4] == ZSTD_MAGIC and shutil.which("zstd"):
        program = subprocess.run(["zstd", "-dc"], input=program, capture_output=True, check=False).stdout
    sizes = set(VALUE_SIZE.findall(program))
    return not any(name in program for name in OTHER_TYPES) and (not sizes or bool(sizes & SIZES))


def cut(wheels: list[Path], out: Path, most: int) -> list[Path]:
    """The wheels one after the other, in pieces of at most `most` bytes; MANIFEST.json says what is where."""
    for old in out.glob("piece-*"):
        old.unlink()
    pieces: list[Path] = []
    left, file = 0, None
    for wheel in wheels:
        content = wheel.read_bytes()
        while content:
            if not left:
                if file:
                    file.close()
                pieces.append(out / f"piece-{len(pieces):03}")
                file, left = pieces[-1].open("wb"), most
            assert file is not None
            file.write(content[:left])
            content, left = content[left:], max(0, left - len(content))
    if file:
        file.close()
    listed = {"wheels": [about(path) for path in wheels], "pieces": [about(path) for path in pieces]}
    (out / "MANIFEST.json").write_text(json.dumps(listed, indent=1) + "\n")
    return pieces


def about(path: Path) -> dict[str, str | int]:
    content = path.read_bytes()
    return {"name": path.name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


if __name__ == "__main__":
    sys.exit(main())
