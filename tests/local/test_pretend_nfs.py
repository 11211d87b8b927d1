"""The pretended file server and its clients: each behaviour of an NFS client that the trials of runs count on."""

import os
import signal
import sys
from dataclasses import replace

import pytest

from tests.cluster.fixture import leave_out
from tests.pretend_nfs.client import Behaviour
from tests.pretend_nfs.nodes import REPOSITORY, Server, missing
from tests.support.runs import wait_until
from tests.support.shard_files import join_parts, write_parts

FOR_EVER = 1e9
"""Seconds: as the resolution of times it makes all of them look the same."""
BELIEVING = Behaviour(ac_min_s=FOR_EVER, ac_max_s=FOR_EVER)
COARSE = Behaviour(ac_min_s=0, ac_max_s=0, tick_s=FOR_EVER)
ASKING = Behaviour(ac_min_s=0, ac_max_s=0, names=False, listings=False, contents=False, tick_s=1e-9)
LIST = "import os; print(*sorted(os.listdir()))"
EXISTS = "import os, sys; print(os.path.exists(sys.argv[1]))"
MAKE = "import os, sys; os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_EXCL))"
WRITE = "import os, sys; fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); os.write(fd, sys.argv[2].encode())"
READ = "import sys; print(open(sys.argv[1]).read())"
SIZE = "import os, sys; print(os.stat(sys.argv[1]).st_size)"
REMOVE = "import os, sys; os.unlink(sys.argv[1])"


@pytest.fixture
def server(tmp_path):
    if reason := missing():
        leave_out(reason)
    with Server(tmp_path / "nfs", seed=1) as server:
        yield server


def refuses(node, code, *arguments):
    """The name of the error that a piece of Python meets on a node."""
    told = f"import errno\ntry:\n    exec({code!r})\nexcept OSError as error:\n    print(errno.errorcode[error.errno])"
    return node.python(told, *arguments)


def test_two_nodes_share_files_and_nothing_else(server):
    one, other = server.node("one", ASKING), server.node("other", ASKING)
    one.python("open('a', 'w').write('x' * 500_000); import os; os.mkdir('d'); os.rename('a', 'd/b')")
    other.python(
        "import os; os.link('d/b', 'c'); os.symlink('c', 'l'); os.chmod('c', 0o600); os.truncate('c', 300_000)"
    )
    assert (
        one.python("import os; print(os.readlink('l'), len(open('l').read()), os.stat('d/b').st_nlink)") == "c 300000 2"
    )
    assert one.python(LIST) == other.python(LIST) == "c d l"
    seen = "import os, socket, pathlib; print(socket.gethostname(), len(list(pathlib.Path('/proc').glob('[0-9]*'))))"
    assert one.python(seen) == "one 2"
    assert other.python(seen) == "other 2"


def test_attributes_and_contents_are_believed_for_a_while(server):
    writer, reader = server.node("writer"), server.node("reader", replace(BELIEVING, close_to_open=False))
    writer.python(WRITE, "a", "one")
    assert reader.python(READ, "a") == "one"
    writer.python(WRITE, "a", "three")
    assert reader.python(SIZE, "a") == "3"
    assert reader.python(READ, "a") == "one"
    assert server.node("late", BELIEVING).python(READ, "a") == "three"


def test_close_to_open_asks_for_attributes_when_a_file_is_opened(server):
    writer, reader = server.node("writer"), server.node("reader", BELIEVING)
    writer.python(WRITE, "a", "one")
    assert reader.python(READ, "a") == "one"
    writer.python(WRITE, "a", "three")
    assert reader.python(SIZE, "a") == "3"
    assert reader.python(READ, "a") == "three"


def test_contents_that_change_within_a_tick_look_unchanged(server):
    writer, reader = server.node("writer"), server.node("reader", COARSE)
    writer.python(WRITE, "a", "one")
    assert reader.python(READ, "a") == "one"
    writer.python(WRITE, "a", "two")
    assert reader.python(READ, "a") == "one"
    assert reader.python("import os; print(os.stat('a').st_mtime % 1e9)") == "0.0"


