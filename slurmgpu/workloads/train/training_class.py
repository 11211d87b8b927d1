"""The training class as its source tells it, without importing it: login nodes may have no torch."""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmgpu import workload
from slurmgpu.errors import SlurmGPUError, did_you_mean

NEEDED = ("model", "data", "loss")
EXPECTED = "expected model(), data(split) and loss(model, batch), as docs/how-to/train-a-model.md has them"
TYPES = ("int", "float", "bool", "str")
OPTIONAL = re.compile(r"(\w+) \| None|None \| (\w+)|(?:typing\.)?Optional\[(\w+)\]")


@dataclass(frozen=True)
class TrainingClass:
    """What is known of a training class: the methods that it has, and what its `__init__` takes by name.

    `arguments` are names with "int", "float", "bool", "str" or "" for the type, as an annotation or a default tells it;
    `annotated` are those of which an annotation does, `required` those without a default. `takes_any`: other names may
    be taken as well.
    """

    name: str
    methods: frozenset[str] = frozenset()
    arguments: Mapping[str, str] = field(default_factory=dict)
    annotated: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    takes_any: bool = False
    is_whole: bool = True
    """Whether all methods are known: none may be inherited from elsewhere."""

    def check(self) -> TrainingClass:
        """The class; SlurmGPUError if a method is missing."""
        for needed in NEEDED:
            if self.is_whole and needed not in self.methods:
                raise SlurmGPUError(
                    f"{self.name}: the class has no method {needed!r}; {EXPECTED}."
                    + (did_you_mean(needed, self.methods - {*NEEDED, "__init__"}) if self.methods else "")
                )
        return self


def resolve_training(training: str, base: Path) -> str:
    """The full name of a training class: `/path/to/file.py:Class` or `package.module:Class`."""
    module, colon, name = training.rpartition(":")
    if not colon or not module or not name.isidentifier():
        raise SlurmGPUError(
            f"training is {training!r}; expected your class as 'file.py:Class', relative to the run file, or as "
            f"'package.module:Class'."
        )
    if not module.endswith(".py"):
        return training
    path = (base / Path(module).expanduser()).resolve()
    if not path.is_file():
        raise SlurmGPUError(f"training = {training!r}: there is no file {path}.")
    return f"{path}:{name}"


