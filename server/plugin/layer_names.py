"""Names of weights in checkpoints and of SGLang's layers that hold them."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers of SGLang that hold several weights of a checkpoint, one below the other."""
