"""Digests of functions and of the values that they use, equal in all processes.

Pickles differ between processes: the order of sets varies, equal strings are one object or two, cloudpickle gives
classes random numbers, and PyTorch writes the addresses of storages.
"""

from __future__ import annotations

import hashlib
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from slurmgpu.code.pickling import MOST_BYTES, dumps, reducer

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)})
_TRACKER = re.compile(r"[0-9a-f]{32}")
"""The random number that cloudpickle gives to each class and type variable."""
_OF_PLACE = ("__firstlineno__", "__static_attributes__")
"""What Python 3.13 adds to a class: its line, and names in the order of a set."""
_N_OF_STATE = 3


def digest_of(value: Any) -> str:
    """A digest of a value that can be pickled: equal in all processes, wherever its code lies in files.

    File names, line numbers, the random numbers of classes and the orders of sets do not count. The digest of a large
    value differs in each process: if the elements of its sets, each with all that it refers to, have more than
    MOST_BYTES, or if all of it has more than 10 times that.
    """
    written, budget = hashlib.sha256(), _Budget(10 * MOST_BYTES)

    def write(content: bytes) -> None:
        budget.spend(len(content))
        written.update(content)

    try:
        walk = _Walk(reducer(), write, _Budget(MOST_BYTES))
        walk.add(value)
        walk.add_sets()
    except (RecursionError, _TooMuchError):
        # Values nested so deeply that only pickle's C code can follow; graphs whose nodes have sets of nodes; tuples
        # that hold the same tuple several times, on many levels.
        written = hashlib.sha256(dumps(value).content)
    return written.hexdigest()


class _TooMuchError(Exception):
    """The values have too many bytes."""


class _Budget:
    """A number of bytes that may still be written; `spend` raises _TooMuchError beyond it."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes

    def spend(self, n_bytes: int) -> None:
        self._n_bytes -= n_bytes
        if self._n_bytes < 0:
            raise _TooMuchError


class _Walk:
    """Writes a graph of objects as pickle takes it apart; objects that may be shared have numbers.

    For an element of a set, `outer` is the walk that met the set. `budget` is for the elements of all sets together.
    """

    def __init__(
        self,
        take_apart: Callable[[Any], Any],
        write: Callable[[bytes], object],
        budget: _Budget,
        outer: _Walk | None = None,
    ) -> None:
        self._take_apart, self._write, self._budget, self._outer = take_apart, write, budget, outer
        self._n_outer: int = 0 if outer is None else outer._n_outer + len(outer._met)
        self._met: dict[int, tuple[int, Any]] = {}
        self._sets: list[Any] = []

    def add(self, value: Any) -> None:
        """Write a value, then its parts in brackets."""
        kind = type(value)
        if kind in _ATOMS:
            self._word(_spelled(value))
        elif (number := self._number_of(value)) is not None:
            self._word(f"same {number}")
        elif kind is tuple:  # not numbered: whether equal constants are one tuple depends on how Python read the file
            self._add_all("tuple", value)
        elif kind in (set, frozenset):
            self._remember(value)
            self._word(kind.__name__)
            self._sets.append(value)
        else:
            self._remember(value)
            if kind is list:
                self._add_all("list", value)
            elif kind is dict:
                self._add_all("dict", [*value.keys(), *value.values()])
            elif kind is bytearray:
                self._word(f"bytearray {bytes(value)!r}")
            elif (tensor := _of_tensor(value)) is not None:
                self._add_all("tensor", tensor)
            else:
                self._add_taken_apart(value)

    def add_sets(self) -> None:
        """Write the elements of the sets after all else, so that an element that is also elsewhere has its number."""
        for each in self._sets:
            self._word(f"elements {sorted(map(self._digest_within, each))}")

    def _add_taken_apart(self, value: Any) -> None:
        if isinstance(value, types.CodeType):
            value = value.replace(co_filename="", co_firstlineno=1, co_linetable=b"")
        taken = self._take_apart(value)
        if isinstance(taken, str):  # it is imported by this name
            self._word(f"global {getattr(value, '__module__', None)} {taken}")
            return
        make, arguments, *rest = taken
        if isinstance(value, type | typing.TypeVar):
            arguments = tuple("" if isinstance(each, str) and _TRACKER.fullmatch(each) else each for each in arguments)
        if isinstance(value, set | frozenset) and make is type(value):  # of a subclass
            arguments = (frozenset(value), *arguments[1:])
        if isinstance(value, types.FunctionType):
            code, variables, *others = arguments
            # `__file__` says where the code lies. If the code reads it, it is also among the variables of the state.
            arguments = code, {name: each for name, each in variables.items() if name != "__file__"}, *others
        if isinstance(value, type) and len(taken) >= _N_OF_STATE:
            members, slots = taken[2]
            rest[0] = {name: each for name, each in members.items() if name not in _OF_PLACE}, slots
        # Elements and pairs are given by iterators.
        parts = [each if each is None or number not in (1, 2) else list(each) for number, each in enumerate(rest)]
        self._add_all("made", (make, arguments, *parts))

    def _add_all(self, what: str, values: Sequence[Any]) -> None:
        self._word(f"({what} {len(values)}")
        if _ATOMS.issuperset(map(type, values)):
            self._word(_all_spelled(values))  # there may be millions of them
        else:
            for each in values:
                self.add(each)
        self._word(")")

    def _digest_within(self, value: Any) -> str:
        """The digest of an element of a set; objects that were written before have their numbers in it."""
        if type(value) in _ATOMS:
            return _spelled(value)
        written = hashlib.sha256()

        def write(content: bytes) -> None:
            self._budget.spend(len(content))
            written.update(content)

        walk = _Walk(self._take_apart, write, self._budget, self)
        walk.add(value)
        walk.add_sets()
        return written.hexdigest()

    def _remember(self, value: Any) -> None:
        self._met[id(value)] = self._n_outer + len(self._met), value  # kept, so that no other object has its id

    def _number_of(self, value: Any) -> int | None:
        walk: _Walk | None = self
        while walk is not None:
            if (known := walk._met.get(id(value))) is not None:
                return known[0]
            walk = walk._outer
        return None

    def _word(self, text: str) -> None:
        self._write(text.encode("utf-8", "surrogatepass") + b"\0")


def _all_spelled(values: Sequence[Any]) -> str:
    try:
        return repr([*values])
    except ValueError:  # a very long number
        return " ".join(map(_spelled, values))


def _spelled(value: Any) -> str:
    """An atom with its type. Hex: Python refuses to print very long decimal numbers."""
    return f"{type(value).__name__} {hex(value) if type(value) is int else repr(value)}"


def _of_tensor(value: Any) -> tuple[Any, ...] | None:
    """What a dense tensor on the CPU is, without the address of its storage; None for others."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return None
    content = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return type(value), str(value.dtype), tuple(value.shape), value.requires_grad, content, vars(value)
