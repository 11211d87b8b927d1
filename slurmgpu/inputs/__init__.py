"""The items of a run: the files that hold them, and random access to ranges of items.

At planning, `find` expands the paths of a run file, `passed_over` says which files its globs leave out, `list_files`
lists files that are items themselves, and `scan` reads the files once. `repack_table` writes a table from memory to
files with random access, `promise` describes the output of a run that has not finished, and `concatenate` makes one
input of several. Later, `Reader` reads items, `open_items` reads those of a run by their indices, and
`check_input` says whether a run's files are still those of the plan.
docs/reference/inputs.md has the formats.

May import: results, run, shards, util.
"""

from slurmgpu.inputs.databases import query_in, repack_query
from slurmgpu.inputs.fields import InputFields
from slurmgpu.inputs.file_items import list_files
from slurmgpu.inputs.paths import fetch, find, is_of_hub, passed_over
from slurmgpu.inputs.reader import Reader, check_input, open_items
from slurmgpu.inputs.repack import FOLDER, publish, repack_table
from slurmgpu.inputs.scanner import concatenate, promise, scan
from slurmgpu.inputs.spec import InputFile, InputSpec

__all__ = [
    "FOLDER",
    "InputFields",
    "InputFile",
    "InputSpec",
    "Reader",
    "check_input",
    "concatenate",
    "fetch",
    "find",
    "is_of_hub",
    "list_files",
    "open_items",
    "passed_over",
    "promise",
    "publish",
    "query_in",
    "repack_query",
    "repack_table",
    "scan",
]
