import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    """Kernels use the threads of all cores, as in a server."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(1)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use the variant named by the parameter; skip if the processor does not run it."""
    from instruction_sets import using

    with using(request.param):
        yield request.param
