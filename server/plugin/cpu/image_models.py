"""Qwen's image models on a CPU: SGLang's class of their text, preceded by SGLang's image part.

A token of an image has three positions: frame, row and column (M-RoPE). In all other tokens they are equal, so decode
steps and verification use one, as for text (`image_tokens.rotary_positions`). A prompt with images runs layer by layer,
with its own table of angles: each pair of numbers of a head is rotated by one of the three positions.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import scaled_dot_product_attention

from .. import must_take
from ..text_alone import AXES

MANAGERS = ("scheduler", "tokenizer_manager", "tp_worker")
"""SGLang's modules that load tokenizers."""
GATED = ("gate_proj", "up_proj")
"""Weights of the image part that SGLang joins in one, `gate_up_proj`."""


def register() -> None:
    """Let SGLang load tokenizers alone: its processors import torchvision and fetch the URLs in requests. Ours is
    `server/http/requests/images.py`."""
    for module in MANAGERS:
        HookRegistry.register(f"sglang.srt.managers.{module}.get_processor", _tokenizer, HookType.REPLACE)
    for module in MANAGERS[:2]:
        for name in ("import_processors", "get_mm_processor"):
            HookRegistry.register(f"sglang.srt.managers.{module}.{name}", lambda *_, **__: None, HookType.REPLACE)


