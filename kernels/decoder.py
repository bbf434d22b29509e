"""All layers of a Llama-like decoder (pre-norm attention, SiLU-gated MLP; Qwen2's biases, Qwen3's norms) in one call.

Between layers there is no Python, and between operations no parallel region, only a barrier of one team of threads. The
result has the bits of the single operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import fused
from .attention import flat_attention
from .flat_batch import FlatBatch
from .weights import Weight, multiply, parts_of

QKV, OUT, UP, DOWN = range(4)
"""Indices of a layer's weights."""
Pool = tuple[torch.Tensor, torch.Tensor]
"""A layer's cache: keys [S, Hkv, D] and values [S, Hkv, Dv] by slot."""
Added = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a layer's number, the index of one of its four weights, inputs [N, depth] and products [N, outputs] with their
bias to the products with an addition."""


@dataclass(frozen=True)
class DecoderLayer:
    """The constant part of a layer, the same in all steps.

    weights: four: queries|keys|values, attention's output, gate|up, down; without biases. Panels and blocks, of any
        kinds, may be mixed, also in the parts of one weight.
    bias: None, or of queries|keys|values, which are rounded before it is added.
    norms: two [H], before attention and before the MLP.
    head_norms: none or two [D], of each head of queries and of keys before they are rotated. eps: of all norms.
    scale, window, logit_cap: as in `flat_attention`.
    """

    weights: Sequence[Weight]
    norms: Sequence[torch.Tensor]
    eps: float
    scale: float
    window: int = -1
    logit_cap: float = 0.0
    head_norms: Sequence[torch.Tensor] = ()
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.weights) != 4 or len(self.norms) != 2:
            raise ValueError(f"a layer has 4 weights and 2 norms, got {len(self.weights)} and {len(self.norms)}")
        if len(self.head_norms) not in (0, 2):
            raise ValueError(f"queries and keys have a norm each or none, got {len(self.head_norms)}")
        if any(weight.bias is not None for weight in self.weights):
            raise ValueError("a layer whose weights have biases is not supported: use the single operations")
        if any(part.panels is None for weight in self.weights for part in parts_of(weight)):
            raise ValueError("the four weights must be prepared by the compiled kernels")


class Decoder:
    """The constant part of all steps: L layers of one shape, with their caches.

    norm: [H], after the last layer. cos_sin: as in `fused.rope`. All of one type; eps is the layers'.

    Raises
    ------
    ValueError
        The layers differ in eps, or there are more or fewer pools than layers.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], pools: Sequence[Pool], norm: torch.Tensor, cos_sin: torch.Tensor
    ):
        parts = [parts_of(weight) for layer in layers for weight in layer.weights]
        flat = [part for own in parts for part in own]
        prepared = list(map(len, parts)), *([getattr(x, name) for x in flat] for name in ("panels", "kind", "outputs"))
        if len({layer.eps for layer in layers}) != 1:
            raise ValueError("the layers of a decoder must have one eps")
        if len(pools) != len(layers):
            raise ValueError(f"expected a pool for each of {len(layers)} layers, got {len(pools)}")
        self.layers, self.pools, self.norm, self.cos_sin = list(layers), list(pools), norm, cos_sin
        norms = [*(weight for layer in layers for weight in layer.norms), norm]
        head_norms = [weight for layer in layers for weight in layer.head_norms]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        scores = [(layer.scale, layer.window, layer.logit_cap) for layer in layers]
        self._native = torch.classes.outrider.Decoder(
            *prepared, norms, head_norms, biases, *zip(*pools, strict=True), cos_sin, layers[0].eps,
            *zip(*scores, strict=True),
        )  # fmt: skip

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: FlatBatch,
        captured: Sequence[int] = (),
        causal: bool = True,
        read: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run N embedded tokens `residual` [N, H], which is changed, through all layers and the last norm.

        positions: [N] int64. slots: [N] int64, where their keys and values go. batch: which tokens belong to which
            request.
        captured: ascending numbers of C layers, none of them 0. causal: as in `flat_attention`.
        read: [M] int64, ascending rows with wanted output; None: all. For the rest the last layer computes only keys
            and values, and `residual` is then not the sum.

        Returns
        -------
        The normed states [N, H], or [M, H] of the rows read, and the sums that entered the captured layers [N, C, H].
        """
        arrays = batch.qo_indptr, batch.kv_lens, batch.rows, batch.page_table
        return self._native.forward(residual, positions, slots, *arrays, causal, list(captured), read)


def forward_by_operations(
    decoder: Decoder,
    residual: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    batch: FlatBatch,
    captured: Sequence[int] = (),
    causal: bool = True,
    read: torch.Tensor | None = None,
    added: Added | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `Decoder.forward` one operation after the other: its reference, with the same bits, slower. added: changes
    the products; None: none."""

    def product(place: int, x: torch.Tensor) -> torch.Tensor:
        out = multiply(x, layer.weights[place])
        out = out if place or layer.bias is None else out + layer.bias
        return out if added is None else added(number, place, x, out)

    x, kept = torch.zeros_like(residual), []
    for number, (layer, (k_pool, v_pool)) in enumerate(zip(decoder.layers, decoder.pools, strict=True)):
        (before, between), heads, width = layer.norms, *k_pool.shape[1:]
        normed = fused.add_rms_norm(x, residual, before, layer.eps)
        if number in captured:
            kept.append(residual.clone())
        qkv = product(QKV, normed).view(len(residual), -1, width)
        q, k, v = qkv.split([qkv.shape[1] - 2 * heads, heads, heads], dim=1)
        if layer.head_norms:
            q, k = (fused.rms_norm(h.contiguous(), w, layer.eps) for h, w in zip((q, k), layer.head_norms, strict=True))
        fused.rope_write(q, k, v, positions, decoder.cos_sin, k_pool, v_pool, slots)
        attended = flat_attention(
            q, k_pool, v_pool, batch, scale=layer.scale, causal=causal, window=layer.window, logit_cap=layer.logit_cap
        )
        normed = fused.add_rms_norm(product(OUT, attended.flatten(1)), residual, between, layer.eps)
        x = product(DOWN, fused.silu_mul(product(UP, normed)))
    normed = fused.add_rms_norm(x, residual, decoder.norm, decoder.layers[0].eps)
    normed = normed if read is None else normed[read]
    return normed, torch.stack(kept, 1) if kept else residual.new_empty(len(residual), 0, residual.shape[1])
