"""The frozen target model as the trainer sees it: weights, chat template, stop tokens."""

import ctypes
import platform
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..adapter_folder import AdapterFolder

K = TypeVar("K", bound=Hashable)


def keep_freed_memory() -> None:
    """Stop glibc from returning large buffers to the kernel: page faults would cost as much as matrix products."""
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 64 << 20)  # M_TOP_PAD


@dataclass
class TargetModel:
    """A causal language model with its tokenizer; never trained. has_adapter: inside `adapted`."""

    model: Any
    tokenizer: Any
    path: str
    has_adapter: bool = False

    @classmethod
    def load(cls, path: str, *, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Self:
        if not Path(path).exists() and Path(path).is_absolute():
            raise FileNotFoundError(f"target {path} does not exist; give a Hugging Face folder or name")
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        model = model.to(device).eval()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return cls(model=model, tokenizer=AutoTokenizer.from_pretrained(path), path=path)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def embedding(self) -> torch.Tensor:
        """[V, d]"""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> torch.Tensor:
        """[V, d]"""
        return self.model.get_output_embeddings().weight

    @property
    def stop_ids(self) -> set[int]:
        """Tokens that end an answer."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        ids = ids if isinstance(ids, list) else [ids]
        return {int(i) for i in ids if i is not None} | {int(self.tokenizer.eos_token_id)}

    @contextmanager
    def adapted(self, adapter: AdapterFolder | None) -> Iterator[None]:
        """Inside, every forward adds the products of a LoRA adapter, as a server does; None: the model alone. Merged
        into weights of 16 bits, small changes would be lost. Raises ValueError for another model's adapter."""
        hooks: list[Any] = []
        try:
            if adapter is not None:
                for module, (down, up) in adapter.weights().items():
                    hooks.append(self._add(module, down, up, adapter.scale(len(down))))
            self.has_adapter = bool(hooks)
            yield
        finally:
            self.has_adapter = False
            for hook in hooks:
                hook.remove()

    def _add(self, module: str, down: torch.Tensor, up: torch.Tensor, scale: float) -> Any:
        """Add s B A of a layer's inputs to its outputs; return the hook."""
        try:
            layer = self.model.get_submodule(module)
        except AttributeError:
            raise ValueError(f"the model has no layer {module}, which its adapter changes") from None
        if not isinstance(layer, torch.nn.Linear) or layer.weight.shape != (len(up), down.shape[1]):
            raise ValueError(f"the adapter is of another model: its {module} is {len(up)} by {down.shape[1]}")
        down, up = down.to(layer.weight), (scale * up.float()).to(layer.weight)
        return layer.register_forward_hook(lambda _m, inputs, out: out + F.linear(F.linear(inputs[0], down), up))

    def chat_ids(self, turns: list[str]) -> list[int]:
        """Return token ids of user turns (one, or alternating user/assistant) up to the start of the answer."""
        out = self.tokenizer.apply_chat_template(_messages(turns), add_generation_prompt=True, return_dict=True)
        return list(out["input_ids"])

    def user_turn_ids(self, opening: str) -> list[int]:
        """Return token ids of the template up to an unfinished user turn that begins with `opening`."""
        marker = "\u241e"
        text = self.tokenizer.apply_chat_template(_messages([marker]), tokenize=False)
        return list(self.tokenizer(text.split(marker)[0] + opening, add_special_tokens=False)["input_ids"])


@contextmanager
def outputs_of(modules: Mapping[K, torch.nn.Module]) -> Iterator[dict[K, torch.Tensor]]:
    """Inside, every forward puts the outputs of these modules, or the first of several, into the dictionary."""
    out: dict[K, torch.Tensor] = {}

    def keep(key: K, _module: Any, _inputs: Any, result: Any) -> None:
        out[key] = result[0] if isinstance(result, tuple) else result

    hooks = [module.register_forward_hook(partial(keep, key)) for key, module in modules.items()]
    try:
        yield out
    finally:
        for hook in hooks:
            hook.remove()


def _messages(turns: list[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
