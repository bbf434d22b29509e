"""Models that SGLang runs by Transformers' code, with weights named as in folders of the hub."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.models.registry import ModelRegistry
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from .. import must_take

NAMES = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
STYLES = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}
"""Ways to share a layer among ranks: Transformers' name, which SGLang does not know, and SGLang's."""


def register() -> None:
    """Change SGLang's classes for these models, if it has imported them."""
    if (module := sys.modules.get("sglang.srt.models.transformers")) is None:
        return
    for name in NAMES:
        ModelRegistry.models[name] = _with_names_of_the_hub(getattr(module, name))
    must_take.replace(module, "_normalize_tp_style", _in_sglangs_words(module._normalize_tp_style))


def _in_sglangs_words(original: Callable[[str], str]) -> Callable[[str], str]:
    return lambda style: original(STYLES.get(style, style))


def _with_names_of_the_hub(model: type) -> type:
    class NamesOfTheHub(model):  # type: ignore[misc]
        """Renames weights as Transformers does when it loads; SGLang knows only the names of its modules."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            changes = get_model_conversion_mapping(self.model, add_legacy=False)
            renamings = [change for change in changes if isinstance(change, WeightRenaming)]

            def renamed(name: str) -> str:
                for renaming in renamings:
                    name, _ = renaming.rename_source_key(name)
                return name

            return super().load_weights((renamed(name), weight) for name, weight in weights)

    return NamesOfTheHub
