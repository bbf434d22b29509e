"""Check a request's images before decoding, and prepare them for SGLang's scheduler in a thread. None is fetched."""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ...plugin.text_alone import AXES
from .. import offload
from ..errors import ApiError, invalid_value
from .protocol import ChatRequest, TextRequest

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
URL = re.compile(rf"data:image/(?:{'|'.join(FORMATS).lower()});base64,")
MAX_PIXELS = 2**25
"""Pixels of an image as sent: 100 MB once it is decoded."""
MAX_PATCHES = 2**14
"""Patches of all images of a request. The model's attention compares every pair."""


class Images:
    """SGLang's multimodal processor for the images of one model.

    processor: Transformers' image processor. token: the id of an image in a prompt. context_length: tokens of prompt
    and answer together.
    """

    prefer_tokenized_input = True

    def __init__(self, processor: Any, token: int, context_length: int) -> None:
        self._processor, self._token, self.context_length = processor, token, context_length
        self._merged = processor.merge_size**2
        """Patches that make a token."""

    def check(self, part: dict[str, Any], place: str) -> int:
        """Return the patches of an image in a message. Raises ApiError for a part that is no supported image."""
        image = part.get("image_url")
        if not isinstance(image, dict) or not isinstance(url := image.get("url"), str):
            raise ApiError(f"'{place}.image_url.url' has to be a string", param=place, code="invalid_type")
        options = {name: part[name] for name in part.keys() - {"type", "image_url"}}
        options |= {f"image_url.{name}": image[name] for name in image.keys() - {"url"}}
        for name, value in options.items():
            if value not in (None, "auto"):
                where = f"{place}.{name}"
                raise invalid_value(where, f"{where!r} cannot be set: images get the model's own sizes; leave it out")
        if not URL.match(url):
            names = ", ".join(FORMATS)
            raise ApiError(
                f"'{place}.image_url.url' has to hold the image, as data:image/png;base64,… ({names}): this server "
                "fetches nothing",
                param=place,
                code="unsupported_content",
            )
        try:
            width, height = opened(url).size
            return int(self._processor.get_number_of_image_patches(height, width))  # raises for an extreme aspect ratio
        except ValueError as error:
            raise invalid_value(place, f"{place!r}: {error}") from None

    def tokens_of(self, patches: int) -> int:
        """Return the number of tokens of this many patches in a request. Raises ApiError for too many."""
        if patches > MAX_PATCHES:
            raise invalid_value(
                "messages", f"the images make {patches} patches; {MAX_PATCHES} are allowed: send smaller ones or fewer"
            )
        return patches // self._merged

    def within(self, request: ChatRequest | TextRequest) -> bool:
        """Return True if a checked request has an image."""
        return isinstance(request, ChatRequest) and any(
            part.type == "image_url"
            for message in request.messages
            if isinstance(message.content, list)
            for part in message.content
        )

    async def process_mm_data_async(self, *, image_data: Sequence[Any], input_text: list[int], **_: Any) -> Any:
        """Return SGLang's `MultimodalProcessorOutput` of a prompt's ids and its images."""
        urls = [image.url for image in image_data]
        return await offload.run(sum(map(len, urls)), self._prepared, input_text, urls)

    def _prepared(self, ids: Sequence[int], urls: Sequence[str]) -> Any:
        from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

        if (count := ids.count(self._token)) != len(urls):
            raise ValueError(f"the prompt has places for {count} images, and {len(urls)} came with it")
        made = self._processor(images=[decoded(url) for url in urls], return_tensors="pt")
        grids = made["image_grid_thw"]
        places, expanded = placed(ids, self._token, (grids.prod(1) // self._merged).tolist())
        items = []
        for pixels, grid, place in zip(made["pixel_values"].split(grids.prod(1).tolist()), grids, places, strict=True):
            item = MultimodalDataItem(
                modality=Modality.IMAGE,
                feature=pixels,
                offsets=[place],
                model_specific_data={"image_grid_thw": grid[None]},
            )
            # SGLang identifies an image by its pixels alone: images of one colour would be equal in any shape.
            item.set_identity(hashlib.sha256(grid.numpy().tobytes() + pixels.numpy().tobytes()).digest())
            items.append(item)
        positions = positions_of(len(expanded), places, grids // torch.tensor([1, *[self._processor.merge_size] * 2]))
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=expanded,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(expanded, items),
            im_token_id=self._token,
            mrope_positions=positions,
            mrope_position_delta=positions.max() + 1 - len(expanded),
        )


def opened(url: str) -> Image.Image:
    """Return the image in a data URL, not decoded yet. Raises ValueError, in one line, for other URLs."""
    try:
        data = base64.b64decode(url[url.index(",") + 1 :], validate=True)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except binascii.Error:
        raise ValueError("it is not base64") from None
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError):
        raise ValueError(f"it is no image of {', '.join(FORMATS)}") from None
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} × {image.height} pixels; {MAX_PIXELS} are allowed")
    return image


def decoded(url: str) -> Image.Image:
    """Return the image in a checked URL, turned as its camera says; raises ValueError for a damaged one."""
    image = opened(url)
    try:
        image.getexif()  # read, and then dropped: Pillow would write it again, and fails at odd fields
        image.info.pop("exif", None)
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"an image is damaged: {error}") from None


def placed(ids: Sequence[int], token: int, counts: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return first and last place of each image, and the prompt with all its tokens. counts: tokens of each image."""
    left, places, expanded = iter(counts), list[tuple[int, int]](), list[int]()
    for each in ids:
        count = next(left) if each == token else 1
        if each == token:
            places.append((len(expanded), len(expanded) + count - 1))
        expanded += [each] * count
    return places, expanded


def positions_of(length: int, places: Sequence[tuple[int, int]], grids: torch.Tensor) -> torch.Tensor:
    """Return [3, length] frame, row and column of each token. grids: [images, 3] frames, rows and columns of images.

    A token of text comes one place after all earlier tokens, in each of the three.
    """
    positions, behind, end = torch.empty(3, length, dtype=torch.int64), 0, 0
    for (first, last), grid in zip(places, grids.tolist(), strict=True):
        positions[:, end:first] = torch.arange(behind, behind + first - end)
        behind, end = behind + first - end, last + 1
        positions[:, first:end] = behind + torch.cartesian_prod(*map(torch.arange, grid)).T
        behind += max(grid)
    positions[:, end:] = torch.arange(behind, behind + length - end)
    return positions


def install(manager: Any, context_length: int) -> Images | None:
    """Make SGLang's tokenizer manager read images; None for a model without images."""
    if not hasattr(manager.model_config.hf_config, AXES):
        return None
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(manager.model_path)
    manager.mm_processor = Images(processor, manager.model_config.image_token_id, context_length)
    return manager.mm_processor
