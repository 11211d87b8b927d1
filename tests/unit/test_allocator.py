"""Memory that is freed and taken again."""

import subprocess
import sys

from slurmgpu.util.allocator import LARGEST_KEPT

PAGES = """
import resource, sys
from slurmgpu.util.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def use():
    blocks = [bytearray(int(sys.argv[2])) for _ in range(6)]
    for block in blocks:
        block[:] = b"1" * len(block)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def n_faults(how, size):
    done = subprocess.run([sys.executable, "-c", PAGES, how, str(size)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_blocks_that_were_freed_are_taken_again_without_the_kernel():
    size = LARGEST_KEPT // 4
    assert 5 * n_faults("keep", size) < n_faults("leave", size)
