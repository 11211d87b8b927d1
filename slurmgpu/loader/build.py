"""Build a workload from its name and settings, and read what its class says without building it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.loader.adapted import Adapted, adapt
from slurmgpu.loader.members import read_member, takes
from slurmgpu.loader.modules import at_planning, load_class
from slurmgpu.loader.names import resolve_use, title_of
from slurmgpu.loader.settings import check_names
from slurmgpu.util.exceptions import message_of
from slurmgpu.workload import Template, Translated


def build(full_name: str, settings: Mapping[str, Any], search_path: Path) -> Adapted:
    """Build a workload. SlurmGPUError if its class, a setting or `columns` is missing or wrong."""
    cls = load_class(full_name, search_path)
    check_names(full_name, cls, settings)
    try:
        workload = adapt(cls(**settings), full_name)
    except (ValueError, TypeError, ItemError) as error:
        raise SlurmGPUError(f"{title_of(full_name)} refuses its settings: {message_of(error)}") from error
    _ = workload.columns  # raises if missing
    return workload


def template_of(use: str, base: Path) -> Template:
    """The class's `template`, which `init` proposes."""
    expected = "a text, the lines under [settings], a Path to them, or a Template, as an attribute of the class"
    found = _read_class(use, base, "template", expected, lambda value: isinstance(value, (str, Path, Template)))
    return found if isinstance(found, Template) else Template(found or "")


def translator_of(use: str, base: Path) -> Callable[[str, Path, str], Translated] | None:
    """The class's `from_args`, which `init --from-args` calls; None if it replaces no script."""
    expected = "a static method, from_args(text, folder, stem)"
    found: Callable[..., Any] | None = _read_class(use, base, "from_args", expected, lambda value: takes(value, 3))
    return found


def _read_class(use: str, base: Path, attribute: str, expected: str, is_good: Callable[[Any], bool]) -> Any:
    full_name = resolve_use(use, base)
    with at_planning(full_name):
        cls = load_class(full_name, base)
    return read_member(cls, full_name, attribute, expected, is_good)
