"""The second run of a comparison: its merged file, found by the items' indices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import ItemError, SlurmGPUError

if TYPE_CHECKING:
    from slurmgpu.results import Merged


class Opponent:
    """A complete merged file, and its fingerprint when the comparison was planned."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self._merged: Merged | None = None

    @classmethod
    def find(cls, against: str | Mapping[str, str]) -> Opponent:
        """The run of that merged file or directory, or as `to_json` gave it; SlurmGPUError unless it is complete."""
        if not isinstance(against, str):
            return cls(Path(against["path"]), against["fingerprint"])
        path = Path(against).expanduser().absolute()
        opponent = cls(path / "merged.h5" if path.is_dir() else path, "")
        with opponent._read() as merged:
            opponent.fingerprint = str(merged.attributes["fingerprint"])
        return opponent

    def to_json(self) -> dict[str, str]:
        """The path, and the fingerprint of the plan that its rows belong to."""
        return {"path": str(self.path), "fingerprint": self.fingerprint}

    def open(self) -> None:
        """Open the file; SlurmGPUError if it is of another run than the one that was planned with."""
        merged = self._read()
        if merged.attributes["fingerprint"] != self.fingerprint:
            raise SlurmGPUError(
                f"{self.path} is no longer of the run that this one was planned with; plan the comparison anew."
            )
        self._merged = merged

    def item(self, index: int) -> Mapping[str, Any]:
        """The second run's row for an item; ItemError if it failed there, or if there is none."""
        assert self._merged is not None, "open() comes first"
        if index >= len(self._merged):
            raise ItemError(f"{self.path} has no item {index}: it has {len(self._merged)}")
        row = self._merged.row(index)
        if index in self._merged.errors:
            raise ItemError(f"the item failed in {self.path}: {self._merged.errors[index]}")
        return row

    def _read(self) -> Merged:
        from slurmgpu import results

        merged = results.open(self.path)
        if not merged.complete:
            merged.close()
            raise SlurmGPUError(f"{self.path} lacks rows: its run is incomplete. `slurmgpu resubmit` completes it.")
        return merged
