"""Small block-diffusion models with random weights, in folders as users have them, and what they say by plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PROMPTS = Path(__file__).parents[1] / "lossless" / "prompts.txt"
MODEL_TYPES = {
    "SDARForCausalLM": "sdar",
    "LlamaForCausalLM": "llama",
    "A2DQwen3LMHeadModel": "a2d-qwen3",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen",
}
MASK, END = "<|MASK|>", "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class TinyDiffusion:
    """architecture: one of MODEL_TYPES. shift, context_mask: of a converted Llama, whose config.json says them."""

    architecture: str = "SDARForCausalLM"
    block_size: int = 4
    tied: bool = True
    shift: bool = False
    context_mask: str = "block"
    vocab_size: int = 512
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head: int = 32
    mlp: int = 96
    layers: int = 2
    context: int = 1024
    theta: float = 50_000.0

    @property
    def normed(self) -> bool:
        """Queries and keys have norms."""
        return self.architecture in ("SDARForCausalLM", "A2DQwen3LMHeadModel")

    @property
    def biased(self) -> bool:
        """Queries, keys and values have biases."""
        return self.architecture == "Fast_dLLM_QwenForCausalLM"

    def config(self, mask_token_id: int) -> dict[str, Any]:
        converted = self.architecture == "LlamaForCausalLM"
        more: dict[str, Any] = {"shift": self.shift, "context_mask": self.context_mask} if converted else {}
        return more | {
            "architectures": [self.architecture],
            "model_type": MODEL_TYPES[self.architecture],
            "bd_size" if self.biased else "block_size": self.block_size,
            "mask_token_id": mask_token_id,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": self.theta,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "torch_dtype": "float32",
        }

    def weights(self) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(11)
        q, kv = self.heads * self.head, self.kv_heads * self.head
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.width)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.width)
        for i in range(self.layers):
            of_layer = {
                "self_attn.q_proj": (q, self.width),
                "self_attn.k_proj": (kv, self.width),
                "self_attn.v_proj": (kv, self.width),
                "self_attn.o_proj": (self.width, q),
                "mlp.gate_proj": (self.mlp, self.width),
                "mlp.up_proj": (self.mlp, self.width),
                "mlp.down_proj": (self.width, self.mlp),
            }
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
        found = {name: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        found["model.embed_tokens.weight"] *= self.width**0.5
        for name in found:
            if "o_proj" in name or "down_proj" in name:
                found[name] *= 3  # so that an answer depends on what is around it
        if not self.tied:
            found["lm_head.weight"] *= 4
        for i in range(self.layers if self.biased else 0):
            for name in "qkv":
                weight = found[f"model.layers.{i}.self_attn.{name}_proj.weight"]
                found[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.randn(len(weight), generator=draw)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if self.normed else []
        for i in range(self.layers):
            for name in norms:
                size = self.head if "self_attn" in name else self.width
                found[f"model.layers.{i}.{name}.weight"] = 0.5 + torch.rand(size, generator=draw)
        found["model.norm.weight"] = 0.5 + torch.rand(self.width, generator=draw)
        return found

    def write(self, folder: Path) -> Path:
        """The folder, with weights, config.json and a byte-level tokenizer that has learnt the prompts of the tests."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[END, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train([str(PROMPTS)], trainer)
        saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, mask_token=MASK)
        saved.chat_template = TEMPLATE
        saved.save_pretrained(folder)
        config = self.config(saved.convert_tokens_to_ids(MASK)) | {"eos_token_id": saved.convert_tokens_to_ids(END)}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self.weights(), folder / "model.safetensors", {"format": "pt"})
        return folder


class Reference:
    """The model by plain torch, in one forward over the whole sequence; nothing here is the server's."""

    def __init__(self, shape: TinyDiffusion, mask_token_id: int) -> None:
        self.shape, self.mask, self.weights = shape, mask_token_id, shape.weights()

    def logits(self, tokens: Sequence[int], open_block: int) -> torch.Tensor:
        """[T, V] of the states at all positions of a context whose block `open_block` is the last."""
        shape, w = self.shape, self.weights
        count, block = len(tokens), shape.block_size
        at = torch.arange(count)
        seen = at[None, :] // block <= at[:, None] // block
        if shape.context_mask == "causal":
            causal = (at[:, None] // block < open_block) & (at[None, :] > at[:, None])
            seen &= ~causal
        x = w["model.embed_tokens.weight"][torch.tensor(tokens)]
        for i in range(shape.layers):
            x = self._layer(x, f"model.layers.{i}.", seen)
        head = w["model.embed_tokens.weight"] if shape.tied else w["lm_head.weight"]
        return _norm(x, w["model.norm.weight"]) @ head.T

    def says(self, tokens: Sequence[int], open_block: int) -> torch.Tensor:
        """[B, V], the logits of the positions of the open block, which is the last."""
        logits = self.logits(tokens, open_block)
        return (logits.roll(1, 0) if self.shape.shift else logits)[open_block * self.shape.block_size :]

    def _layer(self, x: torch.Tensor, name: str, seen: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        w = {key.removeprefix(name): value for key, value in self.weights.items() if key.startswith(name)}
        normed = _norm(x, w["input_layernorm.weight"])
        biases = {n: w.get(f"self_attn.{n}_proj.bias", torch.zeros(1)) for n in "qkv"}
        qkv = (normed @ w[f"self_attn.{n}_proj.weight"].T + biases[n] for n in "qkv")
        q, k, v = (y.unflatten(1, (-1, shape.head)) for y in qkv)
        if shape.normed:
            q, k = _norm(q, w["self_attn.q_norm.weight"]), _norm(k, w["self_attn.k_norm.weight"])
        q, k = _rotate(q, shape.theta), _rotate(k, shape.theta)
        k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w["self_attn.o_proj.weight"].T
        normed = _norm(x, w["post_attention_layernorm.weight"])
        gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
        return x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T

    def answer(self, prompt: Sequence[int], count: int, *, threshold: float | None, per_step: int = 1) -> list[int]:
        """Greedy decoding: per step the most confident tokens, `per_step`, or all above the threshold."""
        block, tokens = self.shape.block_size, list(prompt)
        while len(tokens) < len(prompt) + count:
            start = len(tokens) // block * block
            context, state = tokens[:start], tokens[start:] + [self.mask] * (start + block - len(tokens))
            while self.mask in state:
                said = self.says(context + state, start // block)
                probs = said.softmax(1)
                said[:, self.mask] = -torch.inf
                best = said.argmax(1)
                masked = [i for i in range(block) if state[i] == self.mask]
                ranked = sorted(masked, key=lambda i: -float(probs[i, best[i]]))
                above = [i for i in ranked if threshold is not None and float(probs[i, best[i]]) > threshold]
                for i in above or ranked[: 1 if threshold is not None else per_step]:
                    state[i] = int(best[i])
            tokens += state[len(tokens) - start :]
        return tokens[len(prompt) : len(prompt) + count]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
