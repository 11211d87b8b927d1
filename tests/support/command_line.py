"""The command line as a user types it, without the half second in which Python imports the package.

One process imports it, and forks for each command. What the imports themselves depend on makes a Python of its own:
a call with a variable of Python's, of the locale, of HDF5 or of the hub's, which PyTorch and transformers read as well.
"""

import functools
import inspect
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from tests.support import fsyncs

ROOT = Path(__file__).parents[2]
WORKLOADS = str(Path(__file__).with_name("sample_workloads.py"))
"""What most tests plan: the process that forks has parsed it, which takes 10 of a plan's 25 ms."""

SERVER = """
import atexit, contextlib, gc, importlib, json, os, runpy, select, signal, socket, sys, threading, time

gc.disable()
import slurmgpu.api, slurmgpu.cli.app, slurmgpu.cli.commands.submit, slurmgpu.cli.console, slurmgpu.merge.export
import slurmgpu.executors.local, slurmgpu.executors.local_slots, slurmgpu.executors.slurm
import slurmgpu.executors.submission, slurmgpu.report.status, slurmgpu.worker.main
from slurmgpu.code.source_facts import facts_of
from slurmgpu.executors import slot


def serve(listener):
    # A signal writes into a pipe that a call has ended: no second fork waits for that.
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    running = {}
    while True:
        ready, _, _ = select.select([listener, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while running and (end := os.waitpid(-1, os.WNOHANG))[0]:
                with contextlib.suppress(OSError), running.pop(end[0]) as file:
                    print(os.waitstatus_to_exitcode(end[1]), file=file, flush=True)
        if listener in ready:
            connection, _ = listener.accept()
            with connection:
                _, streams, _, _ = socket.recv_fds(connection, 1, 3)
                file = connection.makefile("rw")
            if not (asked := file.readline()):
                continue  # its caller was killed
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (listener, file, *running.values()):
                    inherited.close()
                os.close(ended)
                os.close(wakes)
                call(streams, **json.loads(asked))
                return
            for stream in streams:
                os.close(stream)
            running[pid] = file
            with contextlib.suppress(OSError):
                print(pid, file=file, flush=True)


def call(streams, argv, cwd, env, umask, first=None, module="slurmgpu", code=None, leads=False, n_slots=0):
    if leads:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    by_line = os.isatty(1) or env.get("PYTHONUNBUFFERED")
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if by_line else -1, closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.umask(umask)
    time.tzset()
    sys.path[0] = first or os.getcwd()
    sys.argv = [module, *argv]
    try:
        if n_slots and (work := slot.fork_slots(n_slots)):
            work()
        if code is None:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, int):
            leave(end.code)
        raise
    leave(0)


def leave(code):
    # As the interpreter ends, without taking its modules apart: of PyTorch's that takes half a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(code)


skip_on_this_disk()
with open(sys.argv[2], "rb") as file:
    facts_of(file.read(), "", is_script=False)
for module in sys.argv[3:]:
    importlib.import_module(module)
with socket.socket(fileno=int(sys.argv[1])) as listener:
    gc.enable()
    gc.freeze()
    serve(listener)
"""

TYPED = """#!{python} -ISu
import json, os, socket, sys
{n_slots_of}
umask = os.umask(0)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({address!r})
    socket.send_fds(connection, [b"x"], [0, 1, 2])
    asked = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "umask": umask}}
    asked["first"] = os.path.dirname(sys.executable)  # as the installed program has it
    asked["n_slots"] = n_slots_of(asked["argv"], asked["cwd"])
    connection.sendall(json.dumps(asked).encode() + b"\\n")
    with connection.makefile() as file:
        file.readline()
        code = int(file.readline())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""

READ_BY_IMPORTS = (
    *("PYTHON", "LC_", "LANG", "HDF5", "OMP_", "OPENBLAS", "MKL_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "XDG_CACHE_HOME"),
)
"""Prefixes of the variables that packages read only when they are imported."""
AS_PROGRAMS = {"PYTHONUNBUFFERED": "1"}
"""A variable with which a command and its slots are programs, as a user's are."""


