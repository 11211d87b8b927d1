"""Find images in items' fields, and open them as models see them. Only this module uses Pillow."""

from __future__ import annotations

import base64
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.util.shared_files import is_transient, retried
from slurmgpu.util.users import expanded

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = str | bytes
"""The path of an image, or its bytes."""

MOST_PIXELS = 89_478_485
"""Pillow's own limit, above which it warns of a decompression bomb: 256 MiB as RGB."""

LEAST_SIDE = 4
"""The least side: image processors of transformers take 1 or 3 rows of pixels for channels."""

AS_THEY_ARE = ("JPEG", "PNG")
"""Image formats that every server takes."""
ORIENTATION = 0x0112
"""The EXIF tag for an image's rotation: 1 means none."""

EXPECTED = 'expected a path, bytes, a table with "bytes" or "path", or a list of these'


def check_pillow() -> None:
    """Refuse an environment without Pillow."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise SlurmGPUError(
            f"images is set, which needs Pillow, and that cannot be imported here ({error}). "
            "Install it with pip install 'slurmgpu[images]'."
        ) from error


def sources_of(field: str, value: Any, folder: str = "") -> tuple[ImageSource, ...]:
    """The images in an item's field; relative paths start at `folder`. ItemError unless there is one."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
    if is_list and not value:
        raise ItemError(f"field {field!r} is an empty list; expected at least one image")
    return tuple(_source(field, each, folder) for each in (value if is_list else [value]))


def _source(field: str, value: Any, folder: str) -> ImageSource:
    if isinstance(value, Mapping):
        held = value.get("bytes")
        value = value.get("path") if held is None else held
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None or value == "":
        raise ItemError(f"field {field!r} has no image; {EXPECTED}")
    if not isinstance(value, str):
        raise ItemError(f"field {field!r} holds {value!r:.80}; {EXPECTED}")
    if "://" in value or value.startswith("data:"):
        raise ItemError(f"field {field!r} holds the URL {value!r:.80}, and tasks do not download; {EXPECTED}")
    return str(expanded(folder) / value)


def place_of_images(roles: Sequence[str], *, behind_examples: bool) -> int:
    """The index of the message for images: the first user turn, or the last one after examples.

    ItemError if the user has no turn.
    """
    turns = [place for place, role in enumerate(roles) if role == "user"]
    if not turns:
        raise ItemError("the item has images, but its chat has no user turn for them")
    return turns[-1 if behind_examples else 0]


def open_image(source: ImageSource) -> Image:
    """The image, or its first frame, in RGB and rotated as its EXIF says; ItemError if it cannot be read."""
    return _opened(source)[0]


def data_url(source: ImageSource) -> str:
    """The image of `open_image` as a data: URL: the file itself if nothing had to be converted, else a PNG.

    ItemError if it cannot be read.
    """
    image, kind, held = _opened(source)
    if kind is None:
        written = io.BytesIO()
        image.save(written, "PNG", compress_level=1)
        kind, held = "png", written.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(held).decode('ascii')}"


def _opened(source: ImageSource) -> tuple[Image, str | None, bytes]:
    """The image, its format if nothing had to be converted, and the file's bytes."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    name = f"the image {source}" if isinstance(source, str) else f"the image of {len(source):,} bytes"
    held = _bytes_of(source)
    if not held:
        raise ItemError(f"{name} is empty: it has 0 bytes")
    try:
        found = Image.open(io.BytesIO(held))
        width, height = found.size
        if math.prod(found.size) > MOST_PIXELS:
            raise ItemError(f"{name} has {width} × {height} pixels; expected at most {MOST_PIXELS:,}")
        if min(found.size) < LEAST_SIDE:
            raise ItemError(f"{name} has {width} × {height} pixels; expected at least {LEAST_SIDE} in each direction")
        if found.mode in ("I", "F") or found.mode.startswith("I;"):
            raise ItemError(
                f"{name} has more than 8 bits of grey ({found.mode}), which RGB cannot hold; convert it to 8 bits"
            )
        is_plain = found.format in AS_THEY_ARE and found.mode == "RGB" and found.getexif().get(ORIENTATION, 1) == 1
        kind = str(found.format).lower() if is_plain else None
        return ImageOps.exif_transpose(found).convert("RGB"), kind, held
    except (ItemError, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise errors of many kinds for damaged files
        reason = "Pillow does not know its format" if isinstance(error, UnidentifiedImageError) else error
        raise ItemError(f"{name} cannot be read: {reason}") from error


def _bytes_of(source: ImageSource) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return retried(Path(source).read_bytes)
    except OSError as error:
        if is_transient(error):  # the file system does not answer, which is not the item's fault
            raise
        raise ItemError(f"the image {source} cannot be read: {os.strerror(error.errno or 0)}") from error
