"""Print the versions of Outrider and its main dependencies."""

import argparse
import platform

from outrider.profiles.fingerprint import cpu_name, package_version

from ..machine import hardware

PACKAGES = ("outrider", "sglang", "torch", "transformers", "flashinfer-python", "sglang-kernel", "xgrammar", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments."""


def run(args: argparse.Namespace) -> int:
    for package in PACKAGES:
        print(package, package_version(package) or "not installed")
    print(f"python {platform.python_version()}")
    print(f"cpu {cpu_name()}, bfloat16 {'yes' if hardware.cpu_has_fast_bfloat16() else 'no'}")
    print(f"gpu {'yes' if hardware.has_gpu() else 'no'}")
    return 0
