"""Images of requests, as they are decoded."""

import base64
import io

import pytest
from PIL import Image

from outrider.server.http.requests import images

DESCRIPTION, POSITIONING = b"\x01\x0e\x00\x02", b"\x02\x13\x00\x02"
"""Tag and type of two fields; the second one should be a number, and is a text."""


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_photo_with_odd_metadata_is_turned(form: str) -> None:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # turned by 90 degrees
    exif[0x010E] = "odd"
    metadata = exif.tobytes()
    for order in (1, -1):
        metadata = metadata.replace(_ordered(DESCRIPTION, order), _ordered(POSITIONING, order))
    Image.new("RGB", (20, 10)).save(file, form, exif=metadata)
    url = f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    assert images.decoded(url).size == (10, 20)


def _ordered(field: bytes, order: int) -> bytes:
    """The two numbers of a field, big-endian (1) or little-endian (-1)."""
    return field[:2][::order] + field[2:][::order]
