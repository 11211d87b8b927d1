"""Which knowledge-graph model a checkpoint holds, by names and shapes alone; nothing here needs torch.

Our names ("canonical"): ConvE has `entity` (N, d), `relation` (R, d), `bn0`, `conv`, `bn1`, `fc`, `bn2`, with `.weight`
and `.bias`, and `.running_mean` and `.running_var` of the three norms, and `bias` (N,) if it has one for each tail.
DistMult and TransE have `entity` (N, d) and `relation` (R, d). ComplEx has `entity` (N, 2d) and `relation` (R, 2d),
real halves first.

What the shapes cannot say is taken from the checkpoint's `config` or `model_config`, if it has one, under the keys
`model` or `architecture`, `image` or `embedding_height` and `embedding_width`, `stack`, `inverse`, `norm`,
`learning_rate`, `loss` and `label_smoothing`. What nothing says is refused, not guessed. `seed` and others tell
trainings apart, and `dictionaries` which dictionaries the model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.workloads.tracin.kge.contents import learning_rate_in, state_of, told_in
from slurmgpu.workloads.tracin.kge.graph import Dictionary
from slurmgpu.workloads.tracin.kge.naming import NAMINGS, NO_PARAMETERS, Inverse, Naming, Stack, unwrapped
from slurmgpu.workloads.tracin.kge.reshapes import ANOTHER, Shapes, check_sizes, image_of, image_told

Architecture = Literal["conve", "distmult", "complex", "transe"]


@dataclass(frozen=True)
class Layout:
    """What a checkpoint holds, and under which names."""

    architecture: Architecture
    n_entities: int
    """Rows of the entity table."""
    n_relations: int
    """Rows of the relation table, inverse relations included."""
    embedding_dim: int
    """d; of ComplEx the number of complex numbers, so its tables have 2d columns."""
    names: Mapping[str, str]
    """Canonical name -> key in the file's state dict."""
    inverse: Inverse | None = "none"
    """Where the inverse of relation r lies: row 2r + 1 (r itself in 2r), row r + R / 2, or nowhere.

    Before `check` it is what the names imply, if they imply anything.
    """
    has_bias: bool = False
    """Whether each tail has a bias (ConvE)."""
    channels: int | None = None
    kernel: tuple[int, int] | None = None
    image: tuple[int, int] | None = None
    """(height, width) of one embedding's image (ConvE); the two of head and relation are then stacked."""
    stack: Stack | None = None
    """Whether the two images lie one above the other, or side by side."""
    complex_pairs: bool = False
    """Whether the file has real and imaginary parts in turn (ComplEx)."""
    norm: float | None = None
    """The p of TransE's distance."""
    learning_rate: float | None = None
    """That of the optimizer's state or of the config."""
    loss: str | None = None
    """The loss of training in its own words, where the checkpoint tells."""
    label_smoothing: float | None = None
    shapes: Shapes = field(default_factory=dict)
    """The shape of each tensor by its canonical name."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's config, as it is."""


def recognise(
    content: Mapping[str, Any],
    path: str | Path,
    *,
    architecture: str = "auto",
    image: Sequence[int] | None = None,
    stack: str | None = None,
    norm: float | None = None,
) -> Layout:
    """Which model a checkpoint's content is, by its names and the shapes of tensors or of their stand-ins.

    The settings `architecture`, `image`, `stack` and `norm` say what a checkpoint leaves open, and go before what it
    says.
    """
    state = state_of(content, path)
    keys = unwrapped(state)
    naming = next((naming for naming in NAMINGS if naming.is_of(keys)), None)
    if naming is None:
        some = ", ".join(sorted(state)[:5])
        raise SlurmGPUError(
            f"{path}: expected the tables of entities and relations under names of PyKEEN, of ConvE or of slurmgpu, "
            f'found {some} … Rename them, or name your model\'s class: architecture = "file.py:Class".'
        )
    shapes = {name: tuple(state[key].shape) for name, key in keys.items()}
    told = told_in(content)
    if naming.layers["conv"] + ".weight" in keys:
        if architecture not in ("auto", "conve"):
            raise SlurmGPUError(f'{path} holds a ConvE, and architecture is "{architecture}". Leave that setting out.')
        layout = _conve(naming, shapes, told, path, image, stack)
    else:
        layout = _two_tables(naming, shapes, told, path, architecture, norm)
    if norm is not None and layout.architecture != "transe":
        raise SlurmGPUError(
            f"norm is the p of TransE's distance, and {path} is read as {layout.architecture}. Leave norm out."
        )
    names = {name: keys[key] for name, key in layout.names.items()}
    canonical = {name: shapes[key][:1] if name == "bias" else shapes[key] for name, key in layout.names.items()}
    rate, loss, smoothing = learning_rate_in(content), told.get("loss"), told.get("label_smoothing")
    return replace(
        layout,
        names=names,
        shapes=canonical,
        learning_rate=rate,
        loss=loss if isinstance(loss, str) else None,
        label_smoothing=float(smoothing) if isinstance(smoothing, (int, float)) else None,
        told=told,
    )


