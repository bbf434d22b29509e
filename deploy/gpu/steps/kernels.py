"""Run tests/gpu/kernels, which compare every Triton kernel with plain torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from timing import write


def main() -> int:
    tree = Path(os.environ["PROOF_STORE"]) / "tree"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "8", "--confcutdir", "tests/gpu"]
    ran = subprocess.run([*command, "tests/gpu/kernels"], cwd=tree, capture_output=True, text=True, check=False)
    print(ran.stdout[-20000:], ran.stderr[-5000:], sep="\n")
    counts = {state: int(count) for count, state in re.findall(r"(\d+) (passed|failed|skipped|error)", ran.stdout)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", ran.stdout, re.MULTILINE)
    write("kernels", counts | {"which failed": failed})
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
