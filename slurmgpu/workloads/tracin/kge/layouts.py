"""Recognise the knowledge-graph model in a checkpoint by names and shapes only; nothing here needs torch.

Our names ("canonical"): ConvE has `entity` (N, d), `relation` (R, d), `bn0`, `conv`, `bn1`, `fc`, `bn2`, with `.weight`
and `.bias`, and `.running_mean` and `.running_var` of the three norms, and `bias` (N,) if it has one for each tail.
DistMult and TransE have `entity` (N, d) and `relation` (R, d). ComplEx has `entity` (N, 2d) and `relation` (R, 2d),
real halves first.

What the shapes leave open is read from the checkpoint's `config` or `model_config`, under the keys `model` or
`architecture`, `image` or `embedding_height` and `embedding_width`, `stack`, `inverse`, `norm`, `learning_rate`, `loss`
and `label_smoothing`. Anything still open is an error, not a guess. `seed` and others distinguish trainings;
`dictionaries` has digests of the dictionaries that the model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast, get_args

from slurmgpu.errors import SlurmGPUError
from slurmgpu.workloads.tracin.kge.graph import Dictionary
from slurmgpu.workloads.tracin.kge.learning_rates import NO_RATE, Rate, learning_rate_in
from slurmgpu.workloads.tracin.kge.parameter_names import (
    DETTMERS,
    NAMINGS,
    NO_PARAMETERS,
    Architecture,
    Inverse,
    ParameterNames,
    Stack,
    unwrapped,
)
from slurmgpu.workloads.tracin.kge.torch_archive import state_of, told_in

Shapes = Mapping[str, tuple[int, ...]]

ANOTHER = 'Name your own model class instead: architecture = "file.py:Class".'


@dataclass(frozen=True)
class Layout:
    """A checkpoint's model, and the names of its tensors."""

    architecture: Architecture
    n_entities: int
    """Rows of the entity table."""
    n_relations: int
    """Rows of the relation table, inverse relations included."""
    embedding_dim: int
    """d; for ComplEx the number of complex numbers, so its tables have 2d columns."""
    names: Mapping[str, str]
    """Canonical name -> key in the file's state dict."""
    inverse: Inverse | None = "none"
    """Where the inverse of relation r is: row 2r + 1 (r itself in 2r), row r + R / 2, or nowhere.

    Before `check` it is the place that the names imply, if any.
    """
    has_bias: bool = False
    """Whether each tail has a bias (ConvE)."""
    channels: int | None = None
    kernel: tuple[int, int] | None = None
    image: tuple[int, int] | None = None
    """(height, width) of one embedding's image (ConvE); the images of head and relation are then stacked."""
    stack: Stack | None = None
    """Whether the two images are stacked one above the other, or side by side."""
    complex_pairs: bool = False
    """Whether the file alternates real and imaginary parts (ComplEx)."""
    norm: float | None = None
    """The p of TransE's distance."""
    learning_rate: Rate = NO_RATE
    """The learning rate from the optimizer's state or the config."""
    loss: str | None = None
    """The training loss as named in the config, if it is."""
    shapes: Shapes = field(default_factory=dict)
    """The shape of each tensor by its canonical name."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's config."""


def recognise(
    content: Mapping[str, Any],
    path: str | Path,
    *,
    architecture: str = "auto",
    image: Sequence[int] | None = None,
    stack: str | None = None,
    norm: float | None = None,
) -> Layout:
    """Recognise the model in a checkpoint's content by the names and shapes of its tensors or their stand-ins.

    The settings `architecture`, `image`, `stack` and `norm` override the checkpoint's config.
    """
    state = state_of(content, path)
    keys = unwrapped(state)
    naming = next((naming for naming in NAMINGS if naming.is_of(keys)), None)
    if naming is None:
        some = ", ".join(sorted(state)[:5])
        raise SlurmGPUError(
            f"{path}: expected the tables of entities and relations under names of PyKEEN, of ConvE or of slurmgpu, "
            f"found {some} … Rename them; for ConvE use the names of {DETTMERS.program}: {DETTMERS.entity}, "
            f"{DETTMERS.relation}, {', '.join(DETTMERS.layers.values())}, {DETTMERS.bias}. Or name your own model "
            f'class, architecture = "file.py:Class".'
        )
    shapes = {name: tuple(state[key].shape) for name, key in keys.items()}
    told = told_in(content)
    if naming.layers["conv"] + ".weight" in keys:
        if architecture not in ("auto", "conve"):
            raise SlurmGPUError(f'{path} holds a ConvE, and architecture is "{architecture}". Remove architecture.')
        layout = _conve(naming, shapes, told, path, image, stack)
    else:
        layout = _two_tables(naming, shapes, told, path, architecture, norm)
    if norm is not None and layout.architecture != "transe":
        raise SlurmGPUError(
            f"norm is the p of TransE's distance, and {path} is read as {layout.architecture}. Remove norm."
        )
    names = {name: keys[key] for name, key in layout.names.items()}
    canonical = {name: shapes[key][:1] if name == "bias" else shapes[key] for name, key in layout.names.items()}
    loss = told["loss"] if isinstance(told.get("loss"), str) else None
    rate = learning_rate_in(content, path)
    return replace(layout, names=names, shapes=canonical, learning_rate=rate, loss=loss, told=told)


