"""`make test-processors`: runs a command as on other processors: processors.py COMMAND..."""

import os
import subprocess
import sys

import torch

from outrider.kernels.cpu import native

PROCESSORS = {
    "no AVX": ("default", "SSE41", "COMPATIBLE", "scalar"),
    "AVX2": ("avx2", "AVX2", "AVX2", "avx2"),
    "AVX-512": ("avx512", "AVX512_CORE", "AVX512", "avx512"),
    "plain torch without AVX": ("default", "SSE41", "COMPATIBLE", ""),
    "plain torch with AVX2": ("avx2", "AVX2", "AVX2", ""),
    "kernels without AVX": ("", "", "", "scalar"),
    "kernels with AVX2": ("", "", "", "avx2"),
}
"""Instruction sets of torch's loops, oneDNN, MKL and our kernels; empty: this processor's."""
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OUTRIDER_CPU_INSTRUCTION_SET")


def main(command: list[str]) -> int:
    """Run the command on every processor that this one can imitate; returns the number of failures."""
    runs = ["", *torch.ops.outrider.instruction_sets()] if native.available() else [""]
    outcomes = {}
    for name, values in PROCESSORS.items():
        changed = {variable: value for variable, value in zip(VARIABLES, values, strict=True) if value}
        if values[-1] not in runs:
            outcomes[name] = "skipped: this processor lacks it"
            continue
        print(f"\n{name}: {' '.join(f'{variable}={value}' for variable, value in changed.items())}", flush=True)
        code = subprocess.run(command, env=os.environ | changed, check=False).returncode
        outcomes[name] = f"failed (exit code {code})" if code else "passed"
    print()
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return sum(outcome.startswith("failed") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
