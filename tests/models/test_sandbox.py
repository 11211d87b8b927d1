"""`checker = "python"`: programs that a model wrote run apart from everything else, and only right ones pass."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import pytest

import slurmgpu
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Output
from slurmgpu.shards.columns import Array, convert_row
from slurmgpu.workload import Item
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.grading import sandbox
from slurmgpu.workloads.grading.checkers import open_checker
from slurmgpu.workloads.samples import Samples
from tests.support.shard_files import peak_memory_bytes, write
from tests.support.tiny_models import make_unloadable

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
RIGHT = "def add(a, b):\n    return a + b"


@pytest.fixture
def box(monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_S", 2)
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 512 << 20)
    try:
        sandbox.check()
    except SlurmGPUError as error:  # of this machine; a failure where CI is set
        pytest.skip(str(error))
    return sandbox


def passes(program, tests):
    return sandbox.failure(program, tests) is None


@pytest.mark.parametrize(
    ("program", "is_right"),
    [
        (RIGHT, True),
        (f"print('x' * 10**6)\n{RIGHT}\nimport sys; sys.stdout.flush()", True),
        (f"import json, math\n{RIGHT}", True),
        (RIGHT.replace("+", "-"), False),
        ("def add(a, b)", False),
        ("raise SystemExit(0)", False),
        ("import os; os._exit(0)", False),
        (f"{RIGHT}\ninput()", False),
    ],
)
def test_a_program_passes_if_its_tests_come_to_their_end(box, program, is_right):
    assert passes(program, TESTS) is is_right


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (RIGHT, None),
        (RIGHT.replace("+", "-"), "failed"),
        ("raise SystemExit(0)", "failed"),
        ("def add(a, b)", "syntax error"),
        ("x = '\0'", "syntax error"),
        ("while True: pass", "killed"),
    ],
)
def test_a_program_that_does_not_pass_has_a_reason(box, monkeypatch, program, why):
    monkeypatch.setattr(sandbox, "CPU_S", 1)
    assert box.failure(program, TESTS) == why


IMPORTS = (
    "from __future__ import annotations\nimport multiprocessing, pickle, typing\nfrom dataclasses import dataclass\n"
)
NODE = "@dataclass\nclass Node:\n    value: int\n    left: 'typing.Optional[Node]' = None\n"
POOL = "def map_all(way, *items):\n    with multiprocessing.get_context(way).Pool(1) as pool:\n"
POOL += "        return pool.map(double, items)\ndef double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (NODE, "assert Node(1, Node(2)).left.value == 2"),
        (NODE, "assert pickle.loads(pickle.dumps(Node(1))) == Node(1)"),
        (NODE, "assert list(typing.get_type_hints(Node)) == ['value', 'left']"),
        (POOL, "assert map_all('fork', 1, 2) == [2, 4]"),
        (POOL, "assert map_all('forkserver', 1, 2) == [2, 4]"),  # Python 3.14's own way
        (
            f"{POOL}import concurrent.futures as f\n"
            "fork = multiprocessing.get_context('fork')\n"  # else, from Python 3.14 on, a child runs this as well
            "all = [*f.ProcessPoolExecutor(1, fork).map(double, [3])]",
            "assert all == [6]",
        ),
        (NODE, "import inspect; assert '@dataclass' in inspect.getsource(Node)"),
    ],
)
def test_a_program_is_a_module_that_its_classes_and_functions_are_found_in(box, program, tests):
    assert passes(IMPORTS + program, tests)


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
@pytest.mark.parametrize("pool", ["{}.Pool(1)", "concurrent.futures.ProcessPoolExecutor(1, {})"])
def test_a_program_that_starts_a_process_at_its_top_level_that_imports_it_fails_at_once(box, monkeypatch, way, pool):
    monkeypatch.setattr(sandbox, "WALL_S", 10)
    made = pool.format(f"multiprocessing.get_context('{way}')")
    program = f"{IMPORTS}{POOL}import concurrent.futures\nwith {made} as pool:\n    all = [*pool.map(double, [3])]"
    assert sandbox._run(program, "") == "exit code 1"  # not that of the SIGKILL at the end of the time


def test_a_python_that_was_built_for_an_old_system_runs_programs(box, monkeypatch):
    """Those of conda and uv have no memfd_create (glibc 2.27)."""
    monkeypatch.delattr("os.memfd_create", raising=False)
    assert passes(RIGHT, TESTS)


def test_sets_have_the_same_order_in_every_process(box):
    words = "list({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    told = subprocess.check_output(
        [sys.executable, "-c", f"print({words})"], env={"PYTHONHASHSEED": "0"}, text=True
    ).strip()
    assert passes("", f"assert {words} == {told}")


def test_a_program_sees_neither_network_nor_files_and_writes_nothing(box, tmp_path, monkeypatch):
    """Each attempt is one that this process is able to make itself."""
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    port = server.getsockname()[1]
    monkeypatch.setenv("SLURMGPU_TEST_SECRET", "s3cret")
    attempts = {
        "read": f"open({str(secret)!r}).read()",
        "write": f"open({str(Path(sys.prefix) / 'x-written')!r}, 'w')",
        "usr": "open('/usr/x-written', 'w')",
        "root": "open('/x-written', 'w')",
        "dev": "open('/dev/x-written', 'w')",
        "network": f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "environment": "import os; os.environ['SLURMGPU_TEST_SECRET']",
        "others": f"import os; os.kill({os.getpid()}, 0)",
        "passwords": "open('/etc/shadow').read()",
    }
    for name, attempt in attempts.items():
        assert not passes(attempt, ""), name
        # The same lines are no error of their own: caught, the program ends well.
        assert passes(f"try:\n    {attempt}\nexcept Exception:\n    pass", ""), name
    with server, pytest.raises(BlockingIOError):  # nobody has connected
        server.accept()
    assert not (Path(sys.prefix) / "x-written").exists()
    assert passes("open('/tmp/mine', 'w').write('x')", "assert open('/tmp/mine').read() == 'x'")
    pythons = (Path(prefix) for prefix in (sys.prefix, sys.base_prefix))  # below /tmp in a clone that is there
    own = {python.relative_to("/tmp").parts[0] for python in pythons if python.is_relative_to("/tmp")}
    assert passes("", f"import os; assert set(os.listdir('/tmp')) == {own!r}")


def test_limits_of_time_memory_and_files_end_a_program(box, monkeypatch):
    assert not passes("while True: pass", "")
    assert not passes("x = bytearray(1 << 30)", "")
    assert passes("x = bytearray(1 << 26)", "")
    assert not passes("f = open('/tmp/big', 'wb')\nfor _ in range(200): f.write(bytes(1 << 20))", "")
    if sandbox._size(shutil.which("bwrap")):
        for folder in ("/tmp", "/dev/shm"):
            files = f"for name in 'abc': open('{folder}/' + name, 'wb').write(bytes(24 << 20))"
            assert not passes(files, ""), folder
    assert passes("import multiprocessing; multiprocessing.Lock()", "")
    monkeypatch.setattr(sandbox, "WALL_S", 1)
    assert not passes("import time; time.sleep(30)", "")


@pytest.mark.parametrize("where", ["__main__.told", "os.open('/proc/1/fd/1', os.O_WRONLY)"])
def test_a_program_that_writes_on_to_its_reader_fills_no_memory_and_is_ended(box, where, monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_S", 50)
    flood = f"import os, __main__\nout = {where}\nwhile True: os.write(out, bytes(1 << 20))"
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in memory now
    before = peak_memory_bytes()
    assert not passes(flood, "")
    assert peak_memory_bytes() - before < 20 << 20  # without an end 50 s go by


@pytest.mark.parametrize(
    ("release", "counts"), [("4.18.0-553.el8_10", False), ("5.14.0-427.el9_4", True), ("6", False)]
)
def test_processes_are_limited_where_the_kernel_counts_a_programs_own(monkeypatch, release, counts):
    monkeypatch.setattr("platform.release", lambda: release)
    assert ("RLIMIT_NPROC" in sandbox._limits()) is counts


def test_a_lower_limit_of_the_task_is_taken_over(box):
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    code += "from slurmgpu.workloads.grading import sandbox; sandbox.check()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_limit_that_cannot_be_set_is_named(box, monkeypatch):
    monkeypatch.setattr(sandbox, "CPU_S", 1 << 70)
    with pytest.raises(SlurmGPUError, match=r"fails here: Traceback .* too large to convert"):
        box.check()


def test_what_a_program_leaves_behind_ends_with_it(box):
    mark = f"slurmgpu-left-{os.getpid()}"
    program = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)', '{mark}'])"
    )
    assert passes(program, "")
    deadline = time.monotonic() + 30  # the kernel ends them behind the one that was waited for
    while (left := with_mark(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def with_mark(mark):
    """The processes of this machine that have a mark among their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += [process] if mark in process.read_text() else []
    return found


