"""Layers that keep a state of each request in place of keys and values of each token: how many, and how large."""

from typing import Any

LINEAR = "linear_attention"
"""Gated delta layers, as `layer_types` names them."""


def recurrent_layers(config: dict[str, Any]) -> int:
    """Return the number of gated delta layers: as listed, else all but every `full_attention_interval`-th."""
    if not config.get("linear_num_value_heads"):
        return 0
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    return kinds.count(LINEAR) if kinds else layers - layers // int(config.get("full_attention_interval") or 4)


def state_bytes(config: dict[str, Any]) -> int:
    """Return the bytes of one request's states in all layers together, in float32: a matrix of each head, and the last
    inputs of the convolution."""
    layers = recurrent_layers(config)
    if not layers:
        return 0
    heads, value = int(config["linear_num_value_heads"]), int(config["linear_value_head_dim"])
    key_heads, key = int(config["linear_num_key_heads"]), int(config["linear_key_head_dim"])
    channels = 2 * key_heads * key + heads * value
    window = int(config["linear_conv_kernel_dim"]) - 1
    return 4 * layers * (heads * value * key + channels * window)
