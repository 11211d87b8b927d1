"""The items of a run: the files that hold them, and random access to ranges of items.

`find` expands the paths of a run file, `scan` reads the files once at planning, `Reader` reads items later, and
`promise` describes the output of a run that has not finished. docs/reference/inputs.md has the formats.

May import: results, shards, util.
"""

from slurmgpu.inputs.fields import check_fields
from slurmgpu.inputs.finding import find
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.scanning import promise, scan
from slurmgpu.inputs.spec import InputFile, InputSpec

__all__ = ["InputFile", "InputSpec", "Reader", "check_fields", "find", "promise", "scan"]
