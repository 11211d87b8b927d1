"""Pretended nodes: namespaces of mounts, processes and host names, each with a mount of the file server of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .client import Behaviour

REPOSITORY = Path(__file__).parents[2]


def missing() -> str | None:
    """Why there can be no pretended nodes here; None if there can be."""
    if os.getuid() != 0:
        return "pretended nodes need root: namespaces, and a mount in each"
    if not Path("/dev/fuse").exists():
        return "pretended nodes need /dev/fuse"
    if lacking := [name for name in ("unshare", "nsenter") if shutil.which(name) is None]:
        return f"pretended nodes need {' and '.join(lacking)}, of Debian's package util-linux"
    return None


class Server:
    """A file server, and the nodes that mount it at one path: `shared`. Files of `local` are this machine's own."""

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        self.exported, self.shared, self.local = folder / "exported", folder / "shared", folder / "local"
        for path in (self.exported, self.shared, self.local):
            path.mkdir(parents=True)
        self.seed = seed
        self.nodes: list[Node] = []

    def node(
        self,
        name: str,
        behaviour: Behaviour | None = None,
        rates: Mapping[str, float] | None = None,
        clock_s: float = 0,
    ) -> Node:
        """A node that mounts it; `rates` are those of its file system's faults, `clock_s` is how its clock errs."""
        node = Node(self, name, behaviour or Behaviour(), rates or {}, clock_s)
        self.nodes.append(node)
        return node

    def faults(self) -> list[dict[str, Any]]:
        """The faults of the file system so far, of all nodes."""
        lines = [line for path in sorted(self.local.glob("*.faults")) for line in path.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def counts(self) -> Counter[str]:
        """How many faults of each kind there were."""
        return Counter(fault["fault"] for fault in self.faults())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()


class Node:
    """One node. Its processes see its own host name, its own processes, and the server by its own caches."""

    def __init__(
        self, server: Server, name: str, behaviour: Behaviour, rates: Mapping[str, float], clock_s: float
    ) -> None:
        self.server, self.name = server, name
        self.orders, self.clock = server.local / f"{name}.orders", server.local / f"{name}.clock"
        self.clock.write_text(str(clock_s))
        self._started: list[subprocess.Popen] = []
        own = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        with open(server.local / f"{name}.errors", "wb") as errors:
            self._outer = subprocess.Popen(
                [*own, sys.executable, "-m", "tests.pretend_nfs.serve"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert self._outer.stdin is not None
        assert self._outer.stdout is not None
        given = {
            "name": name,
            "server": str(server.exported),
            "target": str(server.shared),
            "behaviour": behaviour.to_json(),
            "seed": server.seed,
            "rates": dict(rates),
            "log": str(server.local / f"{name}.faults"),
            "orders": str(self.orders),
        }
        self._outer.stdin.write(json.dumps(given) + "\n")
        self._outer.stdin.flush()
        said = self._outer.stdout.readline()
        if said != "mounted\n":
            raise RuntimeError((server.local / f"{name}.errors").read_text())
        [self.pid] = _children(self._outer.pid)
        self._space = str(Path(f"/proc/{self.pid}/ns/pid").readlink())

    def command(self, *argv: object, cwd: Path | None = None, **env: str) -> list[str]:
        """What starts a command on this node."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--uts"]
        clock = {"PRETEND_CLOCK": str(self.clock), "PYTHONPATH": str(Path(__file__).parent / "site")}
        pairs = [f"{key}={value}" for key, value in {**clock, **env}.items()]
        return [*enter, "env", "-C", str(cwd or self.server.shared), *pairs, *map(str, argv)]

    def start(self, *argv: object, cwd: Path | None = None, output: Path | None = None, **env: str) -> subprocess.Popen:
        """Start a command on this node, in a session of its own; what it prints goes to the file `output`."""
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(output, "ab")) if output else subprocess.DEVNULL
            started = subprocess.Popen(
                self.command(*argv, cwd=cwd, **env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def run(self, *argv: object, cwd: Path | None = None, timeout_s: float = 300, **env: str) -> Any:
        """Run a command on this node to its end; the finished process."""
        command = self.command(*argv, cwd=cwd, **env)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)

    def python(self, code: str, *arguments: object, cwd: Path | None = None) -> str:
        """What a piece of Python prints on this node; RuntimeError with its traceback if it fails."""
        done = self.run(sys.executable, "-c", code, *arguments, cwd=cwd)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return str(done.stdout).strip()

    def processes(self) -> list[tuple[int, str]]:
        """This machine's numbers of the node's processes but the first, with their command lines."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(path.name) != self.pid and str((path / "ns" / "pid").readlink()) == self._space:
                    found.append((int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        return found

    def signal(self, signum: int, having: str = "") -> int:
        """Send a signal to the node's processes whose command lines have this in them; how many there were."""
        found = [pid for pid, line in self.processes() if having in line]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if signum == signal.SIGCONT:
            self._wake()
        return len(found)

    def _wake(self) -> None:
        """Let the processes that wait outside for the node's go on: nsenter stops when what it has started does.

        It learns that from the kernel, and stops itself some time later: one that runs may be about to.
        """
        for started in self._started:
            while started.poll() is None and (state := _state(started.pid)) != "S":  # not asleep: does not wait yet
                if state == "T":
                    started.send_signal(signal.SIGCONT)
                time.sleep(0.001)

    def order(self, what: str | None) -> None:
        """Have every request fail from now on ("EIO"), or wait for an answer ("silent"); None ends it."""
        if what is None:
            self.orders.unlink(missing_ok=True)
            return
        partial = self.orders.with_suffix(".partial")
        partial.write_text(what)
        partial.rename(self.orders)

    def set_clock(self, ahead_s: float) -> None:
        """Step the node's clock."""
        partial = self.clock.with_suffix(".partial")
        partial.write_text(str(ahead_s))
        partial.rename(self.clock)

    def kill(self) -> None:
        """The node dies: all its processes at once, and its mount."""
        self.order(None)
        for pid in (self.pid, self._outer.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._outer.wait()
        self._wake()
        for pipe in (self._outer.stdin, self._outer.stdout):
            if pipe is not None:
                pipe.close()


def _state(pid: int) -> str:
    """The letter of a process's state, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
