"""What another user of the node can do to a run: nothing that executes, and little else."""

import io
import json
import os
import pickle
import socket
import stat
import subprocess
import sys

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.on_end import run_on_end
from slurmgpu.run.directory import Run
from slurmgpu.run.private import refuse_hidden
from slurmgpu.util.sockets import free_port
from slurmgpu.worker.groups import Group
from slurmgpu.worker.tunnels import Entrance, Exit
from tests.support.held_ranks import hold
from tests.support.images import NOBODY
from tests.support.listeners import listeners
from tests.support.runs import check_rows, planned_run, report, start, wait_until_held, workers

LOCAL = ("submit", "--executor", "local", "--device", "cpu")

# It gives up what root may do once everything is imported: another user may not be able to read this environment.
ATTACK = """
import base64, contextlib, json, os, pickle, signal, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

class Payload:
    def __reduce__(self):
        return os.mkdir, (MARKER,)

uid, MARKER, ports = json.loads(sys.argv[1])
if uid is not None:
    os.setgroups([]), os.setgid(uid), os.setuid(uid)
pickled = pickle.dumps(Payload())

def poison(host, port):
    signal.alarm(5)  # what is no store answers nothing, whatever the timeout
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=4))
    for key in store.list_keys():
        if "slurmgpu" not in key and "init" not in key:  # numbers, and JSON
            store.set(key, pickled)
            store.set(key, base64.b64encode(pickled))
    print(host, key, flush=True)

for port in ports:
    for host in ("127.0.0.1", socket.gethostname()):
        if os.fork() == 0:
            with contextlib.suppress(Exception):
                poison(host, port)
            os._exit(0)
for _ in range(2 * len(ports)):
    os.wait()
"""


def test_another_user_of_the_node_runs_no_code_as_the_runs_user(project):
    pytest.importorskip("torch")
    folder = hold(project, 40, {8: "held"}, resources={"processes": "per-gpu"})
    process = start(*LOCAL, "--gpus", "2", cwd=folder)
    wait_until_held(folder, 1)
    group = [
        pid
        for module in ("slurmgpu.worker.group_launcher", "slurmgpu.worker.main")
        for pid, _ in workers(folder, module)
    ]
    found = listeners(group)
    assert found  # or the attack shows nothing
    marker = folder / "owned"
    order = json.dumps([NOBODY if os.getuid() == 0 else None, str(marker), sorted({port for _, port in found})])
    done = subprocess.run([sys.executable, "-c", ATTACK, order], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" in done.stdout, done.stderr
    (folder / "held").unlink()
    output, _ = process.communicate(timeout=280)
    assert not marker.exists(), "what another user had written was unpickled"
    assert process.returncode == 0, output
    check_rows(folder, 40)
    assert {address for address, _ in found if not address.is_loopback} == set()


def test_objects_that_no_rank_has_sent_are_not_unpickled():
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    before = c10d._pickler, c10d._unpickler
    try:
        Group(rank=0, world_size=2, secret="one").guard()
        sent = io.BytesIO()
        c10d._pickler(sent).dump({"loss": 0.5})
        assert c10d._unpickler(io.BytesIO(sent.getvalue())).load() == {"loss": 0.5}
        for forged in (pickle.dumps({}), b"", bytes(32) + pickle.dumps({}), sent.getvalue()[:-1]):
            with pytest.raises(RuntimeError, match="no rank of this group has sent"):
                c10d._unpickler(io.BytesIO(forged)).load()
        Group(rank=0, world_size=2, secret="another").guard()
        with pytest.raises(RuntimeError, match="no rank of this group has sent"):
            c10d._unpickler(io.BytesIO(sent.getvalue())).load()
    finally:
        c10d._pickler, c10d._unpickler = before


def test_connections_are_carried_to_another_nodes_store_for_those_who_know_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = free_port()
        Exit("127.0.0.1", store.getsockname()[1], port, "secret")
        for secret in ("guessed", "secret"):
            entrance = Entrance("127.0.0.1", "localhost", port, secret, patience_s=0.0)
            with socket.create_connection(("127.0.0.1", entrance.port)) as rank:
                if secret == "guessed":
                    assert rank.recv(1) == b""
                    continue
                rank.sendall(b"key")
                with store.accept()[0] as served:
                    assert served.recv(3) == b"key"
                    served.sendall(b"value")
                assert rank.recv(5) == b"value"
                assert rank.recv(1) == b""


TOKEN = "a1b2c3d4e5"  # which nothing tells by its looks


def test_what_may_hold_a_token_is_the_owners_alone(project, slurmgpu):
    options = {"setup": [f"export KEY={TOKEN}"], "export": f"ALL,KEY={TOKEN}", "partition": "gpu"}
    told = f"test {TOKEN} && touch told"
    folder = project(8, slurm=options, merge={"setup": [f"export KEY={TOKEN}"]}, on_end=told)
    slurmgpu("submit", "--executor", "local", "--device", "cpu", cwd=folder, expect=0)
    slurmgpu("submit", "--executor", "local", "--device", "cpu", "--slurm", f"export=KEY={TOKEN}", cwd=folder)
    assert (folder / "told").exists()
    seen = [path for path in (folder / "run").rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert {path.name for path in seen} == {"private.json"}
    assert stat.S_IMODE(seen[0].stat().st_mode) == 0o600
    run = Run.open(folder / "run")
    assert (run.plan.slurm, run.plan.on_end) == (options, told)
    assert run.as_submitted(run.last_submission())["slurm"] == options
    # For another user it is as if the file were not there; and one that another user has written is not believed.
    for hide in (lambda path: path.chmod(0o666), lambda path: path.unlink()):
        hide(seen[0])
        run = Run.open(folder / "run")
        assert run.plan.slurm == {**options, "setup": ["•••"], "export": "•••"}
        assert run.plan.on_end == "•••"
        (folder / "told").unlink(missing_ok=True)
        run_on_end(run, report(folder))
        assert not (folder / "told").exists()
    sentence = r"may read its setup and export.*--slurm setup="
    with pytest.raises(SlurmGPUError, match=sentence):
        refuse_hidden(run.folder, run.plan.slurm)


def test_run_directories_of_before_are_read_as_they_are(project):
    folder = project(8) / "run"
    run = planned_run(folder, on_end="true")
    plan = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**plan, "on_end": "touch told", "slurm": {"setup": ["true"]}}))
    (folder / "private.json").unlink()
    run = Run.open(folder)
    assert (run.plan.on_end, run.plan.slurm) == ("touch told", {"setup": ["true"]})


def test_in_a_folder_where_others_may_write_what_is_executed_stays_the_owners(tmp_path):
    former = os.umask(0o002)
    try:
        (tmp_path / "shared").mkdir(mode=0o2775)
        run = planned_run(tmp_path / "shared" / "run", on_end="true")
        modes = {name: stat.S_IMODE((run.folder / name).stat().st_mode) for name in ("", "logs", "run.json", "shards")}
        assert modes[""] & stat.S_ISVTX
        assert not (modes["logs"] | modes["run.json"]) & 0o022
        assert modes["shards"] & 0o020  # colleagues may compute
    finally:
        os.umask(former)
    if os.getuid() == 0:
        replace = "import os, sys; os.setgid(0); os.setuid(65534); os.chdir(sys.argv[1]); os.rename('logs', 'other')"
        for path in (run.folder, *run.folder.parents[:2]):
            path.chmod(path.stat().st_mode | 0o007)
        done = subprocess.run([sys.executable, "-c", replace, str(run.folder)], capture_output=True, text=True)
        assert "Error" in done.stderr
