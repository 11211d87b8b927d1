"""Classes by name: built-in ones, and those of installed packages, by a group of entry points."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


@dataclass(frozen=True)
class Plugins:
    """The known subclasses of `interface`.

    `what` names them in sentences; `built_in` has the full names, "package.module:Class", by short ones.
    """

    group: str
    what: str
    interface: str
    built_in: Mapping[str, str]

    def names(self) -> list[str]:
        """The names of all, built-in ones first."""
        return [*self.built_in, *sorted(self._installed().names - self.built_in.keys())]

    def make(self, name: str) -> Any:
        """An instance of the class of this name; SlurmGPUError if no package here has it, or it cannot be loaded."""
        full_name = self.built_in.get(name) or next((each.value for each in self._installed().select(name=name)), None)
        if full_name is None:
            raise SlurmGPUError(
                f"No {self.what} {name!r} is known in this Python; known are {', '.join(self.names())}. "
                f"Install the package that brings it ({self.group} in its entry points)."
            )
        try:
            module, _, cls = full_name.partition(":")
            made = attrgetter(cls)(importlib.import_module(module))()
        except Exception as error:
            raise SlurmGPUError(
                f"The {self.what} {name!r} cannot be loaded from {full_name}: {type(error).__name__}: {error}"
            ) from error
        if self.interface not in {f"{base.__module__}.{base.__qualname__}" for base in type(made).__mro__}:
            raise SlurmGPUError(f"{full_name} is no {self.what}: it is no subclass of {self.interface}.")
        return made

    def _installed(self) -> EntryPoints:
        from importlib.metadata import entry_points  # 15 ms, and most runs name built-in ones

        return entry_points(group=self.group)
