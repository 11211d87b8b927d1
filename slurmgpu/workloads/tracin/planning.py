"""Check the files of a tracin run at planning, without PyTorch, and collect the facts that the plan keeps.

Tasks, the merge and exports read these facts from the plan, so they know the columns without the model.
"""

from __future__ import annotations

import functools
import glob
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.globs import matches
from slurmgpu.util.hashing import digest_of
from slurmgpu.util.users import expanded
from slurmgpu.workloads.tracin.kge import graph
from slurmgpu.workloads.tracin.kge.checkpoints import BUFFERS, optimizer_of, peek_content, read_layout
from slurmgpu.workloads.tracin.kge.layouts import Layout, check
from slurmgpu.workloads.tracin.kge.learning_rates import Rate, learning_rate_in
from slurmgpu.workloads.tracin.kge.parameter_names import group_of, unwrapped
from slurmgpu.workloads.tracin.kge.torch_archive import DICTIONARIES, Shape, peek, state_of, told_in
from slurmgpu.workloads.tracin.own_parameters import OwnParameters, own_parameters
from slurmgpu.workloads.tracin.settings import TracinSettings, rates_for

DEFAULT_RATE = 1e-3
"""The learning rate if neither a setting nor a checkpoint's optimizer has one, as in the replaced system."""

OF_MODEL = ("architecture", "n_entities", "n_relations", "embedding_dim", "image", "stack", "inverse", "norm")
"""Layout attributes that all checkpoints of one model share."""
OF_TRAINING = ("seed", "loss", "label_smoothing", "dropouts", "norm", "dictionaries")
"""Config keys that all checkpoints of one training share."""


@dataclass(frozen=True)
class Planned:
    """The facts about a run's files: each checkpoint's path and learning rate, the wanted parameter groups in order.

    `digests` has, by path, the digests of the files that results depend on. `n_parameters` counts the wanted
    parameters. `unknown_rate` means that no file has a learning rate, so it was assumed. `training_loss` is named as in
    the checkpoint's config, if it is there.
    """

    architecture: str
    checkpoints: list[str]
    learning_rates: list[float]
    unknown_rate: bool
    groups: list[str]
    n_train: int
    n_entities: int
    n_relations: int
    n_parameters: int
    training_loss: str | None
    digests: dict[str, str]
    not_built: str | None = None
    """Why a user's class was not built; the names in its checkpoint are used instead."""


def plan(settings: TracinSettings) -> Planned:
    """Check all files; SlurmGPUError for files that do not fit together."""
    _expect_labels(settings)
    known = graph.read_graph(settings.train, settings.entities, settings.relations)
    paths = checkpoint_paths(settings.model)
    given = rates_for(settings, paths)
    model = (_own_model if settings.is_own_model else _known_model)(settings, paths, known)
    rates = _rates(given, model.rates, paths)
    return Planned(
        model.architecture,
        paths,
        [DEFAULT_RATE if rate is None else rate for rate in rates],
        None in rates,
        list(dict.fromkeys(map(group_of, model.sizes))),
        len(known.train),
        known.entities.size,
        known.relations.size,
        sum(model.sizes.values()),
        model.training_loss,
        {**known.digests, **file_digests([*paths, *own_files(settings)])},
        model.not_built,
    )


class PlannedSettings(TracinSettings):
    """The settings of a run and the facts about its files."""

    @functools.cached_property
    def facts(self) -> Planned:
        """The facts about the files, from the plan if there is one, else from the files."""
        return plan(self) if self.planned is None else Planned(**self.planned)

    @property
    def n_listed(self) -> int:
        """The length of each list: `top_k`, or the number of training triples if that is less."""
        return self.top_k and min(self.top_k, self.facts.n_train)

    def read_graph(self) -> graph.Graph:
        """The graph in the plan's files; SlurmGPUError if one of them has changed."""
        found = graph.read_graph(self.train, self.entities, self.relations)
        check_unchanged(self.facts, found.digests, only=found.digests)
        return found


