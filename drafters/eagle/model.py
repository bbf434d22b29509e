"""An EAGLE-3 head in training: the arithmetic of `network.py`, with gradients and without a cache. Embedding and head
are not trained: they are the target's, or come from the folder that training continues."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ..block.layers import Rotary, rotate
from ..block.model import Attend, TrainedModel
from ..chain.drafter import SHARED
from ..chain.network import ATTENTION, LAYER, ChainWeights
from .checkpoint import check_target, load, shapes
from .config import EagleConfig


def key(name: str) -> str:
    """Return the key of a weight in `EagleModel.weights`: PyTorch allows no dots in the names of parameters."""
    return name.replace(".", "/")


class EagleModel(TrainedModel):
    """The weights of a head, under the names of `checkpoint.py`. layers: of the target that it reads. own: its own
    embedding and head, if any."""

    def __init__(self, weights: ChainWeights) -> None:
        super().__init__()
        config = self.config = weights.config
        self.layers, self.markov_head, self.confidence_head = weights.layers, None, None
        self.own = {name: value for name, value in weights.tensors.items() if name in SHARED}
        trained = {name: value for name, value in weights.tensors.items() if name not in SHARED}
        self.weights = nn.ParameterDict({key(name): nn.Parameter(value) for name, value in trained.items()})
        self.rotary = Rotary(config)
        vocab = torch.arange(config.logit_size) if weights.vocab is None else weights.vocab
        self.register_buffer("vocab", vocab, persistent=False)

    @classmethod
    def load(
        cls, folder: str | Path, target_layers: int, shape: tuple[int, ...], *, dtype: torch.dtype = torch.bfloat16
    ) -> EagleModel:
        """Load a folder's head for a target with `target_layers` layers and embedding [V, d]; raises
        CheckpointError."""
        weights = load(folder, target_layers, dtype=dtype)
        check_target(weights.config, weights.tensors, *shape)
        return cls(weights).to(dtype)  # the rotary table, too

    @classmethod
    def fresh(cls, config: EagleConfig, vocab: torch.Tensor | None) -> EagleModel:
        """Create a head of random weights."""
        made = {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02
            for name, shape in shapes(config, len(config.target_layers)).items()
        }
        return cls(ChainWeights(config, made, config.target_layers, vocab))

    @property
    def stored(self) -> ChainWeights:
        """The weights as they are now."""
        trained = {name.replace("/", "."): value.detach() for name, value in self.weights.items()}
        vocab = self.vocab if self.config.draft_vocab_size else None
        return ChainWeights(self.config, trained | self.own, self.layers, vocab)

    def weight(self, name: str) -> torch.Tensor | None:
        """Return the weight of this name, None where the head has none."""
        return self.weights.get(key(name))

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return features [N, d] of the target's hidden states [N, m*d_target]."""
        x = self._normed(hidden.to(self.weights[key("fc.weight")].dtype), "input_norm")
        parts = x.chunk(len(self.layers), -1)
        x = torch.cat([self._normed(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self._linear(x, "fc")

    def keys_values(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [N, Hkv, D] of rows of embeddings and features [N, d] of tokens at positions [N]."""
        inputs = torch.cat(self._inputs(embedded, features), -1)
        return self._rotated(self._heads(inputs, "k"), "k", positions), self._heads(inputs, "v")

    def step(
        self, embedded: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normed states [N, d], from which the head predicts, and the features [N, d] of the next rows.

        embedded, features, positions: as in `keys_values`.
        attend: attention over the rows themselves and the rows before.
        """
        embedding, normed = self._inputs(embedded, features)
        inputs, residual = torch.cat([embedding, normed], -1), normed if self.config.norm_before_residual else features
        q, k = (self._rotated(self._heads(inputs, part), part, positions) for part in "qk")
        attended = attend(0, q, k, self._heads(inputs, "v"))
        residual = residual + self._linear(attended.flatten(1), f"{ATTENTION}o_proj")
        x = self._normed(residual, f"{LAYER}post_attention_layernorm")
        gate, up = (self._linear(x, f"{LAYER}mlp.{part}_proj") for part in ("gate", "up"))
        residual = residual + self._linear(F.silu(gate) * up, f"{LAYER}mlp.down_proj")
        out = self._normed(residual, "norm")
        return out, out if self.config.norm_output else residual

    def _inputs(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._normed(embedded, f"{LAYER}input_layernorm"), self._normed(features, f"{LAYER}hidden_norm")

    def _heads(self, inputs: torch.Tensor, part: str) -> torch.Tensor:
        return self._linear(inputs, f"{ATTENTION}{part}_proj").unflatten(-1, (-1, self.config.head_dim))

    def _rotated(self, x: torch.Tensor, part: str, positions: torch.Tensor) -> torch.Tensor:
        """Norm and rotate. The first row is that of the second token."""
        rope = self.rotary.rows((positions - 1).clamp(0, self.config.max_positions - 1))
        return rotate(self._normed(x, f"{ATTENTION}{part}_norm"), rope)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Norm x; return it unchanged where the head has no such norm."""
        weight = self.weight(f"{name}.weight")
        return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weight(f"{name}.weight")
        assert weight is not None
        return F.linear(x, weight, self.weight(f"{name}.bias"))
