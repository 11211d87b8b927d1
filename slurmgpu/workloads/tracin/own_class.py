"""The user's own model class, which planning also builds, in a separate process."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.modules import import_file
from slurmgpu.util.users import expanded
from slurmgpu.workloads.user_code import located

ADVICE = (
    "Expected a class with the arguments n_entities and n_relations, and a method losses(triples) that takes integers "
    "(n, 3) and returns (n,)."
)


class NotAModelError(SlurmGPUError):
    """The file was imported, and has no class with this name that can be a model.

    A task would fail in the same way, unless the file defines the class only if a package is installed that is missing
    here.
    """


def class_of(architecture: str) -> tuple[Any, Path]:
    """The class of `architecture`, "file.py:Class", and its file."""
    path, _, name = architecture.rpartition(":")
    file = expanded(path).resolve()
    with located(f"the import of {file.name}", str(file), ADVICE):
        cls = getattr(import_file(file), name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and callable(getattr(cls, "losses", None))):
        raise NotAModelError(
            f"architecture = {architecture!r}: expected a class {name} in {file} that is a torch.nn.Module with a "
            f"method losses(triples), which returns a loss for each row of head, relation and tail."
        )
    try:
        inspect.signature(cls).bind(n_entities=0, n_relations=0)
    except TypeError as error:
        raise NotAModelError(
            f"architecture = {architecture!r}: {name} cannot be built from n_entities and n_relations: {error}. "
            f"{ADVICE}"
        ) from error
    return cls, file