def check(
    layout: Layout, path: str | Path, entities: Dictionary, relations: Dictionary, inverse: str | None = None
) -> Layout:
    """The layout with the place of inverse relations; SlurmGPUError if the tables do not fit the dictionaries.

    The setting `inverse` overrides what the checkpoint's names imply.
    """
    if layout.n_entities != entities.size:
        raise SlurmGPUError(
            f"{path} has {layout.n_entities:,} entity rows, and the ids of {entities.path} need "
            f"{entities.size:,}. Use the dictionary that the model was trained with; every row needs a name in it."
        )
    found, wanted = layout.n_relations, relations.size
    if found == wanted and inverse in (None, "none"):
        return replace(layout, inverse="none")
    if found == 2 * wanted and (lie := inverse or layout.inverse) in ("interleaved", "appended"):
        return replace(layout, inverse=cast(Inverse, lie))
    said = f"{path} has {found:,} relation rows, and {relations.path} has ids for {wanted:,}"
    if found == wanted:
        raise SlurmGPUError(
            f'{said}: the model has no inverse relations, but inverse is "{inverse}". Remove inverse, or set it to '
            f'"none".'
        )
    if found == 2 * wanted and inverse == "none":
        raise SlurmGPUError(
            f'{said}: half of the rows are inverse relations, but inverse is "none". Set it to "interleaved" or '
            f'"appended", or remove it.'
        )
    if found == 2 * wanted:
        raise SlurmGPUError(
            f"{said}: half of the rows are inverse relations, and the checkpoint does not say which. Set inverse to "
            f'"interleaved" (2r and 2r + 1, as in PyKEEN) or "appended" (r and r + {wanted:,}).'
        )
    raise SlurmGPUError(
        f"{said}; expected the same number, or twice as many with inverse relations. Use the dictionary that the "
        f"model was trained with."
    )


def _two_tables(
    naming: ParameterNames, shapes: Shapes, told: Mapping[str, Any], path: str | Path, asked: str, norm: float | None
) -> Layout:
    names = {"entity": naming.entity, "relation": naming.relation}
    (n_entities, width), (n_relations, other) = _named(names, shapes, path, "a model of two tables").values()
    known = [name for name in get_args(Architecture) if name != "conve"]
    found = told.get("architecture", told.get("model")) if asked == "auto" else asked
    architecture = found.lower() if isinstance(found, str) else ""
    if architecture not in known:
        raise SlurmGPUError(
            f"{path} has only a table of entities and a table of relations, as DistMult, ComplEx and TransE have. "
            f"Set architecture to one of {', '.join(known)}."
        )
    is_complex = architecture == "complex"
    if width != other or (is_complex and width % 2):
        raise SlurmGPUError(
            f"{path}: expected {'the same even' if is_complex else 'the same'} number of columns in both tables of "
            f"{architecture}, found {width} for entities and {other} for relations. Correct architecture."
        )
    if is_complex and naming.complex_as is None:
        raise SlurmGPUError(
            f"{path} does not say whether real and imaginary parts alternate or form two halves. Save the tables under "
            f"the names entity and relation, all real parts first."
        )
    return Layout(
        architecture=cast(Architecture, architecture),
        n_entities=n_entities,
        n_relations=n_relations,
        embedding_dim=width // 2 if is_complex else width,
        names=names,
        inverse=_inverse(naming, told),
        complex_pairs=is_complex and naming.complex_as == "pairs",
        norm=_norm(told, path, norm) if architecture == "transe" else None,
    )