def read_class(full_name: str) -> TrainingClass | None:
    """What the source says of a class that `resolve_training` named; None where no source is found without imports."""
    module, _, name = full_name.rpartition(":")
    path = Path(module) if module.endswith(".py") else _source_of(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise SlurmGPUError(f"{path}{line}: expected Python; {error}. Correct it there.") from error
    return _Source(path, tree).describe(name)


def load_class(full_name: str) -> type[Any]:
    """The class itself, imported; SlurmGPUError with the user's line where that fails."""
    module, _, name = full_name.rpartition(":")
    with _told(module):
        is_file = module.endswith(".py")
        imported = workload.import_file(Path(module)) if is_file else importlib.import_module(module)
    found = getattr(imported, name, None)
    if not isinstance(found, type):
        classes = [name for name, value in vars(imported).items() if isinstance(value, type)]
        raise SlurmGPUError(f"{module} has no class {name!r}.{did_you_mean(name, classes)}")
    return found


def class_of(cls: type[Any]) -> TrainingClass:
    """What there is to know of an imported class."""
    methods = frozenset(name for base in cls.__mro__[:-1] for name in vars(base))
    found, takes_any = _Arguments(), False
    for parameter in inspect.signature(cls).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            hint, has_default = parameter.annotation, parameter.default is not parameter.empty
            word = "" if hint is parameter.empty else hint if isinstance(hint, str) else inspect.formatannotation(hint)
            found.add(parameter.name, word, parameter.default if has_default else None, required=not has_default)
    return TrainingClass(cls.__name__, methods, **found.fields(), takes_any=takes_any).check()


@dataclass
class _Arguments:
    """What a class takes, as it is found out."""

    types: dict[str, str] = field(default_factory=dict)
    annotated: set[str] = field(default_factory=set)
    required: set[str] = field(default_factory=set)

    def add(self, name: str, annotation: str, default: Any, *, required: bool) -> None:
        """Take in an argument with its annotation as it is written, and a default that is a constant."""
        word = OPTIONAL.sub(lambda found: found[1] or found[2] or found[3], annotation.strip("'\""))
        word = word if annotation else type(default).__name__
        self.types[name] = word if word in TYPES else ""
        self.annotated |= {name} if annotation and word in TYPES else set()
        self.required |= {name} if required else set()

    def fields(self) -> dict[str, Any]:
        """These as `TrainingClass` has them."""
        return {
            "arguments": self.types,
            "annotated": frozenset(self.annotated),
            "required": frozenset(self.required),
        }


@dataclass(frozen=True)
class _Source:
    """A parsed file, and the classes at its top."""

    path: Path
    tree: ast.Module

    def describe(self, name: str) -> TrainingClass:
        """What the file says of a class; SlurmGPUError if it has none of the name, or lacks a method."""
        classes = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        if name not in classes:
            if {name, "*"} & _names_bound(self.tree):
                return TrainingClass(name, takes_any=True, is_whole=False)  # from elsewhere: seen once it is loaded
            raise SlurmGPUError(f"{self.path} has no class {name!r}.{did_you_mean(name, classes)}")
        return replace(self._of(classes[name], classes), name=f"{self.path}:{name}").check()

    def _of(self, node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> TrainingClass:
        """A class with what it inherits from others of the file; what else it may inherit is unknown."""
        found = TrainingClass(node.name)
        for base in reversed(node.bases):
            name = base.id if isinstance(base, ast.Name) else ""
            if name in classes and classes[name] is not node:
                inherited = self._of(classes[name], classes)
                found = replace(
                    inherited, methods=found.methods | inherited.methods, is_whole=found.is_whole and inherited.is_whole
                )
            elif name != "object":
                found = replace(found, is_whole=False, takes_any=True)
        found = replace(found, methods=found.methods | _names_bound(node))
        decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
        init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        if init is not None:
            found = replace(found, **_of_init(init).fields(), takes_any=init.args.kwarg is not None)
        elif "dataclass" in decorators:
            own = _of_dataclass(node)
            found = replace(
                found,
                arguments={**found.arguments, **own.types},
                annotated=(found.annotated - own.types.keys()) | own.annotated,
                required=(found.required - own.types.keys()) | own.required,
            )
        return replace(found, is_whole=False, takes_any=True) if decorators - {"dataclass"} else found


def _of_init(init: ast.FunctionDef) -> _Arguments:
    """The arguments of an `__init__`."""
    args, found = init.args, _Arguments()
    positional = [*args.posonlyargs, *args.args][1:]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(positional, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    for arg, default in pairs:
        _add(found, arg.arg, arg.annotation, default)
    return found


def _of_dataclass(node: ast.ClassDef) -> _Arguments:
    found = _Arguments()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            _add(found, each.target.id, each.annotation, each.value)
    return found


def _add(found: _Arguments, name: str, annotation: ast.expr | None, default: ast.expr | None) -> None:
    word = ast.unparse(annotation) if annotation is not None else ""
    found.add(name, word, default.value if isinstance(default, ast.Constant) else None, required=default is None)


def _names_bound(node: ast.Module | ast.ClassDef) -> set[str]:
    """The names that a module or a class gives a value in its body, `if` and `try` included."""
    names: set[str] = set()
    todo: list[ast.AST] = list(node.body)
    while todo:
        each = todo.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(each.name)
        elif isinstance(each, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in each.names}
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif not isinstance(each, ast.Lambda):
            todo += ast.iter_child_nodes(each)
    return names


def _source_of(module: str) -> Path | None:
    """The source file of a module, found without importing its packages, which may want torch."""
    top, *parts = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for part in parts:
        files = (file for folder in folders for file in (folder / part / "__init__.py", folder / f"{part}.py"))
        found = next((file for file in files if file.is_file()), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
    return found


@contextmanager
def _told(module: str) -> Iterator[None]:
    """A sentence with the line in the user's file, for whatever error importing it raises."""
    try:
        yield
    except SlurmGPUError:
        raise
    except Exception as error:  # the user's code may raise any
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else module
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{error.filename}, line {error.lineno}"
        raise SlurmGPUError(
            f"{place}: the import of {module} has {type(error).__name__}: {error}. Correct it, or install what it "
            f"needs with {sys.executable}."
        ) from error
