"""Fields of config.json that SGLang ignores: windows of attention layers, OLMo 3's and Granite 4's rotary base.

Some of SGLang's models have no window (Llama's layers: Mistral, Phi-3; Mixtral, StarCoder2) or one that is a token
longer (Cohere 2, Transformers' own models). Answers to texts longer than the window then differ from Transformers'.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.configs.granitemoehybrid import GraniteMoeHybridConfig
from sglang.srt.configs.olmo3 import Olmo3Config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from .. import must_take

WHOLE = frozenset({"mistral", "mixtral", "starcoder2", "phi3", "ministral3"})
"""Model types with the window in all layers, unless `layer_types` says otherwise."""


def register() -> None:
    HookRegistry.register("sglang.srt.model_loader.loader._initialize_model", initialize, HookType.AROUND)
    for config in (Olmo3Config, GraniteMoeHybridConfig):
        must_take.replace(config, "__init__", with_rope(config.__init__))


def initialize(original: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return SGLang's model, with its layers' windows."""
    model = original(model_config, *args, **kwargs)
    config = model_config.hf_text_config
    # Models with this method have set the window themselves, except Gemma 3n.
    if not hasattr(model, "get_attention_sliding_window_size") or config.model_type == "gemma3n_text":
        set_windows(model, config)
    return model


def set_windows(model: Any, config: Any) -> None:
    """Give each attention layer the window that the configuration has for it, if it names one."""
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or (types is None and config.model_type not in WHOLE):
        return
    loose = getattr(model, "attention_instances", {}).values()  # of Transformers' models
    for layer in (*model.modules(), *loose):
        if isinstance(layer, RadixAttention):
            slides = types is None or types[layer.layer_id] == "sliding_attention"
            layer.sliding_window_size = window - 1 if slides else -1  # SGLang does not count the token itself


def with_rope(original: Callable[..., None]) -> Callable[..., None]:
    """Let SGLang's class, which reads only older fields, read `rope_parameters`, as Transformers 5 writes them."""

    def read(self: Any, *args: Any, rope_parameters: dict[str, Any] | None = None, **fields: Any) -> None:
        stated = rope_parameters or {}
        scaling = dict(stated.get("full_attention", stated))  # only full attention's are scaled
        if "rope_theta" in scaling:
            fields.setdefault("rope_theta", scaling.pop("rope_theta"))
        if scaling.get("rope_type", "default") != "default":
            fields.setdefault("rope_scaling", scaling)
        original(self, *args, **fields)

    return read
