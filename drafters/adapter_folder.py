"""LoRA adapters as PEFT writes them: the contents of a folder, checked before its weights are read.

Only adapters that can be served exactly are accepted: low-rank changes of linear layers, in safetensors, which hold no
code.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
"""PEFT's names of the served tensors."""
LAYER = re.compile(r"\blayers\.(\d+)\.")
NEUTRAL: dict[str, tuple[Any, ...]] = {"bias": ("none",), "peft_type": ("LORA",)}
"""Harmless values of unsupported fields. Unsupported fields not listed must be empty or false."""
UNSUPPORTED = {
    "peft_type": "it is no LoRA adapter",
    "use_dora": "DoRA changes the lengths of weights too",
    "bias": "it changes biases",
    "lora_bias": "it changes biases",
    "modules_to_save": "it replaces whole modules",
    "trainable_token_indices": "it replaces embeddings of tokens",
    "alpha_pattern": "its scale differs from layer to layer",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it begins in the middle of a text",
    "use_qalora": "it groups its inputs",
}
"""Fields of PEFT's configuration that are refused, with the reason."""
READS_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"})
WRITES_HIDDEN = frozenset({"o_proj", "down_proj"})
SGLANG_WANTS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")) | {"up_proj": ("gate_proj",)}
"""Per module, the modules without which SGLang refuses it."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter on disk.

    alpha: scale before division by the rank.
    by_root: divide alpha by the root of the rank (rank-stabilised LoRA), not by the rank.
    shapes: per changed module, the shapes of A [rank, depth] and B [outputs, rank].
    """

    path: Path
    alpha: float
    by_root: bool
    shapes: Mapping[str, tuple[Shape, Shape]]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read everything but the weights. Raises ValueError where the adapter cannot be served."""
        if not path.is_dir():
            raise ValueError("there is no such folder")
        config = _config(path)
        for name, reason in UNSUPPORTED.items():
            if (value := config.get(name)) and value not in NEUTRAL.get(name, ()):
                raise ValueError(f"an adapter with {name} {json.dumps(value)} is not served: {reason}")
        alpha = config.get("lora_alpha")
        if not isinstance(alpha, int | float):
            raise ValueError(f"{CONFIG} has no number lora_alpha")
        return cls(path, float(alpha), bool(config.get("use_rslora")), _shapes(path))

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError if the adapter does not fit the model with this config.json."""
        hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
        for module, (down, up) in self.shapes.items():
            if ".experts." in module:
                raise ValueError(f"it changes experts ({module}), which is not served")
            number, last = LAYER.search(f".{module}"), module.rpartition(".")[2]
            if number and layers and int(number[1]) >= layers:
                raise ValueError(f"it is of another model: it changes layer {number[1]} of {layers}")
            size = down[1] if last in READS_HIDDEN else up[0] if last in WRITES_HIDDEN else hidden
            if hidden and size != hidden:
                raise ValueError(f"it is of another model: its {module} has {size} hidden numbers, the model {hidden}")

    def check_for_sglang(self) -> None:
        """Raise ValueError if SGLang, which serves adapters on GPUs, would refuse it or compute something else."""
        if self.by_root:
            raise ValueError("it is rank-stabilised (use_rslora), which SGLang scales otherwise")
        for module in self.shapes:
            prefix, _, last = module.rpartition(".")
            wanted = [f"{prefix}.{name}" for name in SGLANG_WANTS.get(last, ())]
            if missing := [name for name in wanted if name not in self.shapes]:
                raise ValueError(f"SGLang takes its {module} only together with {missing[0]}")

    def scale(self, rank: int) -> float:
        """Return the factor of the product B A for this rank."""
        return self.alpha / (rank**0.5 if self.by_root else rank)

    def digest(self) -> str:
        """Return 32 hex digits that identify the folder's contents. Reads all of it; raises OSError."""
        digest = hashlib.sha256()
        for name in (CONFIG, WEIGHTS):
            with (self.path / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:32]

    def weights(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return A and B per changed module."""
        tensors: dict[str, dict[str, torch.Tensor]] = {module: {} for module in self.shapes}
        with safe_open(self.path / WEIGHTS, "pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                match = TENSOR.fullmatch(name)
                assert match is not None  # checked by `open`
                tensors[match["module"]][match["side"]] = file.get_tensor(name)
        return {module: (sides["A"], sides["B"]) for module, sides in tensors.items()}


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        raise ValueError(f"it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} describes no adapter")
    return config


def _shapes(path: Path) -> dict[str, tuple[Shape, Shape]]:
    if not (path / WEIGHTS).is_file():
        raise ValueError(f"it has no {WEIGHTS}")
    shapes: dict[str, dict[str, Shape]] = {}
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                match = TENSOR.fullmatch(name)
                if match is None:
                    raise ValueError(f"its tensor {name} is not served: only A and B of linear layers are")
                shapes.setdefault(match["module"], {})[match["side"]] = tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} cannot be read: {error}") from None
    if not shapes:
        raise ValueError(f"{WEIGHTS} has no tensors")
    for module, sides in shapes.items():
        down, up = sides.get("A", ()), sides.get("B", ())
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
            raise ValueError(f"its {module} has no A [rank, depth] and B [outputs, rank] that fit each other")
    return {module: (sides["A"], sides["B"]) for module, sides in shapes.items()}