def _norm(told: Mapping[str, Any], path: str | Path, asked: float | None) -> float:
    found = told.get("norm") if asked is None else asked
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise SlurmGPUError(
            f"{path} does not say which norm TransE's distance uses. Set norm to 1 or 2, as in training; PyKEEN's "
            f"default is 1."
        )
    return float(found)


def _conve(
    naming: ParameterNames,
    shapes: Shapes,
    told: Mapping[str, Any],
    path: str | Path,
    image: Sequence[int] | None,
    stack: str | None,
) -> Layout:
    names = naming.conve()
    if missing := sorted(set(names.values()) - shapes.keys()):
        raise SlurmGPUError(
            f"{path}: expected all parameters of a ConvE with its three batch norms, found no {', '.join(missing)}. "
            f"{ANOTHER}"
        )
    if naming.bias in shapes:
        names["bias"] = naming.bias
    found = _named(names, shapes, path, "ConvE")
    _check_sizes(found, path)
    stack = stack or told.get("stack") or naming.stack
    if stack not in get_args(Stack):
        raise SlurmGPUError(
            f'{path} does not say how the two images of ConvE are stacked. Set stack to "height" (one above the '
            f'other, as in PyKEEN) or "width" (side by side).'
        )
    return Layout(
        architecture="conve",
        n_entities=found["entity"][0],
        n_relations=found["relation"][0],
        embedding_dim=found["entity"][1],
        names=names,
        inverse=_inverse(naming, told),
        has_bias="bias" in names,
        channels=found["conv.weight"][0],
        kernel=(found["conv.weight"][2], found["conv.weight"][3]),
        image=_image_of(found, cast(Stack, stack), _image_told(told) if image is None else image, path),
        stack=cast(Stack, stack),
    )


def _named(names: Mapping[str, str], shapes: Shapes, path: str | Path, what: str) -> dict[str, tuple[int, ...]]:
    """The shapes by canonical names; SlurmGPUError for parameters without one, which would be left out."""
    others = [key for key in shapes.keys() - names.values() if not key.endswith(NO_PARAMETERS)]
    if others:
        raise SlurmGPUError(f"{path} also has {', '.join(sorted(others))}, which {what} does not have. {ANOTHER}")
    found = {name: shapes[key] for name, key in names.items()}
    for name in ("entity", "relation"):
        if len(found[name]) != 2:
            raise SlurmGPUError(f"{path}: expected {names[name]} with rows and columns, found {found[name]}. {ANOTHER}")
    return found


def _inverse(naming: ParameterNames, told: Mapping[str, Any]) -> Inverse | None:
    found = told.get("inverse")
    return cast(Inverse, found) if found in get_args(Inverse) else naming.inverse


def _check_sizes(shapes: Shapes, path: str | Path) -> None:
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
                f"{path}: expected {name} of shape {shape}, from {n_entities:,} entities, embeddings of {width} "
                f"and {channels} channels, found {shapes[name]}. {ANOTHER}"
            )


def _image_of(shapes: Shapes, stack: Stack, asked: Sequence[int] | None, path: str | Path) -> tuple[int, int]:
    """The (height, width) of one embedding's image: the setting's if it fits, else the only one that fits."""
    fitting = {way: _fitting(shapes, way) for way in get_args(Stack)}
    images = fitting[stack]
    if asked is not None:
        image = (asked[0], asked[1])
        if image in images:
            return image
        other = next((way for way in fitting if image in fitting[way]), None)
        hint = f'It fits with stack = "{other}".' if other else f"Images that fit: {_said(images) or 'none'}."
        raise SlurmGPUError(f"{path}: an image of {_said([image])} does not fit {_fc(shapes)} {_way(stack)}. {hint}")
    if len(images) == 1:
        return images[0]
    if not images:
        raise SlurmGPUError(f"{path}: no image fits {_fc(shapes)} {_way(stack)}. {ANOTHER}")
    raise SlurmGPUError(
        f"{path}: {_said(images)} all fit {_fc(shapes)} {_way(stack)}. Set image to the [height, width] that the "
        f"model was trained with."
    )


def _image_told(told: Mapping[str, Any]) -> tuple[int, int] | None:
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
