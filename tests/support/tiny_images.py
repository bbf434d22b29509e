"""Tiny random models that read images, as folders, and small images."""

import base64
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tiny_families
import torch
from gguf_models import Model
from PIL import Image
from small_target import VOCAB, write_tokenizer
from transformers import AutoTokenizer, PreTrainedModel, RepetitionPenaltyLogitsProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

START, IMAGE, END, VIDEO = 3, 4, 5, 6
NAMES = {START: "<|vision_start|>", IMAGE: "<|image_pad|>", END: "<|vision_end|>", VIDEO: "<|video_pad|>"}
TOKENS = {
    "vision_start_token_id": START, "image_token_id": IMAGE, "vision_end_token_id": END, "video_token_id": VIDEO,
}  # fmt: skip
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LAYERS = {"depth": 2}
BY_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": LAYERS,
    "Qwen2_5_VLForConditionalGeneration": LAYERS | {"fullatt_block_indexes": [1], "window_size": 56},
    "Qwen3VLForConditionalGeneration": LAYERS | {"deepstack_visual_indexes": [0, 1]},
}
"""Fields of the image parts besides those of `tiny_families.VISION`."""


@dataclass(frozen=True)
class ReadsImages:
    """model: by Transformers, in float32. folder: the model's. processor: of its images."""

    model: PreTrainedModel
    folder: Path
    processor: Any
    tokenizer: Any

    @classmethod
    def write(cls, architecture: str, folder: Path) -> Self:
        config_class, fields = tiny_families.FAMILIES[architecture]
        plan = Model(config_class, "", {"vocab_size": VOCAB, **fields})
        vision = tiny_families.VISION[architecture] | BY_ARCHITECTURE[architecture]
        model = tiny_families.whole(plan, vision, **TOKENS)
        with torch.no_grad():  # images weigh as much as text
            for weight in model.model.visual.parameters():
                weight *= 3.0
        model.save_pretrained(folder)
        write_tokenizer(folder)
        _name_tokens(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        patch = model.config.vision_config.patch_size
        processor = Qwen2VLImageProcessorPil(
            patch_size=patch, size={"shortest_edge": (2 * patch) ** 2, "longest_edge": (16 * patch) ** 2}
        )
        processor.save_pretrained(folder)
        return cls(model, folder, processor, AutoTokenizer.from_pretrained(folder))

    def prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[Image.Image]]:
        """The ids and images of a chat. A message is a text, or a list of texts and images."""
        images = [part for _, parts in map(_parts, messages) for part in parts if not isinstance(part, str)]
        text = self.tokenizer.apply_chat_template(
            [
                {"role": role, "content": [_in_template(part) for part in parts]}
                for role, parts in map(_parts, messages)
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = []
        counts = iter(self._inputs(images)["image_grid_thw"].prod(1) // 4 if images else ())
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            ids += [token] * (int(next(counts)) if token == IMAGE else 1)
        return ids, images

    def _inputs(self, images: list[Image.Image]) -> Any:
        return self.processor(images=images, return_tensors="pt")

    @torch.inference_mode()
    def greedy(
        self, messages: list[dict[str, Any]], count: int, bias: dict[int, float] | None = None, penalty: float = 1.0
    ) -> tuple[list[int], list[float]]:
        """Transformers' greedy answer to a chat, and its tokens' log-probabilities without bias and penalty."""
        ids, images = self.prompt(messages)
        made, start, logprobs = dict(self._inputs(images)) if images else {}, len(ids), []
        for _ in range(count):
            inputs = torch.tensor([ids])
            kinds = {"mm_token_type_ids": (inputs == IMAGE).int()} if images else {}
            logits = self.model(input_ids=inputs, use_cache=False, **made, **kinds).logits[0, -1].float()
            biased = RepetitionPenaltyLogitsProcessor(penalty)(inputs, logits[None].clone())[0]
            for token, value in (bias or {}).items():
                biased[token] += value
            ids.append(int(biased.argmax()))
            logprobs.append(float(torch.log_softmax(logits, -1)[ids[-1]]))
        return ids[start:], logprobs


def _parts(message: dict[str, Any]) -> tuple[str, list[Any]]:
    content = message["content"]
    return message["role"], content if isinstance(content, list) else [content]


def _in_template(part: Any) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _name_tokens(folder: Path) -> None:
    """Rename special tokens of the tokenizer to the names of image tokens."""
    content = json.loads((folder / "tokenizer.json").read_text())
    old = {each["id"]: each["content"] for each in content["added_tokens"]}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for number, new in NAMES.items():
            text = text.replace(json.dumps(old[number]), json.dumps(new))
        (folder / name).write_text(text)


def noise(seed: int, width: int, height: int) -> Image.Image:
    """An image in which all squares differ."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (height // 7, width // 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse.repeat(7, 0).repeat(7, 1))


def in_request(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": parts[0] if isinstance(content, str) else [*map(_in_api, parts)]}
        for content, (role, parts) in ((message["content"], _parts(message)) for message in messages)
    ]


def _in_api(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part)}}


def data_url(image: Image.Image, kind: str = "png") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
