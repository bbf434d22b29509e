"""EAGLE-3's chain from the paper (arXiv 2503.01840, section 3.1), one request and one row at a time, in float64.

It shares only the tensors with the drafter: no cache, no slots.
"""

from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Reference:
    """config: without sections. tensors: by name, as in the folder. embedding, head: [V, d] of the target."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor
    ):
        names = {"midlayer.": "", "layers.0.": "", "self_attn.": "", "mlp.": ""}
        self.w: dict[str, torch.Tensor] = {}
        for name, value in tensors.items():
            for prefix, short in names.items():
                name = name.replace(prefix, short)
            self.w[name] = value.double() if value.is_floating_point() else value
        self.config, self.eps = config, config["rms_norm_eps"]
        self.embedding = self.w.get("embed_tokens.weight", embedding.double())
        self.head = self.w.get("lm_head.weight", head.double())
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"],
                head_dim=config["head_dim"], max_position_embeddings=config["max_position_embeddings"],
                rope_parameters={
                    "rope_theta": config.get("rope_theta") or 10000.0,
                    **(config.get("rope_scaling") or {"rope_type": "default"}),
                },
            )
        )  # fmt: skip

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [n, d] of hidden states [n, m*d]."""
        hidden = hidden.double()
        if "aux_norm_low.weight" in self.w:
            parts = zip(hidden.chunk(3, -1), ("low", "mid", "high"), strict=True)
            hidden = torch.cat([self.norm(part, f"aux_norm_{name}") for part, name in parts], -1)
        return self.linear(hidden, "fc")

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, H, D] rotated by their positions."""
        cos, sin = self.rotary(x.float(), torch.arange(len(x))[None])
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos[0].double()[:, None] + turned * sin[0].double()[:, None]

    def last(self, tokens: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [V'] after rows of tokens and features [n, d], and the state paired with the next row."""
        config, n, width = self.config, len(tokens), self.config["head_dim"]
        normed = self.norm(features, "hidden_norm")
        x = torch.cat([self.norm(self.embedding[tokens], "input_layernorm"), normed], -1)
        q, k, v = (self.linear(x, f"{part}_proj").view(n, -1, width) for part in "qkv")
        if "q_norm.weight" in self.w:
            q, k = self.norm(q, "q_norm"), self.norm(k, "k_norm")
        q, k = self.rotate(q)[-1], self.rotate(k)
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        mixed = []
        for h in range(config["num_attention_heads"]):
            chances = torch.softmax(k[:, h // group] @ q[h] / width**0.5, 0)
            mixed.append(chances @ v[:, h // group])
        residual = (normed if config.get("norm_before_residual") else features)[-1]
        residual = residual + self.linear(torch.cat(mixed), "o_proj")
        inner = self.norm(residual, "post_attention_layernorm")
        gate = self.linear(inner, "gate_proj")
        residual = residual + self.linear(gate * torch.sigmoid(gate) * self.linear(inner, "up_proj"), "down_proj")
        out = self.norm(residual, "norm")
        return self.head @ out, out if config.get("norm_output") else residual

    def draft(self, text: list[int], hidden: torch.Tensor, gamma: int) -> tuple[list[int], list[torch.Tensor]]:
        """gamma greedy tokens and their logits after a text with an unread last token.

        hidden: [n, m*d] of all tokens but the last.
        """
        rows, features = list(text[1:]), self.fuse(hidden)
        drafted, logits = [], []
        for _ in range(gamma):
            last, state = self.last(rows, features)
            best = int(last.argmax())
            token = best + int(self.w["d2t"][best]) if "d2t" in self.w else best
            drafted.append(token)
            logits.append(last)
            rows.append(token)
            features = torch.cat([features, state[None]])
        return drafted, logits
