"""All layers of a Llama-like decoder in one call, by one team of threads: `decoder_layer` after `decoder_layer`.

Between two layers there is then no Python, and between two operations no parallel region, only a barrier. Its bits are
those of the layers one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import fused
from .flat_batch import FlatBatch
from .layer import DecoderLayer, decoder_layer

Pool = tuple[torch.Tensor, torch.Tensor]
"""A layer's cache: keys [S, Hkv, D] and values [S, Hkv, Dv] by slot."""


class Decoder:
    """The constant part of all steps: L layers of one shape, prepared alike, with their caches.

    norm: [H], after the last layer. cos_sin: as of `fused.rope`. All of one type; eps is the layers'.

    Raises
    ------
    ValueError
        The layers differ in eps, in how they are prepared, or in number from the pools.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], pools: Sequence[Pool], norm: torch.Tensor, cos_sin: torch.Tensor
    ):
        weights, kinds, scales, outputs = ([x for layer in layers for x in layer._prepared[i]] for i in range(4))
        if len({layer.eps for layer in layers}) != 1 or len(scales) not in (0, len(weights)):
            raise ValueError("the layers of a decoder must be prepared alike and have one eps")
        if len(pools) != len(layers):
            raise ValueError(f"expected a pool for each of {len(layers)} layers, got {len(pools)}")
        self.layers, self.pools, self.norm, self.cos_sin = list(layers), list(pools), norm, cos_sin
        self._native = torch.classes.outrider.Decoder(
            weights,
            kinds,
            scales,
            outputs,
            [*(norm for layer in layers for norm in layer.norms), norm],
            [keys for keys, _ in pools],
            [values for _, values in pools],
            cos_sin,
            layers[0].eps,
            [layer.scale for layer in layers],
            [layer.window for layer in layers],
            [layer.logit_cap for layer in layers],
        )

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: FlatBatch,
        captured: Sequence[int] = (),
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run N embedded tokens `residual` [N, H], which is changed, through all layers and the last norm.

        positions: [N] int64. slots: [N] int64, where their keys and values go. batch: which tokens belong to which
        request. captured: rising numbers of C layers, none of them 0. causal: as of `flat_attention`.

        Returns
        -------
        The normed states [N, H], and the sums that entered the captured layers [N, C, H].
        """
        return self._native.forward(
            residual,
            positions,
            slots,
            batch.qo_indptr,
            batch.kv_lens,
            batch.rows,
            batch.page_table,
            causal,
            list(captured),
        )


def reference_forward(
    decoder: Decoder,
    residual: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    batch: FlatBatch,
    captured: Sequence[int] = (),
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `Decoder.forward`: the same bits, one layer after the other."""
    x, kept = None, []
    for number, (layer, pools) in enumerate(zip(decoder.layers, decoder.pools, strict=True)):
        if number in captured:
            kept.append(residual if x is None else x + residual)
        x = decoder_layer(x, residual, layer, positions, decoder.cos_sin, *pools, slots, batch, causal)
    assert x is not None
    normed = fused.add_rms_norm(x, residual, decoder.norm, decoder.layers[0].eps)
    return normed, torch.stack(kept, 1) if kept else residual.new_empty(len(residual), 0, residual.shape[1])
