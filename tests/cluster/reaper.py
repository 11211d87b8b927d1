"""Run a command and stay the ancestor of whatever it starts: `python reaper.py COMMAND [ARGUMENT ...]`.

slurmstepd leaves slurmd's process tree, and a job's processes may leave slurmstepd's. A "subreaper" (prctl(2))
inherits such orphans, so that killing a node finds all of them, with or without cgroups.
"""

import ctypes
import os
import sys

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h; Python has no name for it


def main(command: list[str]) -> None:
    """Run `command`, then reap children until none is left."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    os.posix_spawnp(command[0], command, os.environ)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
