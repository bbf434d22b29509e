"""Fields and tensors of a GGUF file or of all parts of a split one, with readable errors. The package gguf parses."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

MAGIC = b"GGUF"
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
"""Name of a part, as llama-gguf-split writes it; parts count from 1."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """path: the part that holds it, `parts[part]`. shape: rows first, as in torch. offset, size: in bytes."""

    path: Path
    part: int
    kind: str
    shape: list[int]
    offset: int
    size: int

    def read(self) -> np.ndarray:
        """Return a float32 tensor's numbers."""
        return np.memmap(self.path, np.float32, "r", self.offset, tuple(self.shape))


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file in order, given any of them; for any other file, the file."""
    named = PART.fullmatch(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    parts = [path.with_name(f"{named['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if missing := [part for part in parts if not part.is_file()]:
        names = ", ".join(part.name for part in missing[:3]) + (", …" if len(missing) > 3 else "")
        raise UserError(f"{path} is one of {count} parts, and {path.parent} has no {names}")
    return parts


def stem_of(path: Path) -> str:
    """Return the file's name without its ending and the number of a part."""
    named = PART.fullmatch(path.name)
    return named["stem"] if named else path.stem


class GgufFile:
    """A GGUF file with all its parts. Raises UserError if it is incomplete, or no GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path, self.parts = path, parts_of(path)
        readers = [_read(part) for part in self.parts]
        self._fields = readers[0].fields
        self.tensors = {
            tensor.name: FileTensor(
                part,
                number,
                tensor.tensor_type.name,
                [int(n) for n in reversed(tensor.shape)],
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for number, (part, reader) in enumerate(zip(self.parts, readers, strict=True))
            for tensor in reader.tensors
        }
        if (count := self.number("split.count", 1)) > len(self.parts):
            raise UserError(f"{path} is one of {count} parts; name them NAME-00001-of-{count:05}.gguf and so on")

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def value(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def number(self, name: str, default: float | None = None) -> Any:
        return self._of(name, default, (int, float))

    def hyper(self, name: str, default: float | None = None) -> Any:
        """Return a number that the file states under its architecture's name."""
        return self.number(f"{self.architecture}.{name}", default)

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


def _read(path: Path) -> Any:
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise UserError(f"{path} is not a GGUF file; --model takes one, a folder, or a hub name")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        if unknown := re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error)):
            raise UserError(f"{path} has a tensor of an unknown type: {unknown[1]}") from None
        raise UserError(f"{path} is not a complete GGUF file; fetch it again") from None