def checkpoint_paths(model: str | Sequence[str]) -> list[str]:
    """The files that the setting `model` names, in its order; files of a glob are sorted by their numbers."""
    found: list[str] = []
    for name in [model] if isinstance(model, str) else model:
        path = expanded(name)
        try:
            named = [str(path)] if path.is_file() else [str(Path(match)) for match in matches(str(path), ".")]
        except OSError as error:
            raise SlurmGPUError(
                f"model: {error.filename} cannot be listed: {error.strerror}. Make it readable, or leave it out of "
                f"{name!r}."
            ) from error
        files = [match for match in named if Path(match).is_file()]
        if not files:
            what = "no file matches" if glob.has_magic(name) else "there is no file"
            raise SlurmGPUError(
                f"model: {what} {str(path.absolute())!r}; expected a PyTorch checkpoint, a list of them, or a glob, "
                f"relative to the run file."
            )
        found += sorted(files, key=_by_numbers)
    doubled = [path for number, path in enumerate(found) if path in found[:number]]
    if doubled:
        raise SlurmGPUError(f"model names {doubled[0]} twice; name each checkpoint once.")
    return found


def layout_of(settings: TracinSettings, path: str, known: graph.Graph) -> Layout:
    """The layout of a checkpoint, checked against the dictionaries."""
    layout = read_layout(
        path, architecture=settings.architecture, image=settings.image, stack=settings.stack, norm=settings.norm
    )
    return check(layout, path, known.entities, known.relations, settings.inverse)


def trainable(layout: Layout) -> list[str]:
    """The names of a checkpoint's parameters, without buffers."""
    return [name for name in layout.names if not name.endswith(BUFFERS)]


def wanted_parameters(
    setting: str | Sequence[str], architecture: str, names: Sequence[str], others: Mapping[str, str] | None = None
) -> list[str]:
    """The names that `parameters` selects, in their order; SlurmGPUError for a word that selects none.

    `others` says why a name is not a trainable parameter.
    """
    if setting == "all":
        return list(names)
    words = [setting] if isinstance(setting, str) else list(setting)
    if setting == "last":  # the last layer, or the table of entities in models without layers
        words = ["fc", "bias"] if architecture == "conve" else ["entity" if "entity" in names else group_of(names[-1])]
    groups = list(dict.fromkeys(map(group_of, names)))
    wanted = set()
    for word in words:
        meant = {name for name in names if word == group_of(name) or fnmatchcase(name, word)}
        if not meant and setting != "last":
            known = [(name, what) for name, what in (others or {}).items() if word in (name, group_of(name))]
            said = f": {known[0][0]} is {known[0][1]}" if known else ""
            raise SlurmGPUError(
                f"parameters has {word!r}, which is neither a trainable parameter nor a group of the model{said}. "
                f'Groups: {", ".join(groups)}; parameters: {", ".join(names)}; or "all", or "last".'
            )
        wanted |= meant
    return [name for name in names if name in wanted]


def rates_line(planned: Planned) -> str:
    """The checkpoints and their learning rates, for the user."""
    rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(planned.learning_rates))
    count = len(planned.checkpoints)
    said = f"{count} checkpoints" if count > 1 else f"checkpoint {planned.checkpoints[0]}"
    source = " (assumed: the checkpoints have none, and learning_rate is not set)" if planned.unknown_rate else ""
    return f"{said}, learning rate {rates}{source}"


def zero_rates_line(planned: Planned) -> str | None:
    """The checkpoints whose learning rate is 0, for the user; None if there is none."""
    paths = [path for path, rate in zip(planned.checkpoints, planned.learning_rates, strict=True) if not rate]
    if not paths:
        return None
    last = f"; losses and scores are still from {paths[-1]}" if paths[-1] == planned.checkpoints[-1] else ""
    return f"The learning rate of {', '.join(paths)} is 0, which adds nothing to influences{last}."


def file_digests(paths: Sequence[str]) -> dict[str, str]:
    """Digests of files by path, from samples of large ones."""
    return {path: digest_of(expanded(path)) for path in paths}


def own_files(settings: TracinSettings) -> list[str]:
    """The file of a user's model class; none for a known model."""
    return [settings.architecture.rpartition(":")[0]] if settings.is_own_model else []


def check_there(planned: Planned) -> None:
    """SlurmGPUError if a file that results depend on is gone."""
    gone = [path for path in planned.digests if not expanded(path).is_file()]
    if gone:
        raise SlurmGPUError(
            f"Missing since the run was planned: {', '.join(gone)}. Restore the missing files, and resubmit."
        )


def check_unchanged(planned: Planned, found: Mapping[str, str], only: Collection[str] | None = None) -> None:
    """SlurmGPUError if a file, or one of those in `only`, has changed since the run was planned."""
    wanted = {path: digest for path, digest in planned.digests.items() if only is None or path in only}
    changed = [path for path, digest in wanted.items() if found.get(path) != digest]
    if changed:
        raise SlurmGPUError(
            f"{', '.join(changed)} changed since this run was planned. Restore the former content and resubmit, or "
            f"plan a new run in another run directory."
        )


