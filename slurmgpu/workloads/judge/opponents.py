"""The second run of a comparison: its merged file, whose rows are joined by the items' indices."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.errors import ItemError, SlurmGPUError, did_you_mean
from slurmgpu.run.plan_beside import plan_beside
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.util.json_values import json_value
from slurmgpu.util.users import expanded
from slurmgpu.workload import Item

if TYPE_CHECKING:
    from slurmgpu.results import Merged


class Opponent:
    """A complete merged file with its run's fingerprint; `keep` has the item fields that it kept.

    `awaited` is the plan of a run that has not written the file yet, as its run.json has it.
    """

    def __init__(
        self, path: Path, fingerprint: str, keep: Iterable[str], awaited: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.fingerprint, self.keep, self.awaited = path, fingerprint, tuple(keep), awaited
        self._merged: Merged | None = None

    @classmethod
    def find(cls, against: str | Mapping[str, Any]) -> Opponent:
        """The opponent from a merged file, a run directory, or the result of `to_json`.

        SlurmGPUError unless the file is complete and its checksums are right, or its run is incomplete.
        """
        if not isinstance(against, str):
            return cls(Path(against["path"]), against["fingerprint"], against.get("keep", ()))
        path = expanded(against).absolute()
        if not path.exists():
            raise SlurmGPUError(
                f"against: there is no run or merged file {path}. Correct the path. To compare with a run that is not "
                f"complete yet, submit that run first, and this one with --after, as in --after {shlex.quote(against)}."
            )
        path = path / "merged.h5" if path.is_dir() else path
        beside = plan_beside(path)
        if beside and _is_incomplete(path):
            return cls(path, beside["fingerprint"], beside["keep"], beside)
        opponent = cls(path, "", ())
        with opponent._read(verify=True) as merged:
            opponent.fingerprint = str(merged.attributes["fingerprint"])
            opponent.keep = tuple(name for name in beside.get("keep", ()) if name in merged.columns)
        return opponent

    def to_json(self) -> dict[str, Any]:
        """The path, the fingerprint of the run's plan, and the fields that it kept."""
        return {"path": str(self.path), "fingerprint": self.fingerprint, "keep": list(self.keep)}

    def check_input(self, files: Sequence[Path], n_items: int, field: str) -> None:
        """Refuse a run without the compared `field`, or with other items, as far as plans and files show."""
        if self.awaited is not None:
            columns, n_found = [*self.awaited["columns"]], self.awaited["n_items"]
        else:
            with self._read() as merged:
                columns, n_found = [*merged.columns], len(merged)
        if field not in columns:
            raise SlurmGPUError(
                f"{self.path} has no column {field!r}, whose texts are compared; it has {', '.join(columns)}."
                f"{did_you_mean(field, columns)}"
            )
        advice = (
            "Rows are joined by their index, so both runs must have the same input. To compare different inputs, put "
            "both texts into each item, and remove against."
        )
        if n_found != n_items:
            raise SlurmGPUError(f"{self.path} has {n_found} items, and the input has {n_items}. {advice}")
        ours = plan_beside(files[0]).get("input_digest") if len(files) == 1 else None
        theirs = plan_beside(self.path).get("input_digest")
        if None not in (ours, theirs) and ours != theirs:
            raise SlurmGPUError(f"The runs of {self.path} and {files[0]} have different inputs. {advice}")

    def open(self) -> None:
        """Open the file; SlurmGPUError if it no longer belongs to the same run as at planning."""
        merged = self._read()
        if merged.attributes["fingerprint"] != self.fingerprint:
            raise SlurmGPUError(f"{self.path} belongs to a different run than at planning. Plan the comparison again.")
        self._merged = merged

    def row(self, item: Item, compared: Sequence[str]) -> Mapping[str, Any]:
        """The second run's row for an item; ItemError if it failed, is missing or damaged, or belongs to another item.

        Two rows belong to the same item if all fields that both kept, except the `compared` ones, are equal.
        """
        assert self._merged is not None, "open() comes first"
        index = item.index
        if index >= len(self._merged):
            raise ItemError(f"{self.path} has no item {index}: it has {len(self._merged)} items")
        try:
            self._merged.check_rows(index, index + 1)
        except SlurmGPUError as error:
            raise ItemError(f"{error} Then compute this item with `slurmgpu resubmit --failed` of this run.") from error
        row = self._merged.row(index)
        if index in self._merged.errors:
            raise ItemError(f"the item failed in {self.path}: {self._merged.errors[index]}")
        names = [name for name in self.keep if name in item.data and name not in compared]
        for name in names:
            if (ours := json_value(item.data[name])) != row[name]:
                raise ItemError(
                    f"field {name!r} is {ours!r:.80} here and {row[name]!r:.80} in {self.path}: the items differ"
                )
        return row

    def _read(self, *, verify: bool = False) -> Merged:
        from slurmgpu import results

        merged = results.open(self.path, verify=verify)
        if not merged.complete:
            merged.close()
            raise SlurmGPUError(f"{self.path} lacks rows: its run is incomplete. Complete it with `slurmgpu resubmit`.")
        return merged


def _is_incomplete(path: Path) -> bool:
    """Whether a merged file is missing, or lacks rows."""
    if not path.exists():
        return True
    head = read_merged_head(path)  # None if it is damaged, which reading it tells
    return head is not None and not head.complete
