"""The items of a run: the files that hold them, and random access to ranges of items.

`find` expands the paths of a run file, `list_files` lists files that are items themselves, `scan` reads the files
once at planning, `Reader` reads items later, `repack_records` writes items of Python where they can be read so, and
`promise` describes the output of a run that has not finished. docs/reference/inputs.md has the formats.

May import: results, shards, util.
"""

from slurmgpu.inputs.fields import check_fields
from slurmgpu.inputs.finding import find
from slurmgpu.inputs.listing import list_files
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.repacking import FOLDER, repack_records
from slurmgpu.inputs.scanning import promise, scan
from slurmgpu.inputs.spec import InputFile, InputSpec

__all__ = [
    "FOLDER",
    "InputFile",
    "InputSpec",
    "Reader",
    "check_fields",
    "find",
    "list_files",
    "promise",
    "repack_records",
    "scan",
]
