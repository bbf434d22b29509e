"""A row's bits do not depend on its batch: each layer of every served family, on one to three threads."""

from pathlib import Path

import pytest
import walked_families
from own_process import found_by_fork
from tiny_families import FAMILIES, IN_ONE_CALL
from walked_families import DIFFUSION

from outrider.kernels.cpu import native
from outrider.server.machine import hardware
from outrider.server.model.families import SERVED, TRANSFORMERS

ROUNDED_ALIKE = {
    "abs", "add", "clamp", "clone", "copy", "div", "floor", "ge", "gt", "lt", "masked_fill", "maximum", "min",
}  # fmt: skip
ROUNDED_ALIKE |= {"mul", "multiply", "neg", "pow", "relu", "sqrt", "square", "sub", "true_divide", "where"}
ROUNDED_ALIKE |= {"cos", "exp", "expm1", "log", "reciprocal", "rsqrt", "sin", "tanh"}
"""Torch functions with position-independent bits (tests/kernels/test_pointwise.py)."""
REPLACED = {"gelu", "sigmoid", "silu", "softplus"}
"""Functions that `server/plugin/cpu/stable_torch.py` replaces."""
ONE_TERM, OF_CONSTANTS = {"matmul"}, {"erfinv"}
"""Products of one or two numbers per token in Gemma 3 and 3n; Gemma 3n's quantile."""
PLANTED = "OlmoForCausalLM:float32:planted"


def tasks() -> list[str]:
    """Every name in float32, and one per model class in bfloat16."""
    models = {str(model): name for name, model in FAMILIES.items()}
    narrow = [f"{name}:bfloat16" for name in (*models.values(), *DIFFUSION)]
    return [*(f"{name}:float32" for name in (*FAMILIES, *DIFFUSION)), *narrow, PLANTED]


@pytest.mark.slow
@pytest.mark.skipif(hardware.has_gpu() or not native.available(), reason="compiled kernels on a CPU promise it")
def test_rows_do_not_depend_on_their_batch(tmp_path: Path) -> None:
    reports = found_by_fork(Path(walked_families.__file__), str(tmp_path), *tasks())
    assert reports.pop(PLANTED)["differing"], "a layer that depends on the number of rows was not seen"
    assert {task: each for task, each in reports.items() if each.get("differing") != {}} == {}
    walked = {task.partition(":")[0] for task in reports}
    print("walked:", *sorted(walked))
    assert walked | {*TRANSFORMERS} == SERVED  # in no config.json
    assert {task.partition(":")[0] for task, each in reports.items() if not each["layers"]} == {*IN_ONE_CALL}
    operations = {name for each in reports.values() for name in each["operations"]}
    assert "rsqrt bfloat16" not in operations  # torch computes it by two instructions
    known = ROUNDED_ALIKE | REPLACED | ONE_TERM | OF_CONSTANTS
    assert {name.split()[0] for name in operations} <= known, "may a row's bits depend on its batch by these?"