class CommandLine:
    """Calls `slurmgpu` with arguments, in a Python that also has `env`; close it after use.

    `imports` are modules that it has imported besides; `identity` is the user, group and extra_groups of `subprocess`.
    """

    def __init__(self, python=sys.executable, env=None, imports=(), **identity):
        self._python, self._env, self._identity = python, env or {}, identity
        self._folder = tempfile.TemporaryDirectory(prefix="slurmgpu-tests-")
        self._address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [python, "-c", inspect.getsource(fsyncs) + SERVER, str(listener.fileno()), WORKLOADS, *imports],
                env={**os.environ, **self._env},
                cwd="/",
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                **identity,
            )
        self._own = read_by_imports({**os.environ, **self._env})

    def put(self, folder):
        """Write a program `slurmgpu` into `folder`, for a shell: it forks as calls do, with the shell's streams.

        It never starts a Python of its own, whatever the variables, and does not pass on signals.
        """
        path = Path(folder) / "slurmgpu"
        given = {"python": self._python, "address": self._address, "n_slots_of": inspect.getsource(n_slots_of)}
        path.write_text(TYPED.format(**given))
        path.chmod(0o755)

    def close(self):
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()

    def __call__(self, *argv, cwd=None, expect=None, umask=None, **env):
        """The finished process of `slurmgpu *argv`; AssertionError if it did not end with the code `expect`."""
        return self._call({"module": "slurmgpu"}, argv, cwd, expect, umask, env)

    def module(self, name, *argv, cwd=ROOT, expect=0, **env):
        """The finished process of `python -m name *argv`, where modules of the tests are found."""
        return self._call({"module": name}, argv, cwd, expect, None, env)

    def code(self, code, *argv, cwd=ROOT, expect=0, **env):
        """The finished process of `python -c code *argv`, where modules of the tests are found."""
        return self._call({"code": code}, argv, cwd, expect, None, env)

    def _call(self, program, argv, cwd, expect, umask, env):
        argv, env = [*map(str, argv)], {**os.environ, **self._env, **env}
        call = self._fork if read_by_imports(env) == self._own else self._start
        umask = own_umask() if umask is None else umask
        done = call(program, argv, cwd=str(Path(cwd or ".").absolute()), env=env, umask=umask)
        if expect is not None:
            assert done.returncode == expect, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *argv, cwd, stdin=None, **env):
        """The command in the background, in a session of its own, output and errors together; `stdin` is a pipe."""
        argv, env = [*map(str, argv)], {**os.environ, **self._env, **env}
        if read_by_imports(env) != self._own:
            return subprocess.Popen(
                [self._python, "-m", "slurmgpu", *argv],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                **self._identity,
            )
        return Started(self._address, argv, str(Path(cwd).absolute()), env, stdin is not None)

    def _fork(self, program, argv, cwd, env, umask):
        with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
            asked = {"argv": argv, "cwd": cwd, "env": env, "umask": umask, **program}
            asked["n_slots"] = n_slots_of(argv, cwd) if program == {"module": "slurmgpu"} else 0
            with socket.socket(socket.AF_UNIX) as connection, open(os.devnull) as nothing:
                connection.connect(self._address)
                socket.send_fds(connection, [b"x"], [nothing.fileno(), out.fileno(), err.fileno()])
                with connection.makefile("rw") as file:
                    print(json.dumps(asked), file=file, flush=True)
                    pid = int(file.readline())
                    try:
                        code = int(file.readline())
                    except BaseException:  # the test has come to its limit
                        os.kill(pid, 9)
                        raise
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(argv, code, out.read(), err.read())

    def _start(self, program, argv, **options):
        [(kind, given)] = program.items()
        command = [self._python, {"module": "-m", "code": "-c"}[kind], given, *argv]
        return subprocess.run(command, **options, **self._identity, capture_output=True, text=True)


class Started:
    """What `CommandLine.start` forks, as `subprocess.Popen` has it."""

    def __init__(self, address, argv, cwd, env, has_stdin):
        self.args, self.returncode, self.stdin, self.stderr = argv, None, None, None
        theirs_in = os.open(os.devnull, os.O_RDONLY)
        if has_stdin:
            os.close(theirs_in)
            theirs_in, mine = os.pipe()
            self.stdin = os.fdopen(mine, "w")
        mine, theirs_out = os.pipe()
        self.stdout = os.fdopen(mine)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        socket.send_fds(self._connection, [b"x"], [theirs_in, theirs_out, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        asked = {"argv": argv, "cwd": cwd, "env": env, "umask": own_umask(), "leads": True}
        asked["n_slots"] = n_slots_of(argv, cwd)
        self._connection.sendall(json.dumps(asked).encode() + b"\n")
        self._answer = self._connection.makefile("rb", buffering=0)  # `select` sees what is left of it
        self.pid = int(self._answer.readline())

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._answer], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._answer.readline())
            self._answer.close()
            self._connection.close()
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, text=None, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.stdin:
            self.stdin.write(text or "")
            self.stdin.close()
        read = []
        reader = threading.Thread(target=lambda: read.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.stdout.close()
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return read[0], None

    def send_signal(self, signum):
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


@functools.cache
def shared():
    """The command line that all tests of this process share; a fixture of tests/conftest.py closes it."""
    # The page is drawn by matplotlib, which the environment of vLLM does not have.
    return CommandLine(imports=["slurmgpu.page.page"] if find_spec("matplotlib") else [])


def own_umask():
    [umask] = re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(umask, 8)


def n_slots_of(argv, cwd):
    """How many slots of this machine to fork for a command: those that it may start, by its words and its run file.

    A run by `slurmgpu.map` forks them as well. As programs (see `AS_PROGRAMS`) each takes half a second of a processor
    to import its modules; with SLOTS=programs, as in `make nightly`, all are.
    """
    if os.environ.get("SLOTS") == "programs" or argv[:1] not in (["submit"], ["resubmit"], ["run"]):
        return 0
    path, said = f"{cwd}/slurmgpu.toml", [*argv]
    if os.path.isfile(path):  # TYPED has a copy of this, and imports nothing that takes long
        with open(path, errors="replace") as file:
            said += file.read().split('"')
    return 0 if {"debug", "slurm", "--dry-run"}.intersection(said) else 2


def read_by_imports(env):
    return {name: value for name, value in env.items() if name.startswith(READ_BY_IMPORTS)}
