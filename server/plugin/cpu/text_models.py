"""Models with image or sound parts on a CPU: SGLang gets the configuration and the weights of their text alone. For
models that read images, it gets the image part as well (`image_models`)."""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.hf_transformers.config import _apply_gemma4_attention_overrides
from transformers.utils import cached_file

from ..text_alone import AXES, IMAGES, PREPROCESSOR, TEXT, text_of
from . import image_models

WHOLE = "whole_architecture"
"""Field of a text's configuration: the architecture of the model that it is a part of."""
CONFIG = "sglang.srt.utils.hf_transformers.config"
PADDING = "sglang.srt.configs.update_config.update_intermediate_size"
NAMES = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.)(?P<text>.+)"
    r"|model\.(?P<plain>(?:layers|embed_tokens|norm)\..+)"
    r"|(?:language_model\.)?(?P<head>lm_head\..+)"
)
"""Names that a text's weights have in a whole model's folder: today's of Transformers, and older ones."""
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Weights of all experts of a layer, side by side in one tensor, and their parts."""


def register() -> None:
    HookRegistry.register("sglang.srt.configs.model_config.get_config", _text_alone, HookType.AROUND)
    HookRegistry.register(f"{CONFIG}.get_hf_text_config", _with_shapes, HookType.AROUND)
    HookRegistry.register(PADDING, _padded, HookType.AROUND)
    image_models.register()


def _text_alone(original: Callable[..., Any], model: str, *args: Any, **more: Any) -> Any:
    """Return the configuration for SGLang: a whole model's is replaced by its text's. The three positions of a text's
    token (M-RoPE) are equal, so one is enough."""
    config = original(model, *args, **more)
    name = next(iter(config.architectures or ()), "")
    if name.startswith("Exaone"):
        config.sliding_window_pattern = None  # SGLang would need another backend for it; `layer_types` says the same
    if name not in TEXT and name not in TEXT.values():
        return config
    text = copy.deepcopy(config.get_text_config())
    text.architectures = [text_of(name, text.model_type)]
    if not name.startswith("Mistral3"):  # their folders state it of the text alone
        text.tie_word_embeddings = config.tie_word_embeddings
    if name in TEXT:
        setattr(text, WHOLE, name)
        if hasattr(config, "quantization_config"):
            text.quantization_config = config.quantization_config
    if name in IMAGES and cached_file(model, PREPROCESSOR, _raise_exceptions_for_missing_entries=False):
        image_models.add_to_text(text, config)
    rope = text.rope_parameters or {}
    if any(key.startswith("mrope") for key in rope):
        text.rope_parameters = text.rope_scaling = {
            key: value for key, value in rope.items() if not key.startswith("mrope")
        }
    return text


def _with_shapes(original: Callable[[Any], Any], config: Any) -> Any:
    """Return the text's configuration; Gemma 4's with the heads of both kinds of layers, as SGLang reads them off a
    whole model."""
    text = original(config)
    if config.model_type == "gemma4_text" and text.is_heterogeneous:  # not so already
        _apply_gemma4_attention_overrides(SimpleNamespace(text_config=text, eoa_token_id=None))
    return text


def _padded(original: Callable[..., Any], model_config: Any, name: str, padding: int) -> Any:
    """Pad widths of layers for ranks that share them; Gemma 3n's are a list, which stays."""
    if isinstance(getattr(model_config.hf_config, name, None), list):
        return model_config
    return original(model_config, name, padding)


def adapt(model_config: Any) -> None:
    """Let SGLang's class of a text, which it has imported, read the whole model's weights."""
    from sglang.srt.models.registry import ModelRegistry

    name = next(iter(model_config.hf_config.architectures or ()), "")
    # Folders of Qwen3.5's text alone may have the whole model's names, too.
    if hasattr(model_config.hf_config, AXES):
        text = ModelRegistry.models[name]
        ModelRegistry.models[name] = image_models.with_images(_of_the_whole(text), text)
    elif hasattr(model_config.hf_config, WHOLE) or name.startswith("Qwen3_5"):
        ModelRegistry.models[name] = _of_the_whole(ModelRegistry.models[name])


def _of_the_whole(model: type) -> type:
    class TextAlone(model):  # type: ignore[misc]
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            texts = weights_of_the_text(weights)
            if model.__name__ == "Qwen3MoeForCausalLM":
                texts = each_expert(texts, self.config.hidden_size)
            return super().load_weights(texts)

    return TextAlone


def weights_of_the_text(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the text's weights out of a whole model's, with the names that they have in a text model."""
    for name, weight in weights:
        if match := NAMES.fullmatch(name):
            yield match["head"] or f"model.{match['text'] or match['plain']}", weight


def each_expert(weights: Iterable[tuple[str, torch.Tensor]], hidden: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Split Qwen3-VL's joined experts into weights of single experts. Joined weights are [experts, in, out], or
    [experts, out, in] as in Transformers. hidden: the size of an expert's inputs and outputs."""
    for name, weight in weights:
        layer, _, product = name.rpartition(".experts.")
        if product not in EXPERTS:
            yield name, weight
            continue
        parts = EXPERTS[product]
        if weight.shape[1 if product == "gate_up_proj" else 2] == hidden:
            weight = weight.transpose(1, 2)
        for expert, of_expert in enumerate(weight):
            for part, matrix in zip(parts, of_expert.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{expert}.{part}.weight", matrix