def test_a_missing_name_is_believed_to_be_missing_until_its_folder_looks_changed(server):
    writer, reader = server.node("writer"), server.node("reader", COARSE)
    assert reader.python(EXISTS, "a") == "False"
    writer.python(MAKE, "a")
    assert reader.python(EXISTS, "a") == "False"
    assert refuses(reader, "open('a')") == "ENOENT"
    os.utime(server.exported, (3e9, 3e9))
    assert reader.python(EXISTS, "a") == "True"


def test_a_listing_is_kept_until_the_folder_looks_changed_or_one_changes_it(server):
    writer, reader = server.node("writer"), server.node("reader", COARSE)
    writer.python(MAKE, "a")
    assert reader.python(LIST) == "a"
    writer.python(MAKE, "b")
    writer.python(REMOVE, "a")
    assert reader.python(LIST) == "a"
    reader.python(MAKE, "own")
    reader.python(REMOVE, "own")
    assert reader.python(LIST) == "b"
    writer.python(MAKE, "c")
    assert reader.python(LIST) == "b"
    os.utime(server.exported, (3e9, 3e9))
    assert reader.python(LIST) == "b c"


def test_who_makes_a_name_is_answered_by_the_server_whatever_is_believed(server):
    other, node = server.node("other"), server.node("node", replace(COARSE, ac_min_s=FOR_EVER, ac_max_s=FOR_EVER))
    for name in "abc":
        assert node.python(EXISTS, name) == "False"
        other.python(MAKE, name)
    assert refuses(node, MAKE, "a") == "EEXIST"
    node.python("open('source', 'w')")
    assert refuses(node, "import os; os.link('source', 'b')") == "EEXIST"
    assert refuses(node, "import os; os.mkdir('c')") == "EEXIST"
    assert node.python(EXISTS, "a") == node.python(EXISTS, "b") == "True"
    other.python(REMOVE, "a")
    other.python(REMOVE, "b")
    assert node.python(EXISTS, "a") == "True"
    node.python(MAKE, "a")
    node.python("import os; os.link('source', 'b')")


def test_a_file_that_another_client_removed_is_stale(server):
    other, node = server.node("other"), server.node("node", ASKING)
    node.python(WRITE, "a", "one")
    code = "import os; fd = os.open('a', os.O_RDWR); open('open', 'w'); \nwhile os.path.exists('open'): pass\n"
    for then in ("os.read(fd, 9)", "os.write(fd, b'x')", "os.fstat(fd)", "os.fsync(fd)"):
        node.python(WRITE, "a", "one")
        told = (
            f"import errno\n{code}try:\n    {then}\nexcept OSError as error:\n    print(errno.errorcode[error.errno])"
        )
        started = node.start("python3", "-c", told, output=server.local / "said")
        wait_until((server.exported / "open").exists, "the file to be opened")
        other.python(REMOVE, "a")
        other.python(REMOVE, "open")
        started.wait()
    assert (server.local / "said").read_text().split() == ["ESTALE"] * 4


READ_RESULTS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from slurmgpu import results
from slurmgpu.errors import SlurmGPUError

with results.open("merged.h5") as merged:
    merged.row(0)
    open("open", "w").close()
    while os.path.exists("open"):
        pass
    try:
        merged.check_rows(0, len(merged))
        print(len(merged.rows()))
    except SlurmGPUError as error:
        print(error, type(error.__cause__).__name__)
