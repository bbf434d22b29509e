"""Compiles kernels for absent GPUs."""

import re

import pytest

pytest.importorskip("triton")

from compiled_kernels import CASES, compiled, resources

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["commit", "uniforms"])
def test_compiles_without_spills(name):
    registers, spills, _ = resources(compiled(BY_NAME[name], 90))
    assert 0 < registers < 255
    assert spills == 0


def test_the_noise_is_rounded_after_every_operation():
    fused = r"fma\.rn\.f64"
    drawn = BY_NAME["draft block, draw and q"]
    ptx = compiled(drawn, 90).asm["ptx"]
    assert "div.rn.f64" in ptx
    assert not re.search(fused, ptx)
    careless = type(drawn)(drawn.name, drawn.kernel, drawn.types, drawn.constants, {"num_warps": 8})
    assert re.search(fused, compiled(careless, 90).asm["ptx"])  # the default fuses them
