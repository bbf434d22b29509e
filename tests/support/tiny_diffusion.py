"""Small block-diffusion models with random weights, as folders, and their answers in plain torch."""

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
    "SDARForCausalLM": "sdar", "LlamaForCausalLM": "llama", "A2DQwen3LMHeadModel": "a2d-qwen3",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen", "SDARMoeForCausalLM": "sdar_moe", "LLaDA2MoeModelLM": "llada2_moe",
}  # fmt: skip
EXPERTS, CHOSEN, GROUPS, EXPERT_MLP, SCALE = 8, 2, 2, 64, 2.5
LLADA2_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
}
MASK, END = "<|MASK|>", "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class TinyDiffusion:
    """architecture: one of MODEL_TYPES. shift, context_mask: as in a converted Llama's config.json."""

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
        return self.architecture in ("SDARForCausalLM", "A2DQwen3LMHeadModel", "SDARMoeForCausalLM", "LLaDA2MoeModelLM")

    @property
    def llada2(self) -> bool:
        """The first layer has no experts, the following ones share one; half of each head is rotated."""
        return self.architecture == "LLaDA2MoeModelLM"

    def has_experts(self, layer: int) -> bool:
        return self.architecture == "SDARMoeForCausalLM" or (self.llada2 and layer > 0)

    @property
    def biased(self) -> bool:
        return self.architecture == "Fast_dLLM_QwenForCausalLM"

    def config(self, mask_token_id: int) -> dict[str, Any]:
        converted = self.architecture == "LlamaForCausalLM"
        more: dict[str, Any] = {"shift": self.shift, "context_mask": self.context_mask} if converted else {}
        if any(map(self.has_experts, range(self.layers))):
            more |= {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT_MLP}
            more |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        if self.llada2:
            more |= {"num_shared_experts": 1, "n_group": GROUPS, "topk_group": 1, "routed_scaling_factor": SCALE}
            more |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32"}
            more |= {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True, "use_bias": False}
            more |= {"use_qkv_bias": False, "norm_head": False, "embedding_dropout": 0.0, "output_dropout": 0.0}
        return more | {
            "architectures": [self.architecture], "model_type": MODEL_TYPES[self.architecture],
            "bd_size" if self.biased else "block_size": self.block_size, "mask_token_id": mask_token_id,
            "vocab_size": self.vocab_size, "hidden_size": self.width, "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": self.theta,
            "max_position_embeddings": self.context, "tie_word_embeddings": self.tied, "attention_bias": False,
            "torch_dtype": "float32",
        }  # fmt: skip

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
            }
            for name, size in self._mlps(i).items():
                of_layer |= {f"{name}.{part}_proj": (size, self.width) for part in ("gate", "up")}
                of_layer[f"{name}.down_proj"] = (self.width, size)
            if self.has_experts(i):
                of_layer["mlp.gate"] = (EXPERTS, self.width)
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in of_layer.items()}
        drawn = {name: torch.randn(shape, generator=draw) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        drawn["model.embed_tokens.weight"] *= self.width**0.5
        for name in drawn:
            if "o_proj" in name or "down_proj" in name:
                drawn[name] *= 3  # makes an answer depend on its surroundings
        if not self.tied:
            drawn["lm_head.weight"] *= 4
        for i in range(self.layers if self.biased else 0):
            for name in "qkv":
                weight = drawn[f"model.layers.{i}.self_attn.{name}_proj.weight"]
                drawn[f"model.layers.{i}.self_attn.{name}_proj.bias"] = torch.randn(len(weight), generator=draw)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["self_attn.q_norm", "self_attn.k_norm"] if self.normed else []
        for i in range(self.layers):
            for name in norms:
                size = self.head if "self_attn" in name else self.width
                drawn[f"model.layers.{i}.{name}.weight"] = 0.5 + torch.rand(size, generator=draw)
        for i in filter(self.has_experts, range(self.layers if self.llada2 else 0)):
            drawn[f"model.layers.{i}.mlp.gate.expert_bias"] = torch.randn(EXPERTS, generator=draw) / 4
        drawn["model.norm.weight"] = 0.5 + torch.rand(self.width, generator=draw)
        return drawn

    def _mlps(self, layer: int) -> dict[str, int]:
        if not self.has_experts(layer):
            return {"mlp": self.mlp}
        shared = {"mlp.shared_experts": EXPERT_MLP} if self.llada2 else {}
        return shared | {f"mlp.experts.{i}": EXPERT_MLP for i in range(EXPERTS)}

    def stored(self) -> dict[str, torch.Tensor]:
        weights = self.weights()
        if not self.llada2:
            return weights
        for i in range(self.layers):
            of_layer = f"model.layers.{i}."
            qkv = [weights.pop(f"{of_layer}self_attn.{name}_proj.weight") for name in "qkv"]
            weights[f"{of_layer}attention.query_key_value.weight"] = torch.cat(qkv)
        for ours, theirs in LLADA2_NAMES.items():
            weights = {name.replace(ours, theirs): weight for name, weight in weights.items()}
        return weights

    def write(self, folder: Path) -> Path:
        """Write weights, config.json and a byte-level tokenizer trained on the tests' prompts."""
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
        save_file(self.stored(), folder / "model.safetensors", {"format": "pt"})
        return folder


class Reference:
    """The model in plain torch, one forward over the whole sequence."""

    def __init__(self, shape: TinyDiffusion, mask_token_id: int) -> None:
        self.shape, self.mask, self.weights = shape, mask_token_id, shape.weights()

    def logits(self, tokens: Sequence[int], open_block: int) -> torch.Tensor:
        """[T, V] logits at all positions of a context that ends with block `open_block`."""
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
        """[B, V] logits at the positions of the open block, the last one."""
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
        rotated = shape.head // 2 if shape.llada2 else shape.head
        q, k = (torch.cat([_rotate(y[..., :rotated], shape.theta), y[..., rotated:]], -1) for y in (q, k))
        k, v = (y.repeat_interleave(shape.heads // shape.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.head**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w["self_attn.o_proj.weight"].T
        normed = _norm(x, w["post_attention_layernorm.weight"])
        if "mlp.gate.weight" not in w:
            return x + _mlp(normed, w, "mlp")
        for expert, weight in enumerate(self._chosen(normed @ w["mlp.gate.weight"].T, w).unbind(1)):
            x = x + weight[:, None] * _mlp(normed, w, f"mlp.experts.{expert}")
        return x + _mlp(normed, w, "mlp.shared_experts") if shape.llada2 else x

    def _chosen(self, scores: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        """[T, E] the weight of each expert's output: 0 for most."""
        scores = scores.sigmoid() if self.shape.llada2 else scores.softmax(1)
        choice = scores
        if self.shape.llada2:
            choice = scores + w["mlp.gate.expert_bias"]
            groups = choice.unflatten(1, (GROUPS, -1))
            best = groups.topk(2, -1).values.sum(-1).argmax(1)  # a group's score is the sum of its best two
            choice = groups.masked_fill(torch.arange(GROUPS)[:, None] != best[:, None, None], -torch.inf).flatten(1)
        kept = torch.zeros_like(scores).scatter(1, choice.topk(CHOSEN, 1).indices, 1.0) * scores
        return kept / kept.sum(1, keepdim=True) * (SCALE if self.shape.llada2 else 1.0)

    def answer(self, prompt: Sequence[int], count: int, *, threshold: float | None, per_step: int = 1) -> list[int]:
        """Greedy decoding: per step the `per_step` most confident tokens, or all above the threshold."""
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


def _mlp(x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    gate, up = (x @ w[f"{name}.{part}_proj.weight"].T for part in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ w[f"{name}.down_proj.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
