"""A row's bits do not depend on its batch: each layer of every served family, alone and among others, on one to three
threads."""

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
    "abs",
    "add",
    "clamp",
    "clone",
    "copy",
    "div",
    "floor",
    "ge",
    "gt",
    "lt",
    "masked_fill",
    "maximum",
    "min",
}
ROUNDED_ALIKE |= {"mul", "multiply", "neg", "pow", "relu", "sqrt", "square", "sub", "true_divide", "where"}
ROUNDED_ALIKE |= {"cos", "exp", "expm1", "log", "reciprocal", "rsqrt", "sin", "tanh"}
"""Functions of torch that give a number the same bits at each place (tests/kernels/test_pointwise.py)."""
REPLACED = {"gelu", "sigmoid", "silu", "softplus"}
"""What `server/plugin/cpu/stable_torch.py` computes in their place."""
ONE_TERM, OF_CONSTANTS = {"matmul"}, {"erfinv"}
"""Gemma 3's and 3n's products, of one number or two for each token; Gemma 3n's quantile."""
PLANTED = "OlmoForCausalLM:float32:planted"


def tasks() -> list[str]:
    """Every name in float32, and in bfloat16 one of those that stand for the same model."""
    models = {str(model): name for name, model in FAMILIES.items()}
    narrow = [f"{name}:bfloat16" for name in (*models.values(), *DIFFUSION)]
    return [*(f"{name}:float32" for name in (*FAMILIES, *DIFFUSION)), *narrow, PLANTED]


@pytest.mark.slow
@pytest.mark.skipif(hardware.has_gpu() or not native.available(), reason="compiled kernels on a CPU promise it")
def test_rows_do_not_depend_on_their_batch(tmp_path: Path) -> None:
    found = found_by_fork(Path(walked_families.__file__), str(tmp_path), *tasks())
    assert found.pop(PLANTED)["differing"], "a layer that depends on the number of rows was not seen"
    assert {task: each for task, each in found.items() if each.get("differing") != {}} == {}
    walked = {task.partition(":")[0] for task in found}
    print("walked:", *sorted(walked))
    assert walked | {*TRANSFORMERS} == SERVED  # which no config.json names
    assert {task.partition(":")[0] for task, each in found.items() if not each["layers"]} == {*IN_ONE_CALL}
    operations = {name for each in found.values() for name in each["operations"]}
    assert "rsqrt bfloat16" not in operations  # which torch computes by two instructions
    known = ROUNDED_ALIKE | REPLACED | ONE_TERM | OF_CONSTANTS
    assert {name.split()[0] for name in operations} <= known, "may a row's bits depend on its batch by these?"
