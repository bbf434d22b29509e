import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(1)


@pytest.fixture
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    from instruction_sets import using

    with using(request.param):
        yield request.param
