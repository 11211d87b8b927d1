"""The user's own model class, which planning also builds, in a separate process."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.modules import import_file
from slurmgpu.util.users import resolved
from slurmgpu.workloads.user_code import located

ADVICE = (
    "Expected a class with the arguments n_entities and n_relations, and a method losses(triples) that takes integers "
    "(n, 3) and returns (n,)."
)


class NotAModelError(SlurmGPUError):
    """The file was imported, and has no class with this name that can be a model.

    `without` is a package that is missing here and that the file can do without: where it is installed, the file may
    define another class. If there is none, a task would fail in the same way.
    """

    def __init__(self, message: str, file: Path) -> None:
        super().__init__(message)
        self.without = _optional_and_missing(file)


def _optional_and_missing(file: Path) -> str | None:
    """The first package that a file imports under `try` or `if`, and that is not installed here."""
    tree = ast.parse(file.read_bytes())
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.Try | ast.If))
    for node in (part for guard in guards for part in ast.walk(guard)):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [node.module]
        for package in (name.partition(".")[0] for name in named):
            if package not in sys.modules and find_spec(package) is None:
                return package
    return None


def class_of(architecture: str) -> tuple[Any, Path]:
    """The class of `architecture`, "file.py:Class", and its file."""
    path, _, name = architecture.rpartition(":")
    file = resolved(path)
    with located(f"the import of {file.name}", str(file), ADVICE):
        cls = getattr(import_file(file), name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and callable(getattr(cls, "losses", None))):
        raise NotAModelError(
            f"architecture = {architecture!r}: expected a class {name} in {file} that is a torch.nn.Module with a "
            f"method losses(triples), which returns a loss for each row of head, relation and tail.",
            file,
        )
    try:
        inspect.signature(cls).bind(n_entities=0, n_relations=0)
    except TypeError as error:
        raise NotAModelError(
            f"architecture = {architecture!r}: {name} cannot be built from n_entities and n_relations: {error}. "
            f"{ADVICE}",
            file,
        ) from error
    return cls, file