def _rates(given: Sequence[float | None], told: Sequence[Rate], paths: Sequence[str]) -> list[float | None]:
    """The learning rate of each checkpoint, from the setting or else from its file; all None if no file has one.

    SlurmGPUError for a file with several rates or an impossible one, if only some files have one, or if all are 0.
    """
    for one, read, path in zip(given, told, paths, strict=True):
        if one is None and read.found is not None:
            raise SlurmGPUError(f"{path}: expected one learning rate, found {read.found}. Set learning_rate.")
    rates = [read.value if one is None else one for one, read in zip(given, told, strict=True)]
    known = [(path, rate) for path, rate in zip(paths, rates, strict=True) if rate is not None]
    if known and None in rates:
        raise SlurmGPUError(
            f"{paths[rates.index(None)]} has no learning rate, and {known[0][0]} has {known[0][1]:g}. Influences are "
            f"summed over checkpoints, weighted by their rates. Set learning_rate, once or for each checkpoint."
        )
    for path, rate in known:
        if not 0 <= rate < math.inf:
            raise SlurmGPUError(f"The learning rate in {path} is {rate:g}; expected more than 0. Set learning_rate.")
    if known and not any(rate for _, rate in known):
        which = paths[0] if len(paths) == 1 else f"all {len(paths)} checkpoints"
        raise SlurmGPUError(
            f"The learning rate in {which} is 0, as at the end of a schedule, so every influence would be 0. Set "
            f"learning_rate, or name earlier checkpoints."
        )
    return rates


@dataclass(frozen=True)
class _Model:
    """A model as described by its checkpoints: sizes of the wanted parameters, and each checkpoint's learning rate."""

    architecture: str
    sizes: Mapping[str, int]
    rates: Sequence[Rate]
    training_loss: str | None = None
    not_built: str | None = None


def _known_model(settings: TracinSettings, paths: Sequence[str], known: graph.Graph) -> _Model:
    """A model of a known architecture; SlurmGPUError if the checkpoints do not fit together, or with the settings."""
    layouts = [layout_of(settings, path, known) for path in paths]
    layout = layouts[-1]
    _expect_alike(layouts, paths)
    _expect_dictionaries(settings, layouts[0].told, paths[0], known)
    _expect_inverse(settings, layout, paths[-1])
    for path in paths if settings.precondition == "adam" else ():
        if (content := peek(path)) is not None:  # else tasks look: only PyTorch, which may be missing here, reads it
            optimizer_of(content, path)
    wanted = wanted_parameters(settings.parameters, layout.architecture, trainable(layout))
    sizes = {name: math.prod(layout.shapes[name]) for name in wanted}
    return _Model(layout.architecture, sizes, [each.learning_rate for each in layouts], layout.loss)


def _own_model(settings: TracinSettings, paths: Sequence[str], known: graph.Graph) -> _Model:
    """A user's own model; `not_built` says why its class could not be built, if so.

    SlurmGPUError if a checkpoint does not fit the class that was built.
    """
    contents = [peek_content(path) for path in paths]
    _expect_one_training([told_in(content) for content in contents], paths)
    _expect_dictionaries(settings, told_in(contents[0]), paths[0], known)
    rates = [learning_rate_in(content, path) for content, path in zip(contents, paths, strict=True)]
    for file in own_files(settings):
        _expect_file(file)
    states = {path: state_of(content, path) for path, content in zip(paths, contents, strict=True)}
    shapes = {path: _shapes_in(state) for path, state in states.items()}
    found = own_parameters(settings.architecture, known.entities.size, known.relations.size, shapes)
    not_built = found if isinstance(found, str) else None
    parameters = _named_in(states[paths[0]]) if isinstance(found, str) else found
    if not parameters.trainable:
        raise SlurmGPUError(
            f"{settings.architecture} has no trainable parameter, so there are no influences. Make parameters require "
            f"gradients with requires_grad_(True)."
        )
    names = list(parameters.trainable)
    wanted = wanted_parameters(settings.parameters, settings.architecture, names, parameters.others)
    sizes = {name: parameters.trainable[name] for name in wanted}
    return _Model(settings.architecture, sizes, rates, not_built=not_built)


