"""Products and attention by tiles: the unit's arithmetic, the same in every batch."""

import ctypes
import ctypes.util
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import alone, check_rows_are_independent, ragged_attention, same_bits
from instruction_sets import TILE_SETS

from outrider.kernels.attention import flat_attention
from outrider.kernels.cpu import build, native
from outrider.kernels.flat_batch import FlatBatch
from outrider.kernels.linear import pack, packed_linear

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernels here")

SHAPES = pytest.mark.parametrize(("outputs", "depth"), [(192, 576), (100, 70), (577, 34), (17, 96), (1, 2)])


def weight_and_rows(outputs: int, depth: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary numbers, and some with denormal products."""
    generator = torch.Generator().manual_seed(outputs + depth)
    numbers = torch.randn(outputs + rows, depth, generator=generator)
    numbers[torch.rand(numbers.shape, generator=generator) < 0.1] *= 2e-19
    numbers[:, -1] *= 1e-39
    return numbers[:outputs].bfloat16(), numbers[outputs:].bfloat16()


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x [rows, depth] times weight [outputs, depth], transposed, in float32 as by TDPBF16PS (Intel's manual)."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    libm.fmaf.restype, libm.fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    fused = np.vectorize(libm.fmaf, otypes=[np.float32])

    def flushed(numbers: np.ndarray) -> np.ndarray:
        return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), numbers), numbers)

    left, right = (flushed(a.float().numpy()) for a in (x, weight))
    total = np.broadcast_to(bias.numpy(), (len(left), len(right)))
    for block in range(0, left.shape[1], 32):
        halves = []
        for half in (0, 1):
            part = np.zeros_like(total)
            for i in range(block + half, min(block + 32, left.shape[1]), 2):
                part = flushed(fused(left[:, None, i], right[None, :, i], part))
            halves.append(part)
        total = flushed(total + flushed(halves[0] + halves[1]))
    return torch.from_numpy(total)


@TILE_SETS
def test_arithmetic(instruction_set):
    weight, x = weight_and_rows(70, 70, 3)
    bias = torch.linspace(-1, 1, 70)
    bias[::3] = 0
    assert same_bits(packed_linear(x, pack(weight, bias)), reference(x, weight, bias).bfloat16())


def attend_all(queries: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of `queries` equal queries q [depth], of six heads, over all of k and v [keys, 2, …]."""
    lens, slots = torch.tensor([len(k)], dtype=torch.int32), torch.arange(len(k), dtype=torch.int32)[None]
    batch = FlatBatch(torch.tensor([0, queries], dtype=torch.int32), lens, torch.tensor([0]), slots)
    rows = q.expand(queries, 6, -1).contiguous()
    return flat_attention(rows, k, v, batch, scale=scale, causal=False)


@TILE_SETS
@pytest.mark.parametrize("queries", [1, 3, 5, 9, 40], ids="{} queries".format)
def test_arithmetic_of_attention(instruction_set, queries):
    """Values have weights of 1. Scores equal up to rounding repeat so often that another order of sums would show."""
    generator = torch.Generator().manual_seed(queries)
    keys, depth = 77, 96
    v = torch.randn(keys, 2, 80, generator=generator).bfloat16()
    got = attend_all(queries, torch.zeros(depth).bfloat16(), v.repeat(1, 1, 2)[..., :depth].contiguous(), v, 1.0)
    for head in range(6):
        sums = reference(torch.ones(1, keys), v[:, head // 3].T, torch.zeros(80))
        expected = (sums * torch.tensor(1 / keys)).bfloat16()
        assert all(same_bits(row, expected[0]) for row in got[:, head])

    numbers = torch.randn(depth, generator=generator) * torch.randn(depth, generator=generator).mul(4).exp()
    shuffled = torch.stack([numbers[torch.randperm(depth, generator=generator)] for _ in range(2 * keys)])
    k, q = shuffled.view(keys, 2, depth).bfloat16(), torch.full((depth,), 1.3).bfloat16()
    scores = torch.stack([reference(q[None], k[:, head], torch.zeros(keys))[0] for head in (0, 1)])
    spread = float(scores.amax() - scores.amin())
    assert 0 < spread < 1e-5 * numbers.abs().max()
    scale = 4 / spread
    weights = (scores.double() * scale).softmax(1)
    expected = torch.einsum("hk,khd->hd", weights, v.double()).repeat_interleave(3, 0)
    got = attend_all(queries, q, k, v, scale)
    torch.testing.assert_close(got.double(), expected.expand(queries, -1, -1), rtol=2e-2, atol=2e-2)


@TILE_SETS
def test_attention_of_a_long_prompt_does_not_depend_on_its_pieces(instruction_set):
    q, k, v, batch = ragged_attention([520], [700], dtype=torch.bfloat16)
    together = flat_attention(q, k, v, batch, scale=0.125)
    for token in range(0, 520, 13):
        one = flat_attention(q[token, None], k, v, alone(batch, token), scale=0.125)
        assert same_bits(one[0], together[token]), f"token {token}"


@TILE_SETS
@SHAPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_batch(instruction_set, outputs, depth, threads):
    weight, x = weight_and_rows(outputs, depth, 200)
    torch.set_num_threads(threads)
    for bias in (None, torch.linspace(-1, 1, outputs)):
        counts = 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 48, 95, 96, 97, 113, 129
        check_rows_are_independent(partial(packed_linear, weight=pack(weight, bias)), x, counts)


def test_the_emulation_refuses_illegal_instructions(tmp_path):
    program = tmp_path / "tile_unit"
    source = Path(__file__).parent / "cpu" / "tile_unit.cpp"
    flags = [*build.COMMON, *build.TILES["amx_emulated"], "-DISA=amx_emulated", f"-I{build.SOURCES}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    refused = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert refused.pop("fitting shapes") == "accepted"
    assert len(refused) == 12
    for what, said in refused.items():
        assert said.startswith("tile unit: "), what


@pytest.mark.parametrize(
    ("script", "proved", "warning"),
    [
        ("exit 0", True, ""),
        ("echo rows differ >&2; exit 1", False, "its check said: rows differ"),
        ("kill -ILL $$", False, "its check ended with SIGILL"),
    ],
    ids=["equal", "different", "crash"],
)
def test_tiles_are_proved_once(tmp_path, monkeypatch, caplog, script, proved, warning):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    library, program, runs = tmp_path / "kernels.so", tmp_path / build.CHECK, tmp_path / "runs"
    program.write_text(f"#!/bin/sh\necho once >> {runs}\n{script}\n")
    program.chmod(0o755)
    for _ in range(2):
        caplog.clear()
        assert native.tiles_proved(library) is proved
        assert [warning in r.getMessage() for r in caplog.records] == [True] * (not proved)
    assert runs.read_text() == "once\n"


def test_the_check_knows_whether_there_are_tiles():
    """It allows the unit exactly where the library does, and finds no difference."""
    program = build.library(native.extra_flags()).with_name(build.CHECK)
    if not program.exists():
        pytest.skip("the compiler does not know tiles")
    has_tiles = "amx" in torch.ops.outrider.instruction_sets()
    assert subprocess.run([program], check=False).returncode == (0 if has_tiles else 2)


def test_a_forced_instruction_set(monkeypatch):
    chosen = native.instruction_set()
    try:
        monkeypatch.setenv("OUTRIDER_CPU_INSTRUCTION_SET", "scalar")
        assert native.available.__wrapped__()
        assert native.instruction_set() == "scalar"
        monkeypatch.setenv("OUTRIDER_CPU_INSTRUCTION_SET", "mmx")
        with pytest.raises(ValueError, match=r"OUTRIDER_CPU_INSTRUCTION_SET is mmx, this processor runs .*scalar"):
            native.available.__wrapped__()
    finally:
        torch.ops.outrider.use_instruction_set(chosen)
