"""A row's bits do not depend on its batch: each layer of every served family, alone and among others, on one to three
threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import walked_families
from own_process import found_by_fork
from tiny_families import FAMILIES, IN_ONE_CALL
from walked_families import DIFFUSION

from outrider.kernels.cpu import native
from outrider.server.machine import hardware
from outrider.server.model.families import SERVED, TRANSFORMERS

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
