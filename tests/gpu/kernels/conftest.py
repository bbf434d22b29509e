"""Only where Triton interprets: `TRITON_INTERPRET=1 pytest tests/kernels/cuda/interpreted`, as test_interpreted.py."""

import os

from hypothesis import HealthCheck, settings

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]
settings.register_profile(
    "interpreted",
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("interpreted")
