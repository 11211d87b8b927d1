"""A machine that starts no more processes for a user, whose limit is reached."""

import os
import resource
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import local_slots
from slurmgpu.slurm import commands
from slurmgpu.task.worker_process import start_program
from slurmgpu.util.forks import TOO_MANY
from tests.support.somebody import USER

STARTS = {
    "worker": lambda folder: start_program(["/bin/true"], {}, folder / "log"),
    "slot": lambda folder: local_slots._Executor._submit_command(SimpleNamespace(folder=folder), ""),
    "squeue": lambda folder: commands.run("/bin/true"),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_process_that_cannot_be_started_is_no_fault_of_a_file_system(name):
    """It was tried again for a minute, and its task said that the node had lost a file system."""
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        said = "nothing was raised"
        try:
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            if os.geteuid() == 0:  # root has no such limit
                os.setgid(USER.pw_gid)
                os.setuid(USER.pw_uid)
            folder = Path(tempfile.mkdtemp(dir="/tmp"))
            try:
                STARTS[name](folder)
            finally:
                shutil.rmtree(folder)
        except SlurmGPUError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(tell, said.encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(pid, 0)
    with open(told, encoding="utf-8") as pipe:
        assert pipe.read().endswith(TOO_MANY)