"""


def test_results_that_another_client_replaces_end_in_a_sentence(server):
    other, node = server.node("other"), server.node("node", ASKING)
    for number, name in enumerate(("merged.h5", "new")):
        join_parts(write_parts(server.local, [0, 500 + number]), server.exported / name)
    started = node.start(sys.executable, "-c", READ_RESULTS, REPOSITORY, output=server.local / "said")
    wait_until((server.exported / "open").exists, "the file to be opened")
    other.python("import os; os.rename('new', 'merged.h5'); os.unlink('open')")
    assert started.wait() == 0
    said = (server.local / "said").read_text()
    assert said == "merged.h5 was replaced while it was open. Open the new file. OSError\n"


def test_an_open_file_that_is_removed_here_is_kept_under_another_name(server):
    node = server.node("node", ASKING)
    node.python(WRITE, "a", "one")
    node.python(WRITE, "b", "two")
    node.python(WRITE, "new", "three")
    told = "import os; a, b = open('a'), open('b'); os.unlink('a'); os.rename('new', 'b'); print(len(os.listdir()), "
    assert node.python(told + "a.read(), b.read())") == "3 one two"
    assert node.python(LIST) == "b"


@pytest.mark.parametrize(
    ("kind", "code", "name"),
    [
        ("EIO", "open('a')", "EIO"),
        ("ESTALE", "import os; os.stat('a')", "ESTALE"),
        ("ETIMEDOUT", "import os; os.listdir()", "ETIMEDOUT"),
        ("EINTR", "import os; os.mkdir('d')", "EINTR"),
        ("EDQUOT", "open('a', 'wb', 0).write(b'x')", "EDQUOT"),
    ],
)
def test_single_requests_fail_and_are_written_down(server, kind, code, name):
    server.node("whole").python(MAKE, "a")
    faulty = server.node("faulty", rates={kind: 1.0})
    assert refuses(faulty, code) == name
    assert server.counts()[kind] >= 1
    assert {fault["node"] for fault in server.faults()} == {"faulty"}


@pytest.mark.parametrize(
    ("code", "left"),
    [
        (MAKE.replace("sys.argv[1]", "'new'"), "a b new"),
        ("import os; os.link('a', 'new')", "a b new"),
        ("import os; os.mkdir('new')", "a b new"),
        ("import os; os.rename('a', 'b')", "b"),
        ("import os; os.unlink('a')", "b"),
    ],
)
def test_a_request_whose_reply_is_lost_was_done_and_fails(server, code, left):
    whole = server.node("whole", ASKING)
    whole.python(MAKE, "a")
    whole.python(MAKE, "b")
    faulty = server.node("faulty", rates={"lost": 1.0})
    assert refuses(faulty, code) in ("EEXIST", "ENOENT", "ETIMEDOUT")
    assert whole.python(LIST) == left
    assert server.counts() == {"lost": 1}


def test_a_node_can_lose_the_file_system_and_get_it_back(server):
    node = server.node("node", ASKING)
    node.python(MAKE, "a")
    node.order("EIO")
    assert refuses(node, "open('a')") == "EIO"
    node.order("silent")
    waiting = node.start("python3", "-c", MAKE, "b", cwd=server.local)
    reading = node.start("python3", "-c", LIST, output=server.local / "said")
    assert not (server.exported / "b").exists()
    node.order(None)
    assert waiting.wait() == reading.wait() == 0
    assert (server.local / "said").read_text() == "a\n"


def test_a_node_dies_with_all_its_processes_and_another_one_goes_on(server):
    node, other = server.node("node"), server.node("other")
    started = node.start("sh", "-c", "touch begun; sleep 600 & sleep 600")
    wait_until((server.exported / "begun").exists, "the command to begin")
    wait_until(lambda: [line for _, line in node.processes()].count("sleep 600 ") == 2, "its children")
    assert node.signal(signal.SIGSTOP, "sleep") == 3
    node.kill()
    assert started.wait() != 0
    assert other.python(LIST) == "begun"


def test_a_nodes_clock_errs_and_can_be_stepped(server):
    node = server.node("node", clock_s=-3600)
    tell = "import time; print(round(time.time()))"
    whole = server.node("whole")
    assert int(node.python(tell)) < int(whole.python(tell)) - 3000
    node.set_clock(43_200)
    assert int(node.python(tell)) > int(whole.python(tell)) + 40_000
