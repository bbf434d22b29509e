"""The weights of a folder that was prepared from a GGUF file, by the names that SGLang and transformers give them.

The folder holds a link to the file and an index of its tensors, so that no weight is read or stored twice: each is
mapped from the file when it is needed. `server/model/gguf_model.py` makes such folders.
"""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from outrider.kernels.blocks import KINDS, BlockRows, expand, pack_blocks
from outrider.kernels.linear import PackedWeight, pack
from outrider.kernels.weights import Weight, stack

from ..layer_names import FUSED

INDEX = "outrider-tensors.json"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """Place and type of a tensor in the file.

    kind: gguf's name of its type. shape: as in torch, rows first.
    offset, size: bytes in the file, or in the part of a split one with this number.
    rotary_heads: if above 0, the rows of each of this many heads lie in pairs, as llama.cpp rotates them; here and in
        transformers the first halves of all pairs come first.
    added: a number that the file adds to each value.
    """

    kind: str
    shape: list[int]
    offset: int
    size: int
    part: int = 0
    rotary_heads: int = 0
    added: float = 0.0


class GgufWeights:
    """Reads the tensors of a prepared folder. activations: of products with weights in blocks, as in `pack_blocks`."""

    def __init__(self, folder: Path, activations: str = "float") -> None:
        self.activations = activations
        self.folder = folder
        index = json.loads((folder / INDEX).read_text())
        self.stored = {name: Stored(**fields) for name, fields in index.items()}
        self.tied = f"{HEAD}.weight" not in self.stored

    def parts(self, layer: str) -> list[str]:
        """Return names of the weights that an SGLang layer holds: "….qkv_proj" has three, "lm_head" may be the
        embedding."""
        if layer == HEAD and self.tied:
            layer = EMBEDDING
        prefix, _, last = layer.rpartition(".")
        whole = f"{prefix}.{last}.weight" if prefix else f"{last}.weight"
        return [whole] if whole in self.stored else [f"{prefix}.{part}.weight" for part in FUSED.get(last, (last,))]

    def kind(self, layer: str) -> str | None:
        """Return the kind of blocks that a layer's weight can be kept in; None if it has to be expanded."""
        kinds = {self.stored[name].kind for name in self.parts(layer)}
        return kinds.pop() if len(kinds) == 1 and kinds <= KINDS.keys() else None

    def raw(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor's rows in transformers' order: [rows, bytes of a row] uint8."""
        stored = self.stored[name]
        # Copy on write: torch has no read-only tensors.
        mapped = np.memmap(self.folder / link_name(stored.part), mode="c", offset=stored.offset, shape=(stored.size,))
        rows = torch.from_numpy(mapped).view(stored.shape[0], -1)
        if stored.rotary_heads:
            pairs = rows.view(stored.rotary_heads, -1, 2, rows.shape[1])
            rows = pairs.transpose(1, 2).reshape(rows.shape)
        return rows

    def expanded(self, name: str) -> torch.Tensor:
        """Return a tensor in its own float type; bfloat16 where the file has blocks."""
        stored, raw = self.stored[name], self.raw(name)
        if stored.kind in FLOATS:
            floats = raw.view(FLOATS[stored.kind]).view(stored.shape)
            return floats - stored.added if stored.added else floats
        return expand(raw, stored.kind, *stored.shape)

    def prepared(self, layer: str, dtype: torch.dtype) -> Weight:
        """Return a layer's weight for our products: in blocks, parts of several kinds each in its own; floats as
        `dtype`."""
        names = self.parts(layer)
        runs = [(kind, list(run)) for kind, run in groupby(names, lambda name: self.stored[name].kind)]
        prepared = [self._prepared(kind, run, dtype) for kind, run in runs]
        return stack(prepared) if len(prepared) > 1 else prepared[0]

    def _prepared(self, kind: str, names: list[str], dtype: torch.dtype) -> PackedWeight:
        if kind not in KINDS:
            logger.info("%s (%s): expanded to %s", ", ".join(names), kind, str(dtype).removeprefix("torch."))
            return pack(torch.cat([self.expanded(name).to(dtype) for name in names]))
        raw = [self.raw(name) for name in names]
        outputs, depth = sum(self.stored[name].shape[0] for name in names), self.stored[names[0]].shape[1]
        together = torch.cat(raw) if len(raw) > 1 else raw[0]
        return pack_blocks(together, kind, outputs, depth, activations=self.activations)

    def rows(self, layer: str) -> BlockRows:
        """Return the embedding or head for reading rows; it stays mapped."""
        (name,) = self.parts(layer)
        return BlockRows(self.raw(name), self.stored[name].kind, self.stored[name].shape[1])

    def everything(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor by name, expanded one after the other."""
        return ((name, self.expanded(name)) for name in self.stored)

    def bytes_loaded(self, float_size: int | None, in_blocks: bool) -> int:
        """Return the bytes of the weights once loaded, with floats of `float_size` bytes (None: as in `expanded`)."""
        total = 0
        for stored in self.stored.values():
            kept = in_blocks and len(stored.shape) == 2 and stored.kind in KINDS
            stored_size = FLOATS[stored.kind].itemsize if stored.kind in FLOATS else 2
            total += stored.size if kept else math.prod(stored.shape) * (float_size or stored_size)
        return total


def link_name(part: int) -> str:
    """Return the name of the link to the file, or to a part of it."""
    return f"model-{part + 1:05}.gguf" if part else "model.gguf"


def is_prepared(folder: Path) -> bool:
    return (folder / INDEX).is_file()


def write_index(folder: Path, stored: dict[str, Stored]) -> None:
    (folder / INDEX).write_text(json.dumps({name: asdict(tensor) for name, tensor in stored.items()}))
