"""The embedded model as a block-diffusion model, `--model outrider-dllm`: a demonstration and test model.

Shipped is what training added (`drafters/conversion`), a few megabytes. The folder that is served is made once: the
embedded model's weights in bfloat16 with that merged into them.
"""

from __future__ import annotations

from pathlib import Path

import outrider.drafters
from outrider.kernels.cache import cache_root

from ..errors import UserError
from . import bundled_model, gguf_model
from .cached_folder import cached, sha256

NAME = "outrider-dllm"
DELTA = Path(outrider.drafters.__file__).parent / "weights" / bundled_model.NAME.lower() / "dllm"
ROOM = 320 * 2**20
"""Bytes that the folder takes, at most."""


def prepare() -> Path:
    """Return the model's folder, made or mended if need be; raises UserError."""
    if not (DELTA / "model.safetensors").is_file():
        raise UserError(f"the weights of {NAME} are not in this installation ({DELTA})")
    target = bundled_model.prepare()
    key = sha256(DELTA / "model.safetensors")[:8]

    def write(into: Path) -> None:
        from outrider.drafters.conversion.delta import write_merged

        try:
            write_merged(gguf_model.unpack(target), DELTA, into)
        except ValueError as error:
            raise UserError(str(error)) from None

    return cached(
        cache_root() / "models" / f"{NAME}-{key}-{gguf_model.FORMAT}", write, what=f"the model {NAME}", needs=ROOM
    )