def test_an_old_bubblewrap_without_a_limit_of_temporary_files_does_as_well(box, monkeypatch, tmp_path):
    old = tmp_path / "bwrap"
    real = shutil.which("bwrap")
    old.write_text(
        '#!/bin/sh\n[ "$1" = --help ] && exit 0\n'
        f'case " $* " in *" --size "*|*" --clearenv "*) exit 1;; esac\nexec {real} "$@"\n'
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert passes(RIGHT, TESTS)
    assert sandbox.apart([])[0] == str(old)


def test_a_machine_without_it_is_refused_with_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmGPUError, match=r"there is no program bwrap here. Install the package bubblewrap"):
        sandbox.check()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SlurmGPUError, match=r"fails here: No permissions to create new namespace. bubblewrap needs unprivileged"
    ):
        sandbox.check()
    with pytest.raises(SlurmGPUError, match="fails here"):
        open_checker("python").check_here()


ANSWER = "First:\n```\nnot this\n```\nSo:\n```python\n" + RIGHT + "\n```\nThat adds."


def test_the_program_is_the_last_block_of_an_answer_or_all_of_it(box):
    checker = open_checker("python", reference="tests")
    checker.load()
    assert checker.answer(ANSWER) == RIGHT
    assert checker.answer(RIGHT) == RIGHT
    assert checker.answer(" \n") is None
    assert checker.is_correct(ANSWER, {"tests": TESTS})
    assert checker.is_correct(RIGHT, {"tests": TESTS.splitlines()})
    assert not checker.is_correct(RIGHT, {"tests": ["assert add(1, 1) == 3"]})
    assert not checker.is_correct("", {"tests": TESTS})
    for value, said in ((None, "no right answer in field 'tests'"), ([1], "expected a program, or a list of them")):
        with pytest.raises(ItemError, match=said):
            checker.check_item({"tests": value})


