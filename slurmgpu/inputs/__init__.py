"""The items of a run: the files that hold them, and any range of them without reading what lies before it.

`find` turns what the run file says into paths, `scan` reads these once, at planning, `Reader` reads items later;
`promise` describes the file that another run has yet to make. The formats, and what an item is in each, are in
docs/reference/inputs.md.

May import: results, util.
"""

from slurmgpu.inputs import lines as lines  # which brings formats, as `tables` does
from slurmgpu.inputs import tables as tables
from slurmgpu.inputs.fields import check_fields
from slurmgpu.inputs.finding import find
from slurmgpu.inputs.pending import promise
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.scanning import scan
from slurmgpu.inputs.spec import InputFile, InputSpec

__all__ = ["InputFile", "InputSpec", "Reader", "check_fields", "find", "promise", "scan"]
