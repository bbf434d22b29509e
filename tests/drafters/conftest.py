from __future__ import annotations

import pytest
from tiny_drafters import CONFIGS

from outrider.drafters.block import BlockConfig


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> BlockConfig:
    return CONFIGS[request.param]
