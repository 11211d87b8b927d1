"""How the first calls of a workload end, until one computes a row: if all fail alike, the workload may be at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slurmgpu.run.records import ALL_FAIL
from slurmgpu.worker.call_failures import Failure


@dataclass
class FirstCalls:
    """Whether all items so far failed in the same way.

    `doubts()` says whether the worker doubts that the workload works. `tell(text)` shows in `slurmgpu status` how all
    calls fail; an empty text ends that.
    """

    doubts: Callable[[], bool]
    tell: Callable[[str], None]
    has_row: bool = False
    _has_told: bool = False
    _ways: set[tuple[str, ...] | None] = field(default_factory=set)

    def note(self, failure: Failure | None) -> bool:
        """Note how all items of a call failed, or that some did not; return whether all so far failed in that way."""
        if failure is None:
            self.has_row = True
            if self._has_told:
                self._has_told = False
                self.tell("")
            return False
        if not self.has_row and len(self._ways) < 2:
            self._ways.add(failure.way)
        all_fail = self.fail_alike(failure)
        if all_fail and not self._has_told and failure.retry_after is None:
            self._has_told = True
            self.tell(f"{ALL_FAIL}: {failure.first_line}")
        return all_fail

    def fail_alike(self, failure: Failure) -> bool:
        """Whether all items so far failed in this way, and the worker doubts that the workload works."""
        is_alike = not self.has_row and failure.way is not None and self._ways == {failure.way}
        return is_alike and failure.kind == "item_error" and self.doubts()