def check(
    layout: Layout, path: str | Path, entities: Dictionary, relations: Dictionary, inverse: str | None = None
) -> Layout:
    """The layout with what the dictionaries decide of inverse relations; refuses tables that do not fit them.

    The setting `inverse` goes before what the checkpoint's names imply.
    """
    if layout.n_entities != entities.size:
        raise SlurmGPUError(
            f"{path} has {layout.n_entities:,} rows of entities, and the ids of {entities.path} want "
            f"{entities.size:,}. Take the dictionary that the model was trained with; a row that has no name needs "
            f"a line with one, too."
        )
    found, wanted = layout.n_relations, relations.size
    if inverse is not None and inverse not in get_args(Inverse):
        raise SlurmGPUError(f"inverse is {inverse!r}.{did_you_mean(inverse, get_args(Inverse))}")
    if found == wanted and inverse in (None, "none"):
        return replace(layout, inverse="none")
    if found == 2 * wanted and (lie := inverse or layout.inverse) in ("interleaved", "appended"):
        return replace(layout, inverse=cast(Inverse, lie))
    said = f"{path} has {found:,} rows of relations, and {relations.path} has ids for {wanted:,}"
    if found == wanted:
        raise SlurmGPUError(
            f'{said}: one for each, so the model has no inverse relations, and inverse is "{inverse}". Leave inverse '
            f'out, or set it to "none".'
        )
    if found == 2 * wanted and inverse == "none":
        raise SlurmGPUError(
            f'{said}: half of them are inverse relations, and inverse is "none". Set it to where they lie, '
            f'"interleaved" or "appended", or leave it out.'
        )
    if found == 2 * wanted:
        raise SlurmGPUError(
            f"{said}: half of them are inverse relations, and nothing tells which. Set inverse to "
            f'"interleaved" (2r and 2r + 1, as PyKEEN does) or "appended" (r and r + {wanted:,}).'
        )
    raise SlurmGPUError(
        f"{said}; expected as many, or twice as many with inverse relations. Take the dictionary that the "
        f"model was trained with."
    )


def _two_tables(
    naming: Naming, shapes: Shapes, told: Mapping[str, Any], path: str | Path, asked: str, norm: float | None
) -> Layout:
    names = {"entity": naming.entity, "relation": naming.relation}
    (n_entities, width), (n_relations, other) = _named(names, shapes, path, "a model of two tables").values()
    known = [name for name in get_args(Architecture) if name != "conve"]
    found = told.get("architecture", told.get("model")) if asked == "auto" else asked
    architecture = found.lower() if isinstance(found, str) else ""
    if architecture not in known:
        raise SlurmGPUError(
            f"{path} holds a table of entities and one of relations, which DistMult, ComplEx and TransE all have. "
            f"Set architecture to what it is: one of {', '.join(known)}."
        )
    is_complex = architecture == "complex"
    if width != other or (is_complex and width % 2):
        raise SlurmGPUError(
            f"{path}: expected {'the same even' if is_complex else 'the same'} number of columns in both tables of "
            f"{architecture}, found {width} for entities and {other} for relations. Correct architecture."
        )
    if is_complex and naming.complex_as is None:
        raise SlurmGPUError(
            f"{path}: nothing tells whether real and imaginary parts lie in turn or in halves. Save the tables as "
            f"entity and relation, all real parts first."
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
    """The p of TransE's distance: what is asked for, or else what the checkpoint tells."""
    found = told.get("norm") if asked is None else asked
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise SlurmGPUError(
            f"{path}: nothing tells which norm the distance of TransE has, and its tensors fit any. Set norm to 1 or 2 "
            f"as the model was trained; PyKEEN's default is 1."
        )
    return float(found)


def _conve(
    naming: Naming,
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
    check_sizes(found, path)
    stack = stack or told.get("stack") or naming.stack
    if stack not in get_args(Stack):
        raise SlurmGPUError(
            f'{path}: nothing tells how the two images of ConvE lie. Set stack to "height" (one above the other, as '
            f'in PyKEEN) or "width" (side by side).'
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
        image=image_of(found, cast(Stack, stack), image_told(told) if image is None else image, path),
        stack=cast(Stack, stack),
    )


def _named(names: Mapping[str, str], shapes: Shapes, path: str | Path, what: str) -> dict[str, tuple[int, ...]]:
    """The shapes by canonical names; refuses parameters that have none, for they would be left out."""
    others = [key for key in shapes.keys() - names.values() if not key.endswith(NO_PARAMETERS)]
    if others:
        raise SlurmGPUError(f"{path}: {what} has no {', '.join(sorted(others))}. {ANOTHER}")
    found = {name: shapes[key] for name, key in names.items()}
    for name in ("entity", "relation"):
        if len(found[name]) != 2:
            raise SlurmGPUError(f"{path}: expected {names[name]} with rows and columns, found {found[name]}. {ANOTHER}")
    return found


def _inverse(naming: Naming, told: Mapping[str, Any]) -> Inverse | None:
    """How inverse relations lie, if there are any."""
    found = told.get("inverse")
    return cast(Inverse, found) if found in get_args(Inverse) else naming.inverse
