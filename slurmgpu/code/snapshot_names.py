"""The names of files in a snapshot. They keep relative paths, so that the copy of a script finds other files."""

from __future__ import annotations

from pathlib import Path

from slurmgpu.util.users import expanded


class SnapshotNames:
    """Gives each file a unique name: its path below the run file's folder `base`, a script's folder, or its package."""

    def __init__(self, base: Path) -> None:
        self._roots = [base]
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add_script(self, script: Path) -> None:
        """Keep the relative paths around a script that lies outside of the run file's folder."""
        if not script.is_relative_to(self._roots[0]):
            above = script.parent.parent
            is_everyones = above in (Path(above.anchor), expanded("~").parent)
            self._roots.append(script.parent if is_everyones else above)

    def new(self, path: Path, module: str | None) -> str:
        """The name of the file of a `module`, or of a script; with a number before it if the name is taken."""
        if root := next((each for each in self._roots if path.is_relative_to(each)), None):
            name = str(path.relative_to(root))
        elif module is not None:
            depth = module.count(".") + (2 if path.name == "__init__.py" else 1)
            name = str(Path(*path.parts[-depth:]))
        else:
            name = path.name
        number = 2
        while name in self._files or name in self._folders or not self._files.isdisjoint(_folders_of(name)):
            name, number = f"{number}/{name}", number + 1
        self._files.add(name)
        self._folders.update(_folders_of(name))
        return name


def _folders_of(name: str) -> list[str]:
    return [str(folder) for folder in Path(name).parents]