def _shapes_in(state: Mapping[str, Any]) -> dict[str, tuple[list[int], str]]:
    """The shape and the dtype of each tensor in a state dict."""
    named = ((name, state[key]) for name, key in unwrapped(state).items())
    return {name: ([*value.shape], str(value.dtype).removeprefix("torch.")) for name, value in named}


def _named_in(state: Mapping[str, Any]) -> OwnParameters:
    """Parameters in a state dict that may be trainable: floating-point tensors, shared ones under their first name."""
    trainable: dict[str, int] = {}
    others: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, key in unwrapped(state).items():
        value = state[key]
        place = (value.place, value.shape) if isinstance(value, Shape) else key
        if name.endswith(BUFFERS) or not any(kind in str(value.dtype) for kind in ("float", "complex")):
            others[name] = "a buffer"
        elif first.setdefault(place, name) != name:
            others[name] = f"the same tensor as {first[place]}"
        else:
            trainable[name] = math.prod(value.shape)
    return OwnParameters(trainable, others)


def _expect_labels(settings: TracinSettings) -> None:
    """Refuse label files that an export could not read."""
    for path, read in ((settings.names, graph.read_names), (settings.edge_map, graph.read_edge_map)):
        if path is not None:
            _expect_file(path)
            read(path)


def _expect_file(path: str) -> None:
    if not expanded(path).is_file():
        raise SlurmGPUError(f"There is no file {expanded(path).absolute()}; correct the path in [settings].")


def _expect_alike(layouts: Sequence[Layout], paths: Sequence[str]) -> None:
    """Refuse checkpoints of two models: their influences cannot be summed."""
    for layout, path in zip(layouts, paths, strict=True):
        for what in OF_MODEL:
            first, other = getattr(layouts[0], what), getattr(layout, what)
            if first != other:
                raise SlurmGPUError(
                    f"{paths[0]} and {path} are from two models: {what} is {first} and {other}. Name checkpoints of "
                    f"one training; influences are summed over them."
                )
    _expect_one_training([layout.told for layout in layouts], paths)


def _expect_one_training(told: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> None:
    """Refuse checkpoints of several trainings, by their configs."""
    for other, path in zip(told, paths, strict=True):
        for what in OF_TRAINING:
            if what in told[0] and what in other and told[0][what] != other[what]:
                raise SlurmGPUError(
                    f"{paths[0]} and {path} are from two trainings: {what} is {told[0][what]} and {other[what]} in "
                    f"their configs. Name checkpoints of one training; influences are summed over them."
                )


def _expect_dictionaries(settings: TracinSettings, told: Mapping[str, Any], path: str, known: graph.Graph) -> None:
    """Refuse dictionaries other than those of training: the same names could have other rows."""
    digests = told.get("dictionaries", {})
    for what, key in DICTIONARIES.items():
        file, ids = expanded(getattr(settings, what)), told.get(key)
        if isinstance(digests, Mapping) and digests.get(what) not in (None, digest_of(file)):
            raise SlurmGPUError(
                f"{path} was trained with a different dictionary of {what} than {file}. Set {what} to the file that "
                f"the trainer used or wrote next to its checkpoints."
            )
        if isinstance(ids, Mapping):
            _expect_ids(getattr(known, what), ids, what, path)


def _expect_ids(dictionary: graph.Dictionary, ids: Mapping[str, int], what: str, path: str) -> None:
    """Refuse a dictionary that gives a name another id than the checkpoint does, and one with names of its own."""
    for name, number in dictionary.ids.items():
        if ids.get(name) != number:
            found = f"has the id {ids[name]}" if name in ids else "is missing"
            raise SlurmGPUError(
                f"{path} was trained with a different dictionary of {what} than {dictionary.path}: {name!r}, which has "
                f"the id {number} there, {found} in the checkpoint's {DICTIONARIES[what]}. Write the dictionary of "
                f"the training into the file."
            )


def _expect_inverse(settings: TracinSettings, layout: Layout, path: str) -> None:
    if settings.directions == "both" and layout.inverse == "none":
        raise SlurmGPUError(
            f'directions = "both" needs inverse relations, and the model in {path} has none: it has '
            f'{layout.n_relations} relation rows, one for each relation. Set directions = "tail".'
        )


def _by_numbers(path: str) -> list[tuple[int, str]]:
    """A sort key by which "checkpoint-9.pt" comes before "checkpoint-10.pt"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
