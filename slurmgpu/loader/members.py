"""Read a member of the user's object or class; SlurmGPUError for a wrong type."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.names import title_of


def read_member(user: Any, name: str, attribute: str, expected: str, is_good: Callable[[Any], bool]) -> Any:
    """An attribute of a user's object or class; None if it is absent, SlurmGPUError unless `is_good`.

    `name` is the full name of the class. An iterator becomes a tuple.
    """
    value = getattr(user, attribute, None)
    if isinstance(value, Iterator):
        value = tuple(value)
    if value is not None and not is_good(value):
        raise SlurmGPUError(f"{title_of(name)} has {attribute} = {_shown(value)}; expected {expected}.")
    return value


def _shown(value: Any) -> str:
    if inspect.ismethod(value):
        return f"a method, {value.__name__}{inspect.signature(value.__func__)}"
    if isinstance(value, (property, cached_property)):
        return "a property"
    return reprlib.repr(value)


def is_positive(value: Any) -> bool:
    """Whether `value` is a whole number above 0, and not True."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_many(value: Any, kinds: tuple[type, ...]) -> bool:
    is_many = isinstance(value, Iterable) and isinstance(value, Sized) and not isinstance(value, (str, bytes))
    return is_many and all(isinstance(each, kinds) for each in value)


def is_collection_of(*kinds: type) -> Callable[[Any], bool]:
    """A check whether a value is a collection of such values, and no text."""
    return lambda value: _is_many(value, kinds)


def is_mapping_to(*kinds: Any) -> Callable[[Any], bool]:
    """A check whether a value is a mapping of texts to such values."""
    return lambda value: isinstance(value, Mapping) and _is_many(value, (str,)) and _is_many(value.values(), kinds)


def takes(value: Any, n_arguments: int) -> bool:
    """Whether a value can be called with that many arguments; True if Python cannot tell, e.g. for some built-ins."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*[None] * n_arguments)
    except TypeError:
        return False
    except ValueError:
        pass
    return True
