"""The methods and arguments of a training class, from its source: login nodes may lack torch to import it."""

from __future__ import annotations

import ast
import copy
import dis
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from slurmgpu.errors import SlurmGPUError, did_you_mean
from slurmgpu.loader.modules import classes_in, import_named
from slurmgpu.loader.names import with_whole_path
from slurmgpu.training.user_methods import CALLED_WITH, NEEDED, as_called
from slurmgpu.workloads.user_code import located

EXPECTED = "expected model(), data(split) and loss(model, batch), as docs/how-to/train-a-model.md has them"
TYPES = ("int", "float", "bool", "str")
PLAIN = (int, float, str, type(None))
BEGIN = ("__init__", "__post_init__")
"""The methods that may set needed ones. The name of another one may be that of a value: `self.metrics = []`."""
OPTIONAL = re.compile(r"(\w+) \| None|None \| (\w+)|(?:typing\.)?Optional\[(\w+)\]")


class Argument(NamedTuple):
    """An argument of `__init__`: "int", "float", "bool", "str" or "" by its annotation or else its default."""

    kind: str
    is_annotated: bool
    is_required: bool


@dataclass(frozen=True)
class TrainingClass:
    """The methods of a training class, and the arguments of its `__init__` by name.

    `takes_any`: it may also take other arguments; `is_whole`: it cannot inherit methods from outside the file.
    `misfits` are methods that, as they are written, cannot be called as the training loop calls them.
    """

    name: str
    methods: frozenset[str] = frozenset()
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    takes_any: bool = False
    is_whole: bool = True
    misfits: Mapping[str, str] = field(default_factory=dict)

    @property
    def optional(self) -> list[str]:
        """Its methods that the training loop calls beside those that it needs."""
        return [name for name in CALLED_WITH if name in self.methods and name not in NEEDED]

    @property
    def required(self) -> set[str]:
        """The arguments without a default."""
        return {name for name, argument in self.arguments.items() if argument.is_required}

    def check(self) -> TrainingClass:
        """Return itself; SlurmGPUError if a method is missing, or takes other arguments."""
        for needed in NEEDED:
            if self.is_whole and needed not in self.methods:
                raise SlurmGPUError(
                    f"{self.name}: the class has no method {needed!r}; {EXPECTED}."
                    + (did_you_mean(needed, self.methods - {*NEEDED, "__init__"}) if self.methods else "")
                )
        for name, written in self.misfits.items():
            other = "" if name in NEEDED else ", or rename it if it is for something else"
            raise SlurmGPUError(
                f"{self.name}: the class has the method {written}, and the training loop calls it as "
                f"{as_called(name)}. Let it take that{other}."
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
    return with_whole_path(training, base, f"training = {training!r}")


def read_class(full_name: str) -> TrainingClass | None:
    """The class with the name from `resolve_training`, read from its source; None if finding that needs imports."""
    module, _, name = full_name.rpartition(":")
    path = Path(module) if module.endswith(".py") else _source_of(module)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        compile(tree, str(path), "exec")  # it also refuses two arguments of one name
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise SlurmGPUError(f"{path}{line}: expected Python; {error}. Correct it there.") from error
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if name in classes:
        return replace(_describe(classes[name], classes), name=f"{path}:{name}").check()
    if {name, "*"} & _names_bound(tree):
        return TrainingClass(name, takes_any=True, is_whole=False)  # imported: checked when it is loaded
    raise SlurmGPUError(f"{path} has no class {name!r}.{did_you_mean(name, classes)}")


def load_class(full_name: str) -> type[Any]:
    """The class itself, imported; SlurmGPUError with the user's line if that fails."""
    module, _, name = full_name.rpartition(":")
    advice = f"Correct it, or install what it needs with {sys.executable}."
    with located(f"the import of {module}", module, advice):
        imported = import_named(module)
    found = getattr(imported, name, None)
    if not isinstance(found, type):
        raise SlurmGPUError(f"{module} has no class {name!r}.{did_you_mean(name, classes_in(imported))}")
    return found


def class_of(cls: type[Any]) -> TrainingClass:
    """The description of an imported class."""
    found = {name: value for base in reversed(cls.__mro__[:-1]) for name, value in vars(base).items()}
    later = {name for base in cls.__mro__[:-1] for method in BEGIN for name in _stored_by(vars(base).get(method))}
    methods = frozenset(name for name, value in found.items() if not isinstance(value, PLAIN)) | (later & {*NEEDED})
    misfits = {}
    for name in CALLED_WITH.keys() & found.keys() - later:
        is_static = isinstance(found[name], staticmethod)
        method = found[name].__func__ if isinstance(found[name], staticmethod | classmethod) else found[name]
        is_plain = inspect.isfunction(method) and not hasattr(method, "__wrapped__")
        if is_plain and not _fits(name, written := inspect.signature(method), is_static):
            misfits[name] = f"{name}{written}"
    arguments, takes_any = _arguments(inspect.signature(cls))
    return TrainingClass(cls.__name__, methods, arguments, takes_any, misfits=misfits).check()


def _stored_by(method: Any) -> set[str]:
    """The attributes that a method sets, of whatever object."""
    if not inspect.isfunction(method):
        return set()
    return {str(each.argval) for each in dis.get_instructions(method) if each.opname == "STORE_ATTR"}


def _fits(name: str, signature: inspect.Signature, is_static: bool) -> bool:
    """Whether a method takes what the training loop gives it."""
    try:
        signature.bind(*[None] * (len(CALLED_WITH[name]) + (not is_static)))
    except TypeError:
        return False
    return True


def _arguments(signature: inspect.Signature) -> tuple[dict[str, Argument], bool]:
    """The arguments that a class takes by name, and whether it takes any other."""
    arguments, takes_any = {}, False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            hint, is_required = parameter.annotation, parameter.default is parameter.empty
            word = "" if hint is parameter.empty else hint if isinstance(hint, str) else inspect.formatannotation(hint)
            arguments[parameter.name] = _argument(word, None if is_required else parameter.default, is_required)
    return arguments, takes_any


def _argument(annotation: str, default: Any, is_required: bool) -> Argument:
    word = OPTIONAL.sub(lambda found: found[1] or found[2] or found[3], annotation.strip("'\""))
    word = word if annotation else type(default).__name__
    kind = word if word in TYPES else ""
    return Argument(kind, bool(annotation and kind), is_required)


def _describe(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> TrainingClass:
    """A class including what it inherits from classes in the same file; other bases are unknown."""
    found = TrainingClass(node.name)
    for base in reversed(node.bases):
        name = base.id if isinstance(base, ast.Name) else ""
        if name in classes and classes[name] is not node:
            inherited = _describe(classes[name], classes)
            misfits = {name: misfit for name, misfit in found.misfits.items() if name not in inherited.methods}
            found = replace(
                inherited,
                methods=found.methods | inherited.methods,
                is_whole=found.is_whole and inherited.is_whole,
                misfits={**misfits, **inherited.misfits},
            )
        elif name != "object":
            found = replace(found, is_whole=False, takes_any=True, misfits={})  # it may have others in their place
    own, plain, later = _names_bound(node), _plain_values(node), _set_later(node)
    misfits = {**{name: misfit for name, misfit in found.misfits.items() if name not in own}, **_misfits(node)}
    misfits = {name: misfit for name, misfit in misfits.items() if name not in later}
    found = replace(found, methods=((found.methods | own) - plain) | (later & {*NEEDED}), misfits=misfits)
    decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in node.decorator_list}
    init = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        written = list(_signature(init.args).parameters.values())
        arguments, takes_any = _arguments(inspect.Signature(written[1:]))
        found = replace(found, arguments=arguments, takes_any=takes_any)
    elif "dataclass" in decorators:
        found = replace(found, arguments={**found.arguments, **_of_dataclass(node)})
    return replace(found, is_whole=False, takes_any=True, misfits={}) if decorators - {"dataclass"} else found


def _last_bound(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """The statement of a class's body that binds each name last: `loss = with_model(loss)` follows a method."""
    return {name: each for each in node.body for name in _names_bound(ast.Module([each], []))}


def _plain_values(node: ast.ClassDef) -> set[str]:
    """Attributes of a class that are numbers or texts, or annotated as such: fields of a dataclass, for example."""
    found = set()
    for name, each in _last_bound(node).items():
        value = each.value if isinstance(each, ast.Assign | ast.AnnAssign) else None
        is_plain = isinstance(each, ast.AnnAssign) and ast.unparse(each.annotation) in TYPES
        if is_plain or isinstance(value, ast.Constant):
            found.add(name)
    return found


def _set_later(node: ast.ClassDef) -> set[str]:
    """The attributes of `self` that a class's body sets to more than a constant when an object is made."""
    found = set()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name not in BEGIN:
            continue
        own = next((each.arg for each in (*method.args.posonlyargs, *method.args.args)), None)
        for each in ast.walk(method):
            if not isinstance(each, ast.Assign | ast.AnnAssign) or isinstance(each.value, ast.Constant | None):
                continue
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            parts = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute))
            found |= {part.attr for part in parts if isinstance(part.value, ast.Name) and part.value.id == own}
    return found


