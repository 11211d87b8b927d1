"""Ranks as forks of one process, since PyTorch takes seconds to import."""

import os
import sys


def fork_ranks(n, work, *arguments):
    """Call `work(*arguments, rank)` in `n` forks; AssertionError if one of them fails."""
    ranks = []
    for rank in range(n):
        ranks.append(os.fork())
        if not ranks[-1]:
            code = 1
            try:
                work(*arguments, rank)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    assert not any(ends), f"the exit codes of the ranks: {ends}"
