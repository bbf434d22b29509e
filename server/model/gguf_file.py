"""Fields and tensors of a GGUF file, with readable errors. The package gguf parses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class FileTensor:
    """shape: rows first, as torch has it. offset, size: bytes in the file."""

    path: Path
    kind: str
    shape: list[int]
    offset: int
    size: int

    def read(self) -> np.ndarray:
        """A float32 tensor's numbers."""
        return np.memmap(self.path, np.float32, "r", self.offset, tuple(self.shape))


class GgufFile:
    """Raises UserError where the file is not a whole GGUF file, or only a part of one."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise UserError(f"{path} is not a GGUF file; --model takes one, a folder, or a hub name")
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
                raise UserError(f"{path} has a tensor of an unknown type: {unknown[1]}") from None
            raise UserError(f"{path} is not a complete GGUF file; fetch it again") from None
        self._fields = reader.fields
        self.tensors = {
            tensor.name: FileTensor(
                path,
                tensor.tensor_type.name,
                [int(n) for n in reversed(tensor.shape)],
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
        if (parts := self.number("split.count", 1)) > 1:
            raise UserError(f"{path} is one of {parts} parts; join them with llama-gguf-split --merge")

    def value(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def number(self, name: str, default: float | None = None) -> Any:
        return self._of(name, default, (int, float))

    def text(self, name: str, default: str | None = None) -> str:
        return str(self._of(name, default, (str,)))

    def _of(self, name: str, default: Any, types: tuple[type, ...]) -> Any:
        value = self.value(name, default)
        if not isinstance(value, types):
            raise UserError(
                f"{self.path} is no language model: its {name} is {'missing' if value is None else value!r}"
            )
        return value

    def tensor(self, name: str) -> FileTensor:
        if name not in self.tensors:
            raise UserError(f"{self.path} has no tensor {name}")
        return self.tensors[name]
