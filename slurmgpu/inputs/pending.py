"""The merged file of an unfinished run as an input: its number of items is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.spec import InputFile, InputSpec
from slurmgpu.inputs.tables import Merged

PROMISED = -1
"""The size and time of a future file; its SHA-256 is replaced by the plan's fingerprint."""


def promise(
    path: Path, index: Path, *, n_items: int, columns: Sequence[str], fingerprint: str, stride: int
) -> InputSpec:
    """The spec of the merged file that the run with this plan `fingerprint` will leave at `path`.

    A Reader refuses a file of another plan, or an incomplete one.
    """
    file = InputFile(str(path), PROMISED, PROMISED, fingerprint, n_items)
    spec = InputSpec(Merged.name, (file,), n_items, stride, tuple(columns))
    with IndexWriter(index, stride=stride, n_files=0) as writer:
        writer.publish(spec.digest)
    return spec
