"""Pieces for a GPU machine without a network: cut, carried one by one, damaged, joined; GPU code that is left out."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "gpu"


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_pack", FOLDER / "pack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, name: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        file.writestr(f"{name}.py", f"NAME = {name!r}\n" + "# filling\n" * 300)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def unpack(folder: Path, store: Path) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, FOLDER / "unpack.py", folder, "--store", store], capture_output=True, text=True, check=False
    )
    return run.returncode, run.stdout


def test_pieces_arrive_one_by_one_and_a_damaged_one_again(pack: ModuleType, tmp_path: Path) -> None:
    out, trip, store = (tmp_path / name for name in ("out", "trip", "store"))
    out.mkdir()
    trip.mkdir()
    pieces = pack.cut([wheel(tmp_path, "first"), wheel(tmp_path, "second")], out, 400)
    assert len(pieces) > 3
    assert all(piece.stat().st_size <= 400 for piece in pieces)
    (trip / "MANIFEST.json").write_bytes((out / "MANIFEST.json").read_bytes())
    for number, piece in enumerate(pieces[:-1]):
        content = piece.read_bytes()
        (trip / piece.name).write_bytes(b"?" + content[1:] if number == 1 else content)
        assert unpack(trip, store)[0] == 2
        (trip / piece.name).unlink()
    (trip / pieces[-1].name).write_bytes(pieces[-1].read_bytes())
    code, said = unpack(trip, store)
    assert (code, said.split(": ")[-1].strip()) == (2, pieces[1].name)
    (trip / pieces[1].name).write_bytes(pieces[1].read_bytes())
    code, said = unpack(trip, store)
    assert code == 0
    assert said.strip().endswith(f"PYTHONPATH={store / 'site'}")
    assert {path.name for path in (store / "site").glob("*.py")} == {"first.py", "second.py"}


def library(programs: list[tuple[int, bytes]]) -> bytes:
    """An ELF file with a section of names and one of GPU programs (architecture, content)."""
    body = b"".join(
        struct.pack("<HHIQQIIQQQ", 2, 1, 56, len(content), 0, 0, architecture, 0, 0, 0) + content
        for architecture, content in programs
    )
    fatbin = struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(body)) + body
    names = b"\0.names\0.nv_fatbin\0"
    head = 64 + len(names)
    sections = [(0, 0, 0), (1, 64, len(names)), (8, head, len(fatbin))]
    table = b"".join(struct.pack("<IIQQQQIIQQ", n, 1, 0, 0, at, size, 0, 0, 0, 0) for n, at, size in sections)
    start = bytearray(64)
    struct.pack_into("<Q", start, 0x28, head + len(fatbin))
    struct.pack_into("<HHH", start, 0x3A, 64, 3, 1)
    return bytes(start) + names + fatbin + table


def test_gpu_code_that_is_not_used_becomes_zeros_and_nothing_else_changes(pack: ModuleType) -> None:
    sized = b"CollectiveMainloopFwdSm90ILi2EN4cute5tupleEEELi%dE"
    programs = [
        (80, b"for another architecture"), (90, b"prepares"), (90, b"cutlass6half_t"), (90, sized % 128),
        (90, sized % 512), (90, b"float_e4m3_t"),
    ]  # fmt: skip
    kept = {b"prepares", sized % 128}
    expected = [(arch, content if content in kept else bytes(len(content))) for arch, content in programs]
    assert pack.pruned(library(programs)) == library(expected)