@functools.cache
def _tokenizer(path: str, image_processor_backend: Any = None, model_name: Any = None, **more: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(path, **more)


def add_to_text(text: Any, whole: Any) -> None:
    """Add the image part's fields to a text's configuration, and the whole model's architecture, by which SGLang knows
    that it reads images."""
    vision = whole.vision_config
    if not hasattr(vision, "in_chans"):  # its name in Qwen2-VL's folders and in SGLang
        vision.in_chans = vision.in_channels
    text.architectures = [*text.architectures, *whole.architectures]
    text.vision_config, text.image_token_id = vision, whole.image_token_id
    rope = text.rope_parameters or {}
    setattr(text, AXES, axes(rope["mrope_section"], interleaved=whole.architectures[0].startswith("Qwen3")))


def axes(section: list[int], *, interleaved: bool) -> list[int]:
    """Return which of a token's three positions rotates each pair of numbers of a head. section: pairs of each
    position."""
    if not interleaved:
        return [axis for axis, pairs in enumerate(section) for _ in range(pairs)]
    return [lane % 3 if lane < 3 * section[lane % 3] else 0 for lane in range(sum(section))]


@contextmanager
def turned_by(rope: Any, positions: torch.Tensor, axes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Let SGLang's rotary embedding rotate N tokens by their three positions [3, N]; yields the positions [N] to
    pass."""
    table = rope.cos_sin_cache
    cos, sin = table.chunk(2, dim=1)
    rows = positions[axes].T
    rope.cos_sin_cache = torch.cat([cos.gather(0, rows), sin.gather(0, rows)], 1)
    try:
        yield torch.arange(len(rows))
    finally:
        rope.cos_sin_cache = table


def positions_of(forward_batch: Any) -> torch.Tensor:
    """Return [3, N] int64 positions of the tokens of a prefill batch."""
    parts = []
    for start, count, images in zip(
        forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, forward_batch.mm_inputs, strict=True
    ):
        counted = torch.arange(start, start + count).expand(3, -1)
        if images is not None:
            known = images.mrope_positions[:, start : start + count]
            counted = torch.cat([known, counted[:, known.shape[1] :] + int(images.mrope_position_delta)], 1)
        parts.append(counted)
    return torch.cat(parts, 1)


def with_images(text_alone: type, text: type) -> type:
    """Return the class of a text that reads a whole model's weights, `text_alone`, extended by the image part. text:
    SGLang's own class of the text."""
    from sglang.srt.managers.mm_utils import pad_mm_tokens, prepare_mm_inputs
    from sglang.srt.managers.schedule_batch import Modality

    class TextAndImages(text_alone):  # type: ignore[misc]
        forward_of_texts = text.forward  # type: ignore[attr-defined]

        def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
            super().__init__(config, quant_config, prefix)
            self.visual: Any = _part_for_images(config)
            self.axes = torch.tensor(getattr(config, AXES))
            ropes = {layer.self_attn.rotary_emb for layer in self.model.layers}
            if len(ropes) != 1:
                raise ValueError("layers that turn tokens by angles of their own read no images")
            self.rope = ropes.pop()
            self.deepstack_visual_indexes = list(getattr(config.vision_config, "deepstack_visual_indexes", ()))
            self.use_deepstack = {Modality.IMAGE: True} if self.deepstack_visual_indexes else {}
            self.run_layers = _layers_with_images(self.model, len(self.deepstack_visual_indexes))

        def pad_input_ids(self, input_ids: Any, images: Any) -> Any:
            return pad_mm_tokens(input_ids, images)

        def get_image_feature(self, items: list[Any]) -> torch.Tensor:
            pixels = torch.cat([item.feature for item in items]).to(self.visual.dtype)
            return self.visual(pixels, grid_thw=torch.cat([item.image_grid_thw for item in items]))

        def separate_deepstack_embeds(self, embedding: torch.Tensor) -> tuple[torch.Tensor, ...]:
            width = self.config.hidden_size
            return embedding[:, :width], embedding[:, width:]

        @torch.no_grad()
        def forward(
            self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *args: Any, **more: Any
        ) -> Any:
            mode = forward_batch.forward_mode
            if not mode.is_extend() or mode.is_target_verify() or not forward_batch.contains_mm_inputs():
                return super().forward(input_ids, positions, forward_batch, *args, **more)
            three, added = positions_of(forward_batch), dict[str, torch.Tensor]()
            # This changes the ids that it is given, and forgets the batch's images.
            embedded = prepare_mm_inputs(
                input_ids.clone(), forward_batch, self.model, added, self, use_deepstack=self.use_deepstack
            )
            with turned_by(self.rope, three, self.axes) as turned:
                hidden = self.run_layers(self.model, input_ids, turned, forward_batch, embedded, **added)
            captured = None
            if self.capture_aux_hidden_states:
                hidden, captured = hidden
            return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, captured)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            of_images = []

            def others() -> Iterator[tuple[str, torch.Tensor]]:
                for name, weight in weights:
                    before, separator, rest = name.partition("visual.")
                    if separator and before in ("", "model."):
                        of_images.append((rest, weight))
                    else:
                        yield name, weight

            loaded = super().load_weights(others())
            _load(self.visual, of_images)
            return loaded

    return TextAndImages


def _part_for_images(config: Any) -> torch.nn.Module:
    """Create SGLang's image part, in the model's type; it is not quantised even if the model is."""
    from sglang.srt.layers.attention import vision

    name, shape = config.architectures[-1], config.vision_config
    must_take.replace(vision.VisionSdpaAttention, "forward", _attend)
    if name.startswith("Qwen2VL"):
        from sglang.srt.models.qwen2_vl import Qwen2VisionTransformer

        return Qwen2VisionTransformer(shape, norm_eps=config.rms_norm_eps, prefix="visual")
    if name.startswith("Qwen2_5"):
        from sglang.srt.models.qwen2_5_vl import Qwen2_5_VisionTransformer

        return Qwen2_5_VisionTransformer(shape, norm_eps=config.rms_norm_eps, prefix="visual")
    from sglang.srt.models.qwen3_vl import Qwen3VLMoeVisionModel

    return Qwen3VLMoeVisionModel(shape, norm_eps=config.rms_norm_eps, prefix="visual")


def _attend(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bsz: int, cu_seqlens: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Do SGLang's `VisionSdpaAttention.forward` image by image, or window by window: its own has a mask of all patches
    by all, and keeps 128 such masks."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    parts = [
        scaled_dot_product_attention(q[:, start:end], k[:, start:end], v[:, start:end], scale=self.scale)
        for start, end in pairwise(cu_seqlens.tolist())
        if end > start
    ]
    return torch.cat(parts, 1).transpose(0, 1)


def _layers_with_images(model: Any, depth: int) -> Any:
    """Return the function that runs a text's layers one by one. depth: first layers after which images are added
    again."""
    if not depth:
        return type(model).forward
    from sglang.srt.models.qwen3_vl import Qwen3LLMModel

    model.hidden_size, model.use_hf_deepstack_order = model.config.hidden_size, False
    model.deepstack_embed_to_decoder_layer = range(depth)

    def run(model: Any, ids: Any, positions: Any, forward_batch: Any, embedded: Any, **added: Any) -> Any:
        return Qwen3LLMModel.forward(model, ids, positions, forward_batch, embedded, **added)

    return run


def _load(part: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load the image part; raises KeyError for an unknown weight."""
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    parameters = dict(part.named_parameters())
    for name, weight in weights:
        *before, module, kind = name.replace("attn.qkv.", "attn.qkv_proj.").split(".")
        shard = (GATED.index(module),) if module in GATED else ()
        parameter = parameters[".".join([*before, "gate_up_proj" if shard else module, kind])]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight, *shard)
