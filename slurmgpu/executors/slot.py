"""`python -m slurmgpu.executors.slot FOLDER`: Submitit's controller of a slot, which exits with its task's code.

Submitit's own always exits with 0, and dies of the first file system error on its logs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from submitit.local.local import Controller

from slurmgpu.run.failures import blaming
from slurmgpu.run.records import node_name
from slurmgpu.util.shared_files import retried


class Slot(Controller):  # type: ignore[misc]  # Submitit's is not typed
    """The controller of one task, which tries again while its logs cannot be opened."""

    code = 0

    def start_tasks(self) -> None:
        """Open the logs, and start the task."""
        retried(lambda: Controller.start_tasks(self))

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        """The exit code of the task, once it has ended."""
        codes: Sequence[int | None] = super().wait(freq)
        self.code = codes[0] or 0
        return codes


def main() -> None:
    """Run the controller; exit code 74 and a sentence that names the node if the file system is lost."""
    slot = Slot(Path(sys.argv[1]))
    with blaming(node_name()):
        slot.run()
    sys.exit(slot.code if slot.code >= 0 else 128 - slot.code)


if __name__ == "__main__":
    main()
