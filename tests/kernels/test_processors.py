"""`make test-processors`."""

import subprocess
import sys

import processors
import pytest

from outrider.kernels.cpu import native

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not native.available(), reason="no compiled kernels here")]


def test_a_failure_on_one_processor_fails_the_run_after_all_have_run() -> None:
    command = 'test "$ATEN_CPU_CAPABILITY" != avx2'
    done = subprocess.run(
        [sys.executable, processors.__file__, "sh", "-c", command], capture_output=True, text=True, check=False
    )
    outcomes = dict(line.split(": ", 1) for line in done.stdout.rpartition("\n\n")[2].splitlines())
    assert list(outcomes) == list(processors.PROCESSORS)
    failed = [name for name, outcome in outcomes.items() if outcome.startswith("failed")]
    assert set(failed) <= {"AVX2", "plain torch with AVX2"}
    assert "plain torch with AVX2" in failed
    assert outcomes["no AVX"] == outcomes["plain torch without AVX"] == "passed"
    assert done.returncode == len(failed)
