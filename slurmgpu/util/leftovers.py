"""End the processes that this one has started once it has ended, if the task that would end them is gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import NoReturn

from slurmgpu.util.process_tree import living

log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long they may take to end: guards, and trackers of multiprocessing's, tidy up once this process is gone."""

REAPER = """
import os, signal, sys, time

def stat(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[3]), int(fields[19]))

grace_s, session, *pids = sys.argv[1:]
known = {int(pid): stat(pid) for pid in pids}
os.close(1)
time.sleep(float(grace_s))
for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
    found = stat(pid)
    if found is not None and pid != os.getpid() and (found == known.get(pid) or found[0] == int(session)):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it has just ended
"""


def leave_with_all(code: int) -> NoReturn:
    """End this process with `code` now, and its session and its descendants a moment later, if they do not end.

    A daemon in a session of its own, whose parent has ended, stays.
    """
    own = os.getpid()
    try:
        if others := living(own) - {own}:
            argv = [sys.executable, "-I", "-S", "-c", REAPER, str(GRACE_S), str(own), *map(str, sorted(others))]
            reaper = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert reaper.stdout is not None
            reaper.stdout.read()  # until it has looked at them: their pids may be others' once this process is gone
    except OSError as error:
        log.warning("what this process has started may go on without it: %s", error)
    finally:
        os._exit(code)
