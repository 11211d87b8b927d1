"""A language model server as a child of this process, on its own port or socket."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.server_engine.http_client import Client
from slurmgpu.util import pids
from slurmgpu.util.guard import OWN_GROUP, Guard
from slurmgpu.util.process_tree import TreeWatch, living
from slurmgpu.util.shared_memory import remove, used_by
from slurmgpu.util.sockets import free_port, socket_folder

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a server may take to end after SIGTERM."""
POLL_S = 0.25
SAID_S = 60.0
"""How often the log says that a server is still loading."""
KEYS = ("VLLM_API_KEY", "LLAMA_API_KEY")
"""Variables with the key for vLLM and llama.cpp, so that other users of the node cannot use this server."""
ON_CPUS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Default variables for a server without GPUs.

vLLM 0.32's server runs a model on CPUs in a separate process, and the engine polls for its results, using a whole core
for a second after each step (`SpinCondition` in vllm/distributed/device_communicators/shm_broadcast;
`check_and_update_config` in vllm/platforms/cpu). These variables keep the model in the engine's process, as on one GPU.
"""
LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp: TCP_LISTEN of include/net/tcp_states.h."""


class ServerEndedError(Exception):
    """The server has ended; the message says how."""


class ServerProcess:
    """The server that `serve` starts, with `{model}`, `{gpus}`, and `{port}` or `{socket}` filled in.

    Call `start` first, and again when it has ended. It does not outlive this process.
    """

    def __init__(self, serve: Sequence[str], model: str, gpus: int) -> None:
        self._serve, self._values = serve, {"model": model, "gpus": str(max(1, gpus))}
        self._folder = tempfile.mkdtemp(prefix="slurmgpu-", dir=socket_folder())
        # vLLM leaves its sockets where a signal ends it.
        self._own = {"VLLM_RPC_BASE_PATH": self._folder, **({} if gpus else ON_CPUS)}
        self._guard = Guard()
        self._guard.remove(self._folder)
        self._key = secrets.token_hex(16)
        self._starter = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._shared: set[str] = set()
        self._tree = TreeWatch()

    def start(self) -> Client:
        """Start it, and wait until it is healthy; ServerEndedError if it ends before.

        Its output goes to the log.
        """
        self._end()
        self._port = free_port() if any("{port}" in each for each in self._serve) else None
        path = f"{self._folder}/s"
        Path(path).unlink(missing_ok=True)
        values = {**self._values, "port": str(self._port), "socket": path}
        arguments = [filled(each, values) for each in self._serve]
        environ = {**self._own, **os.environ, **dict.fromkeys(KEYS, self._key)}
        environ["PATH"] = _search_path()
        if shutil.which(arguments[0], path=environ["PATH"]) is None:
            raise SlurmGPUError(
                f"serve begins with {arguments[0]!r}, and there is no such program here. Use an image that has the "
                f"program, or write its path."
            )
        log.info("starting %s", " ".join(arguments))
        self._process = subprocess.Popen(
            arguments, env=environ, stdin=subprocess.DEVNULL, stdout=2, stderr=2, **OWN_GROUP
        )
        self._guard.watch(self._process.pid)
        client = Client(f"unix:{path}" if self._port is None else f"http://127.0.0.1:{self._port}", self._key)
        self._wait_for(client)
        self._shared = used_by(self._process.pid)
        return client

    def check(self) -> None:
        """ServerEndedError if it has ended."""
        code = self._process.poll() if self._process is not None else 0
        if code is not None:
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise ServerEndedError(f"the server {self._serve[0]} ended {how}; its output is in the log")

    def cpu_s(self) -> float:
        """The CPU time that the server and its children have used."""
        tree = None if self._process is None else self._tree.read(self._process.pid)
        return 0.0 if tree is None else tree.cpu_s

    def settle(self, client: Client, most_s: float) -> None:
        """Wait until it answers again, as after a dropped connection; ServerEndedError if it has ended.

        A connection is lost a moment before the end of its process can be seen. A server that neither answers nor ends
        within `most_s` counts as ended.
        """
        deadline = time.monotonic() + most_s
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(ConnectionError):
                if is_healthy(client):
                    return
            time.sleep(POLL_S)
        raise ServerEndedError(f"the server {self._serve[0]} has not answered for {most_s:g} s")

    def close(self) -> None:
        """End it with its children, and remove its socket; a fork of the process that started it leaves it."""
        if os.getpid() != self._starter:
            return
        self._end()
        self._guard.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for(self, client: Client) -> None:
        began = said = time.monotonic()
        while True:
            self.check()
            with contextlib.suppress(ConnectionError):
                if is_healthy(client):
                    break
            if time.monotonic() - said >= SAID_S:
                said = time.monotonic()
                log.info("the server is not ready after %.0f s; still waiting", said - began)
            time.sleep(POLL_S)
        self.check()
        if self._port is not None and not self._listens(self._port):
            raise ServerEndedError(f"another process has taken port {self._port} of the server {self._serve[0]}")
        log.info("the server is ready after %.1f s", time.monotonic() - began)

    def _listens(self, port: int) -> bool:
        """Whether the server or a child of it listens on the port: other processes must not get the items."""
        assert self._process is not None
        inodes = _listening(port)
        for pid in living(self._process.pid):
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    if str(descriptor.readlink()) in inodes:
                        return True
        return False

    def _end(self) -> None:
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Reaped only after the group is killed: until then no other group gets its ID.
                self._wait(GRACE_S)
        self._process.wait()
        self._guard.watch(0)
        self._process = None
        remove(self._shared)

    def _wait(self, seconds: float) -> None:
        assert self._process is not None
        if self._process.returncode is not None:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not pids.has_ended(self._process.pid):
            time.sleep(0.02)


def is_healthy(client: Client) -> bool:
    """Whether a server answers /health with 200, or /v1/models if it has no /health."""
    status = client.get("/health").status
    return (client.get("/v1/models").status if status in (404, 405) else status) == 200


def filled(text: str, values: dict[str, str]) -> str:
    """An argument with its placeholders replaced."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _search_path() -> str:
    """PATH, followed by the folder of this Python: a virtual environment need not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def _listening(port: int) -> set[str]:
    """The links in /proc/PID/fd for sockets that listen on a port; see proc_net_tcp.txt in Linux's documentation."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
