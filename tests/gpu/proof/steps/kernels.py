"""Run tests/gpu/kernels, which compare every Triton kernel with plain torch."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from timing import write


def main() -> int:
    tree, log = Path(os.environ["PROOF_STORE"]) / "tree", Path(os.environ["PROOF_RECORDS"]) / "kernels-tests.log"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "4", "--confcutdir", "tests/gpu"]
    with log.open("wb") as file:  # the output so far survives an interruption
        ran = subprocess.run([*command, "tests/gpu/kernels"], cwd=tree, stdout=file, stderr=file, check=False)
    output = log.read_text(errors="replace")
    states = re.findall(r"(PASSED|FAILED|SKIPPED|ERROR)\s+\S*?(tests/gpu/kernels/\S+)", output)
    counts = Counter(state.lower() for state, _ in states)
    write("kernels", counts | {"which failed": [name for state, name in states if state in ("FAILED", "ERROR")]})
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
