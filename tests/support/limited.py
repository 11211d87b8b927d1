"""Code in a process of its own whose files cannot grow, or whose memory is measured: limits cannot be taken back."""

import errno
import subprocess
import sys

CANNOT_GROW = """
import resource, sys
from pathlib import Path, PosixPath
sys.path[:0] = {path!r}
{before}
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    {call}
except OSError as error:
    print(error.errno)
"""
SCAN = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from slurmgpu.inputs import scan
from tests.support.shard_files import peak_memory_bytes
import pyarrow.parquet
before = peak_memory_bytes()
scan([Path(sys.argv[1])], Path(sys.argv[2]), stride=16)
print((peak_memory_bytes() - before) >> 20)
"""


def check_cannot_grow(limit, before, call):
    """Check that `call` raises EFBIG where files cannot grow beyond `limit` bytes; `before` runs without the limit."""
    code = CANNOT_GROW.format(path=sys.path, limit=limit, before=before, call=call)
    # -B: of a module that it compiles, Python would leave the beginning, which no later process can import.
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (str(errno.EFBIG), "")


def memory_of_scan(path, index):
    """The MiB that planning an input of one file takes."""
    code = SCAN.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code, path, index], capture_output=True, text=True, check=True)
    return int(done.stdout)
