"""How ConvE lays an embedding out as an image: what its layers' sizes allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.kge.naming import Stack

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor by its canonical name."""

ANOTHER = 'Name your model\'s class instead: architecture = "file.py:Class".'


def check_sizes(shapes: Shapes, path: str | Path) -> None:
    """Refuse layers that do not fit each other."""
    conv = shapes["conv.weight"]
    if len(conv) != 4 or conv[1] != 1:
        raise SlurmGPUError(f"{path}: expected a convolution (channels, 1, height, width), found {conv}. {ANOTHER}")
    (n_entities, width), channels = shapes["entity"], conv[0]
    expected = {"relation": (shapes["relation"][0], width), "fc.weight": (width, *shapes["fc.weight"][1:])}
    sizes = {"bn0": 1, "conv": channels, "bn1": channels, "fc": width, "bn2": width}
    expected |= {name: (sizes[name.split(".")[0]],) for name in shapes if "." in name and len(shapes[name]) == 1}
    if "bias" in shapes:  # PyKEEN keeps it as a table of one column
        expected["bias"] = (n_entities, *[1] * (len(shapes["bias"]) - 1))
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise SlurmGPUError(
                f"{path}: expected {name} of shape {shape} beside {n_entities:,} entities, embeddings of {width} "
                f"and {channels} channels, found {shapes[name]}. {ANOTHER}"
            )


def image_of(shapes: Shapes, stack: Stack, asked: Sequence[int] | None, path: str | Path) -> tuple[int, int]:
    """The (height, width) of one embedding's image: what is asked for if it fits, else the only one that fits."""
    fitting = {way: _fitting(shapes, way) for way in get_args(Stack)}
    images = fitting[stack]
    if asked is not None:
        image = (asked[0], asked[1])
        if image in images:
            return image
        other = next((way for way in fitting if image in fitting[way]), None)
        hint = f'It would with stack = "{other}".' if other else f"Those that would: {_said(images) or 'none'}."
        raise SlurmGPUError(f"{path}: an image of {_said([image])} does not fit {_fc(shapes)} {_way(stack)}. {hint}")
    if len(images) == 1:
        return images[0]
    if not images:
        raise SlurmGPUError(f"{path}: no image fits {_fc(shapes)} {_way(stack)}. {ANOTHER}")
    raise SlurmGPUError(
        f"{path}: {_said(images)} all fit {_fc(shapes)} {_way(stack)}, and nothing tells which it was. Set image to "
        f"the [height, width] that the model was trained with."
    )


def image_told(told: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image that a checkpoint's config tells."""
    found: Any = told.get("image") or (told.get("embedding_height"), told.get("embedding_width"))
    if isinstance(found, (list, tuple)) and len(found) == 2 and all(isinstance(size, int) for size in found):
        return found[0], found[1]
    return None


def _fitting(shapes: Shapes, stack: Stack) -> list[tuple[int, int]]:
    width, (channels, _, *kernel) = shapes["entity"][1], shapes["conv.weight"]
    found = []
    for height in (size for size in range(1, width + 1) if width % size == 0):
        image = (height, width // height)
        whole = (2 * image[0], image[1]) if stack == "height" else (image[0], 2 * image[1])
        rows, columns = (size - cut + 1 for size, cut in zip(whole, kernel, strict=True))
        if min(rows, columns) > 0 and channels * rows * columns == shapes["fc.weight"][1]:
            found.append(image)
    return found


def _fc(shapes: Shapes) -> str:
    return f"the {shapes['fc.weight'][1]:,} inputs of fc for embeddings of {shapes['entity'][1]}"


def _way(stack: Stack) -> str:
    return "with the images one above the other" if stack == "height" else "with the images side by side"


def _said(images: Sequence[tuple[int, int]]) -> str:
    return " and ".join(f"{height}×{width}" for height, width in images)
