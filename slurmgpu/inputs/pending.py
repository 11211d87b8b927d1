"""The merged file of a run that is still at work, as an input: a complete run's items are known before its rows are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurmgpu.inputs.index import IndexWriter
from slurmgpu.inputs.spec import InputFile, InputSpec
from slurmgpu.inputs.tables import Merged

PROMISED = -1
"""The size and time of a file that does not exist yet; in place of its SHA-256 stands its plan's fingerprint."""


def promise(
    path: Path, index: Path, *, n_items: int, columns: Sequence[str], fingerprint: str, stride: int
) -> InputSpec:
    """The spec of the merged file that the run with this plan `fingerprint` is going to leave at `path`.

    A Reader refuses what it finds there if it is of another plan, or incomplete.
    """
    file = InputFile(str(path), PROMISED, PROMISED, fingerprint, n_items)
    spec = InputSpec(Merged.name, (file,), n_items, stride, tuple(columns))
    with IndexWriter(index, stride=stride, n_files=0) as writer:
        writer.publish(spec.digest)
    return spec
