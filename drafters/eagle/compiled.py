"""An EAGLE-3 head's chain in one call of the compiled kernels; `network.py` is its plain torch version."""

from typing import Any

import torch

from outrider.kernels.blocks import KINDS, BlockRows
from outrider.kernels.cpu import native

from ..base import DraftBatch, Rows
from ..block.compiled import native_arguments
from ..confidence import MIX
from .config import EagleConfig
from .network import EagleNetwork


class CompiledChain:
    """The parts that the call needs: a network, the embedding [V, d] and the draft vocabulary [V'] (None: all
    tokens)."""

    def __init__(self, network: EagleNetwork, embedding: Rows, vocab: torch.Tensor | None) -> None:
        self.network, self.embedding, self.vocab = network, embedding, vocab
        self.weights = [network.qkv, network.out, network.gate_up, network.down, network.head]
        self._native: Any = None

    def allocate(self, features: torch.Tensor) -> None:
        """Work on these features [S, d] and the network's keys and values from now on."""
        net, config = self.network, self.network.config
        none = features.new_empty(0)
        of_heads = [none if norm is None else norm for norm in (net.q_norm, net.k_norm)]
        norms = [net.hidden_norm, *of_heads, net.mlp_norm, net.norm, net.embedding_norm]
        bias = None if net.qkv.bias is None else net.qkv.bias[: net.qkv.outputs].to(features.dtype)
        if isinstance(self.embedding, BlockRows):
            rows, kind = self.embedding.raw, list(KINDS).index(self.embedding.kind)
        else:
            rows, kind = self.embedding, -1
        self._native = torch.classes.outrider.ChainDrafter(
            *native_arguments(self.weights), norms, net.keys, net.values, net.cos_sin, bias, features, rows, kind,
            self.vocab, MIX, config.norm_before_residual, config.norm_output, config.rms_norm_eps,
        )  # fmt: skip

    def propose(self, batch: DraftBatch, gamma: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return tokens [R, gamma], probs [R, gamma, V'] (None: all greedy or not wanted), confidence [R, gamma]."""
        return self._native.propose(
            batch.anchors, batch.seq_lens, batch.rows, batch.page_table, *batch.rules,
            batch.keys[:, :gamma].contiguous(), gamma, batch.wants_probs,
        )  # fmt: skip


def compile_chain(network: EagleNetwork, embedding: Rows, vocab: torch.Tensor | None) -> CompiledChain | None:
    """Prepare a head's chain once; None where compiled kernels are missing or do not support its shape. embedding: [V,
    d], of the head or the target."""
    config: EagleConfig = network.config
    even = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0 and config.head_dim % 32 == 0
    if not even or network.out.bias is not None or not native.fits(network.norm):
        return None
    made = CompiledChain(network, embedding, vocab)
    if any(weight.panels is None for weight in made.weights):
        return None
    if isinstance(embedding, BlockRows):
        fits = network.dtype == torch.bfloat16 and embedding.raw.is_contiguous()
    else:
        fits = embedding.dtype == network.dtype and embedding.is_contiguous()
    return made if fits else None
