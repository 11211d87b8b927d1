"""Pickle functions by value, with the variables that they use, and say why a value cannot be pickled."""

from __future__ import annotations

import dis
import functools
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NewType, ParamSpec

from slurmgpu.util.exceptions import described

if sys.version_info >= (3, 11):
    from typing import TypeVarTuple
if sys.version_info >= (3, 12):
    from typing import TypeAliasType

MOST_BYTES = 10_000_000
"""The largest pickle of a function with the values that it uses. Each worker reads it."""
_CACHED = type(functools.lru_cache(lambda: None))
_PROTOCOL = 4
"""The protocol for what `reducer` returns. Protocol 5 may give arrays as buffers instead of bytes."""
_WITH_VARIABLES = (FunctionType, MethodType, functools.partial, type, staticmethod, classmethod, property)


class CannotPickleError(Exception):
    """A value cannot be pickled. The message is a clause without a subject: "is an open file"."""


class _TooLargeError(CannotPickleError):
    """The pickle has more than MOST_BYTES."""


@dataclass(frozen=True)
class Pickled:
    """A pickle, the code in it, and the modules that it needs, with those that its code imports when it is called."""

    content: bytes
    codes: Sequence[CodeType]
    imports: frozenset[str]


@dataclass(frozen=True)
class _Seen:
    """What a pickler has met: code objects, the modules that they import, and the packages of code by its id."""

    codes: list[CodeType]
    imports: set[str]
    packages: dict[int, str | None]


class _Bounded(io.BytesIO):
    """A file in memory that refuses to grow beyond MOST_BYTES."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise _TooLargeError(f"has more than {MOST_BYTES // 10**6} MB")
        return super().write(data)


def name_of(function: Callable[..., Any]) -> str | None:
    """The name, `package.module:function`, by which tasks can import a function; None if they cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    if not getattr(found, "__spec__", None):
        return None  # made at run time
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


def dumps(value: Any) -> Pickled:
    """Pickle a value; CannotPickleError if that fails or takes more than MOST_BYTES."""
    file, seen = _Bounded(), _Seen([], set(), {})
    try:
        _pickler(file, seen).dump(value)
    except CannotPickleError:
        raise
    except Exception as error:  # any that the user's objects raise
        raise CannotPickleError(f"cannot be pickled ({described(error)})") from error
    return Pickled(file.getvalue(), seen.codes, frozenset(seen.imports - {"__main__", "__mp_main__"}))


def reducer() -> Callable[[Any], Any]:
    """A function that returns how an object is pickled: the tuple of `__reduce__`, or its global name.

    It is not for plain values such as numbers, texts, lists and dicts.
    """
    pickler = _pickler(io.BytesIO(), _Seen([], set(), {}))

    def take_apart(obj: Any) -> Any:
        if (found := pickler.reducer_override(obj)) is not NotImplemented:
            return found
        if (by_kind := pickler.dispatch_table.get(type(obj))) is not None:
            return by_kind(obj)
        return obj.__qualname__ if isinstance(obj, type | FunctionType) else obj.__reduce_ex__(_PROTOCOL)

    return take_apart


def _pickler(file: io.BytesIO, seen: _Seen) -> Any:
    import cloudpickle  # the import is slow

    if (main := sys.modules.get("__mp_main__")) is not None:  # the script's module in a process that it spawned
        cloudpickle.register_pickle_by_value(main)

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                seen.codes.append(obj)
                seen.imports.update(_imported_in(obj, seen.packages.get(id(obj))))
                made, arguments = self.dispatch_table[CodeType](obj)
                # cloudpickle 3.1.3 leaves out the file's name, which tracebacks show.
                return _code_of_file, (made, arguments, obj.co_filename)
            if isinstance(obj, FunctionType):
                seen.packages.update(dict.fromkeys(map(id, _codes_of(obj)), obj.__globals__.get("__package__")))
            elif isinstance(obj, _CACHED) and name_of(obj) is None:
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            elif (by_value := _typing_by_value(obj)) is not None:
                return by_value
            elif type(obj) is functools.cached_property:
                return _cached_property, (obj.func, obj.attrname)
            elif isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdin, sys.stdout, sys.stderr):
                raise CannotPickleError("is an open file")  # cloudpickle would pickle the file's content
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                raise CannotPickleError(f"is a tensor on {obj.device}")
            reduced = super().reducer_override(obj)
            if isinstance(obj, ModuleType):
                seen.imports.add(obj.__name__)
            elif reduced is NotImplemented and isinstance(obj, FunctionType | type):  # it is imported by its name
                seen.imports.add(str(obj.__module__))
            return reduced

    return Pickler(file)