class Writer:
    """An engine that writes a right program, then a wrong one, and so on; the fourth is none."""

    def generate(self, requests):
        for number, request in enumerate(requests):
            text = RIGHT if number % 2 == 0 else RIGHT.replace("+", "-") if number == 1 else "Here it is:"
            yield Output(request.id, f"```python\n{text}\n```", finish_reason="stop")


def test_collected_programs_are_right_if_their_tests_pass(tmp_path, box):
    model = str(make_unloadable(tmp_path))
    collect = Collect(model=model, prompt="{q}", checker="python", reference="tests", paths=4, rollouts=0)
    collect.check_here()
    collect.engine = Writer()
    row, bare = collect([Item(0, {"q": "add", "tests": TESTS}), Item(1, {"q": "add"})])
    assert row["rewards"] == [1, 0, 1, 0]
    assert row["failures"] == [None, "failed", None, "syntax error"]
    path = write(tmp_path / "0.h5", 0, 2, columns=collect.columns, rows=[convert_row(collect.columns, row), bare])
    with slurmgpu.open(path) as merged:
        assert collect.summarize(merged)["failures"] == {"failed": 1, "syntax error": 1}
    assert [path["answer"] for path in row["paths"]][:2] == [RIGHT, RIGHT.replace("+", "-")]
    assert str(bare).startswith("no right answer in field 'tests'")


def test_votes_of_texts_that_are_there_already_take_it_too(box):
    samples = Samples("text", {"score": Array("float32")}, open_checker("python", reference="tests"), "tests")
    item = Item(0, {"text": [ANSWER, RIGHT.replace("+", "-")], "tests": TESTS})
    [row] = samples.compute([item], lambda items: [{"score": 1.0} for _ in items])
    assert row["correct"] == [True, False]


def test_an_environment_in_tmp_has_its_python(box, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        monkeypatch.setattr(sys, "prefix", folder)
        assert box._run("import sys", f"assert sys.prefix == {folder!r}") is None
