"""Tests that need an NVIDIA GPU; without one their modules are not imported.

The tests of kernels/ also run in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/kernels`.
"""

from pathlib import Path

import gpu_device
import pytest

HERE = Path(__file__).parent


class Skipped(pytest.File):
    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"{gpu_device.missing()} (docs/gpu.md)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    interpreted = gpu_device.INTERPRETED and module_path.is_relative_to(HERE / "kernels")
    if interpreted or (gpu_device.missing() is None and not gpu_device.INTERPRETED):
        return None
    return Skipped.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("gpu")
