"""A workload as users write it: `make lint` checks by mypy that its class is a `slurmgpu.Workload`."""

from collections.abc import Sequence

import slurmgpu
from slurmgpu import Array, Item, ItemError, Retry


class Lengths:
    """Its parameter has a name of its own, and its rows are a narrower type than the protocol's."""

    columns = {"n": Array("int32")}
    batch_size = 16

    def __call__(self, batch: Sequence[Item]) -> list[dict[str, int] | ItemError | Retry]:
        """The number of fields of each item."""
        return [{"n": len(item.data)} for item in batch]


WORKLOAD: slurmgpu.Workload = Lengths()
