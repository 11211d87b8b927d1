"""Messages on stderr of a container or an interpreter that did not start, and what each means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from slurmgpu.containers.settings import ContainerError


@dataclass(frozen=True)
class Complaint:
    """A pattern to search for, and what it means, which may refer to groups of the pattern."""

    pattern: str
    meaning: str
    node_at_fault: bool = False
    kind: str = "container"
    is_damage: bool = False


INTERPRETER = (
    Complaint(r"slurmgpu needs Python 3\.\d+ or newer, but this is \d+\.\d+", "in the image: \\g<0>"),
    Complaint(r"No module named '(numpy|h5py)'", r"the image has no \1; a worker needs NumPy and h5py in it"),
    Complaint(
        r"No module named 'encodings'",
        "the image's Python does not find its standard library: PYTHONHOME is set in the image, or a bind hides it",
    ),
    Complaint(
        r"version `(GLIBC_[\d.]+)' not found \(required by (\S+)\)",
        r"\2 needs a newer C library than the image has (\1); build the image on a newer base",
    ),
    Complaint(
        r"error while loading shared libraries: (\S+):",
        r"the image lacks the library \1, which its Python needs",
    ),
)
"""Searched in all lines of a worker that ended without an event."""


def find_complaint(text: str, complaints: Iterable[Complaint]) -> ContainerError | None:
    """The first of the complaints that the text contains, as an error; None if there is none."""
    for complaint in complaints:
        if match := re.search(complaint.pattern, text):
            sentence = match.expand(complaint.meaning)
            return ContainerError(
                sentence,
                kind=complaint.kind,
                node_at_fault=complaint.node_at_fault,
                is_damage=complaint.is_damage,
            )
    return None
