"""Classes by name: slurmgpu's own, those of imported modules, and those of installed packages (entry points)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.exceptions import described

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


@dataclass(frozen=True)
class Plugins:
    """The known subclasses of `interface`.

    `group` is their group of entry points, and `what` names them in messages. `built_in` maps short names to full
    ones, "package.module:Class". `imported` has the classes that registered themselves when they were defined.
    """

    group: str
    what: str
    interface: str
    built_in: Mapping[str, str]
    imported: dict[str, Any] = field(default_factory=dict)

    def register(self, name: str, cls: type) -> None:
        """Make a class known by a name; SlurmGPUError if another class of slurmgpu has this name."""
        full_name = f"{cls.__module__}:{cls.__qualname__}"
        if self.built_in.get(name, full_name) != full_name:
            _, _, taken = self.built_in[name].partition(":")
            raise SlurmGPUError(f"{taken} is the {self.what} {name!r}; choose another name.")
        self.imported[name] = cls

    def known(self) -> list[str]:
        """The names of built-in and imported classes, built-in ones first."""
        return list(dict.fromkeys([*self.built_in, *self.imported]))

    def names(self) -> list[str]:
        """All names, those of installed packages last."""
        known = self.known()
        return [*known, *sorted(self._installed().names - set(known))]

    def find(self, name: str) -> Any:
        """The class of this name, None if there is none; SlurmGPUError if it cannot be loaded."""
        if name in self.imported:
            return self.imported[name]
        full_name = self.built_in.get(name) or next((each.value for each in self._installed().select(name=name)), None)
        if full_name is None:
            return None
        module, _, cls = full_name.partition(":")
        try:
            found = attrgetter(cls)(importlib.import_module(module))
        except Exception as error:
            raise self._unusable(name, error, full_name) from error
        if self.interface not in {f"{base.__module__}.{base.__qualname__}" for base in getattr(found, "__mro__", ())}:
            raise SlurmGPUError(f"{full_name} is no {self.what}: expected a subclass of {self.interface}.")
        own_name = getattr(found, "kind", None) or getattr(found, "name", name)
        if own_name != name:
            raise SlurmGPUError(
                f"{full_name} is named {own_name!r}, but its entry point {name!r}. Give both the same name."
            )
        return found

    def make(self, name: str) -> Any:
        """An instance of the class of this name; SlurmGPUError if there is none, or if it cannot be made."""
        if (cls := self.find(name)) is None:
            raise SlurmGPUError(
                f"No {self.what} {name!r} is installed in this Python, which has {', '.join(self.names())}. "
                f"Install the package that provides it (entry points {self.group})."
            )
        try:
            return cls()
        except Exception as error:
            raise self._unusable(name, error, f"{cls.__module__}:{cls.__qualname__}") from error

    def _unusable(self, name: str, error: Exception, full_name: str) -> SlurmGPUError:
        return SlurmGPUError(f"The {self.what} {name!r} cannot be loaded from {full_name}: {described(error)}")

    def _installed(self) -> EntryPoints:
        from importlib.metadata import entry_points  # takes 15 ms, which most runs do not need

        return entry_points(group=self.group)