def _misfits(node: ast.ClassDef) -> dict[str, str]:
    """The methods in a class's body that do not take what the training loop gives them, as they are written."""
    found = {}
    for name, each in _last_bound(node).items():
        if not isinstance(each, ast.FunctionDef) or name not in CALLED_WITH:
            continue
        decorators = [ast.unparse(decorator) for decorator in each.decorator_list]
        if decorators not in ([], ["staticmethod"], ["classmethod"]):
            continue  # what it takes is unknown
        if not _fits(name, _signature(each.args), decorators == ["staticmethod"]):
            found[name] = f"{name}({ast.unparse(each.args)})"
    return found


def _signature(args: ast.arguments) -> inspect.Signature:
    """The signature of a function in a source: annotations are text, and defaults constants or `...`."""
    tree = ast.parse("def f(): ...")
    [function] = tree.body
    assert isinstance(function, ast.FunctionDef)
    function.args = copy.copy(args)
    function.args.defaults = [each if isinstance(each, ast.Constant) else ast.Constant(...) for each in args.defaults]
    function.args.kw_defaults = [
        each if isinstance(each, ast.Constant | None) else ast.Constant(...) for each in args.kw_defaults
    ]
    made: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(tree), "signature", "exec", annotations.compiler_flag), made)
    return inspect.signature(made["f"])


def _of_dataclass(node: ast.ClassDef) -> dict[str, Argument]:
    return {
        each.target.id: _parsed(each.annotation, each.value)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _parsed(annotation: ast.expr | None, default: ast.expr | None) -> Argument:
    word = ast.unparse(annotation) if annotation is not None else ""
    return _argument(word, default.value if isinstance(default, ast.Constant) else None, default is None)


def _names_bound(node: ast.Module | ast.ClassDef) -> set[str]:
    """The names that a module or a class binds in its body, `if` and `try` included."""
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
    """The source file of a module, found without importing its packages, which may need torch."""
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