def _code_of_file(make: Callable[..., CodeType], arguments: Sequence[Any], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with a new cache, as made by `functools.lru_cache`."""
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _imported_in(code: CodeType, package: str | None) -> Iterator[str]:
    """The modules that code imports when it runs, and `a.b` where it imports b from a."""
    loaded: list[Any] = [None, None]
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            level, names = loaded[-2:]
            try:
                name = importlib.util.resolve_name("." * (level or 0) + each.argval, package)
            except (ImportError, ValueError):
                continue  # beyond the package: Python will say so
            yield name
            yield from (f"{name}.{inner}" for inner in names or () if inner != "*")
        elif each.opname.startswith("LOAD_"):
            loaded.append(each.argval)


def _cached_property(function: Callable[..., Any], name: str | None) -> Any:
    """Make a cached property. It is rebuilt because that of Python 3.11 and older has a lock, which is not pickled."""
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _typing_by_value(obj: Any) -> tuple[Any, ...] | None:
    """The pickle of a name of `typing` that tasks cannot import; None for others, which are pickled by name."""
    if isinstance(obj, NewType) and not _is_importable(obj):
        return NewType, (obj.__name__, obj.__supertype__)
    if isinstance(obj, ParamSpec) and not _is_importable(obj):
        return ParamSpec, (obj.__name__,)
    if sys.version_info >= (3, 11) and isinstance(obj, TypeVarTuple) and not _is_importable(obj):
        return TypeVarTuple, (obj.__name__,)
    if sys.version_info >= (3, 12) and isinstance(obj, TypeAliasType) and not _is_importable(obj):
        return functools.partial(TypeAliasType, type_params=obj.__type_params__), (obj.__name__, obj.__value__)
    return None


def _is_importable(obj: Any) -> bool:
    module = sys.modules.get(obj.__module__) if obj.__module__ != "__main__" else None
    return getattr(module, obj.__name__, None) is obj


def to_blame(function: Any) -> dict[str, str]:
    """The variables of a function that cannot be pickled, each with the reason."""
    found: dict[str, str] = {}
    _blame(function, {id(function)}, found)
    return found


def _blame(function: Any, met: set[int], found: dict[str, str]) -> None:
    for name, value in used_by(function):
        if id(value) in met:
            continue
        met.add(id(value))
        try:
            dumps(value)
        except CannotPickleError as error:
            has_variables = isinstance(value, _WITH_VARIABLES)
            if has_variables:
                _blame(value, met, found)
            if not (has_variables and found):
                found[name] = str(error)


def of_cpu(function: Any) -> list[str]:
    """The variables of a function, and of what it uses, that name the CPU as PyTorch's device."""
    found: dict[str, None] = {}
    met, todo = {id(function)}, [function]
    while todo:
        for name, value in used_by(todo.pop()):
            if (isinstance(value, str) or _is_device(value)) and str(value) == "cpu":
                found[name] = None
            elif (
                isinstance(value, _WITH_VARIABLES) and not (callable(value) and name_of(value)) and id(value) not in met
            ):
                met.add(id(value))
                todo.append(value)
    return list(found)


def _is_device(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.device)


def used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function holds or reads, with the names of their variables."""
    if isinstance(function, functools.partial):
        yield from [(f"argument {number}", value) for number, value in enumerate(function.args)]
        yield from function.keywords.items()
        yield from used_by(function.func)
    elif isinstance(function, MethodType):
        yield from used_by(function.__self__)
        yield from used_by(function.__func__)
    elif isinstance(function, FunctionType):
        names = {name for code in _codes_of(function) for name in code.co_names}
        yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_set(cell))
        defaults = function.__defaults__ or ()
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from (function.__kwdefaults__ or {}).items()
    elif isinstance(function, staticmethod | classmethod):
        yield from used_by(function.__func__)
    elif isinstance(function, property):
        yield from ((each.__name__, each) for each in (function.fget, function.fset, function.fdel) if each is not None)
    elif isinstance(function, type):
        yield from ((name, value) for name, value in vars(function).items() if name not in ("__dict__", "__weakref__"))
        yield from ((base.__name__, base) for base in function.__bases__)
    elif hasattr(function, "__wrapped__"):
        yield from used_by(function.__wrapped__)
    elif hasattr(function, "__dict__"):
        yield from vars(function).items()
        yield type(function).__name__, type(function)


def _is_set(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _codes_of(function: FunctionType) -> Iterator[CodeType]:
    """The code of a function and of those within it."""
    todo = [function.__code__]
    while todo:
        yield (code := todo.pop())
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
