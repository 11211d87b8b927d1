"""Errors of single items in a call: an ItemError replaces the item's result; other items are computed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from slurmgpu.errors import ItemError

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")


def value_or_error(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | ItemError:
    """The result of `make`, or the ItemError that it raises."""
    try:
        return make(*args, **kwargs)
    except ItemError as error:
        return error


def value_of(found: T | ItemError) -> T:
    """The value; raises it if it is an ItemError."""
    if isinstance(found, ItemError):
        raise found
    return found


def compute_good(
    items: Iterable[ItemT], ask: Callable[[ItemT], T], compute: Callable[[list[T]], Iterable[ResultT | ItemError]]
) -> list[ResultT | ItemError]:
    """The results of `compute(ask(item))`, computed together; the ItemError of `ask` for an item that it refuses."""
    given = [value_or_error(ask, item) for item in items]
    results = iter(compute([each for each in given if not isinstance(each, ItemError)]))
    return [each if isinstance(each, ItemError) else next(results) for each in given]
