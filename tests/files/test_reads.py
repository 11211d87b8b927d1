"""A run directory is read through `shared_files`, which tries again; what is not, is listed here, with a reason."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "slurmgpu"
OF_PATHS = {"read_text", "read_bytes", "iterdir", "glob", "rglob", "exists", "is_file", "is_dir", "stat", "lstat"}
OF_OS = {"listdir", "scandir", "walk", "open", "stat", "lstat", "access"}
OF_OS_PATH = {"exists", "isfile", "isdir", "lexists", "getsize", "getmtime"}
OTHER_ROOMS = {"containers", "influence", "inputs", "faults", "llm", "training", "workloads"}
"""They read images, models and the user's own files; the worker tries again where it reads items."""

NOT_OF_A_RUN = "it is no file of a run directory"
WITHIN = "who calls it tries it again"
COSTS_NOTHING = "what cannot be seen is looked at again soon, or left out of what is offered"
EXCEPTIONS = {
    **dict.fromkeys(
        ("plan/binds.py", "plan/container_spec.py", "util/hashing.py", "util/env_info.py", "util/packages.py"),
        NOT_OF_A_RUN,
    ),
    **dict.fromkeys(
        (
            "util/cgroups.py",
            "util/compiled_code.py",
            "util/pids.py",
            "util/pipes.py",
            "run/liveness.py",
            "util/process_tree.py",
            "util/shared_memory.py",
            "util/standard_streams.py",
            "util/broken_process.py",
            "util/logging.py",
        ),
        NOT_OF_A_RUN,
    ),
    **dict.fromkeys(("cli/options.py", "cli/commands/inspection.py", "cli/streams.py"), NOT_OF_A_RUN),
    **dict.fromkeys(
        (
            "cli/templates.py",
            "page/page.py",
            "code/capture.py",
            "code/user_code.py",
            "code/read_files.py",
            "code/named_files.py",
            "code/present_files.py",
            "code/started_modules.py",
            "slurm/commands.py",
            "slurm/queue.py",
        ),
        NOT_OF_A_RUN,
    ),
    **dict.fromkeys(
        (
            "run/claims.py",
            "util/globs.py",
            "run/lock.py",
            "shards/names.py",
            "shards/shard_file.py",
            "code/snapshots.py",
            "util/atomic_files.py",
            "run/creation.py",
            "run/submission_log.py",
            "results/data_set.py",
        ),
        WITHIN,
    ),
    **dict.fromkeys(
        ("cli/completion.py", "cli/views/log_follower.py", "cli/views/status_poller.py", "cli/views/run_list.py"),
        COSTS_NOTHING,
    ),
    **dict.fromkeys(
        (
            "loader/names.py",
            "code/importer.py",
            "plan/planner.py",
            "trackers/tensorboard.py",
        ),
        NOT_OF_A_RUN,
    ),
    "plan/extension.py": "it reads the input; the shards of the former run within `retried`",
    **dict.fromkeys(("executors/slot.py", "task/spare_worker.py"), "pipes to forks of this process"),
    "executors/detached.py": "pipes, and the log of the process that submits, which is refused without one",
    "executors/here.py": "cancel names the processes that it leaves alone, and may be typed again",
    "util/shared_files.py": "it is what tries again",
    "util/regular_files.py": "its callers try again",
    "util/own_files.py": "a folder of this node's own disk",
    "run/heartbeats.py": "a beat that fails is followed by the next one",
    "run/rendezvous.py": "a node that does not find its leader looks again",
    "cli/lazy_commands.py": "after an error of the file system: the command itself says what is wrong",
    "cli/commands/submitted.py": "after Ctrl-C: it decides which sentence is said",
    "operations/probe.py": "it copies files of the input; after Ctrl-C it decides whether there is a probe to cancel",
    "executors/manual.py": "which of two scripts is named in what is printed",
    "executors/on_end.py": "where on_end and trackers are started, the run directory or the folder of the run file",
    "results/stored.py": "which command a sentence names",
}
"""The modules that ask the file system themselves, and why one failed answer does no harm there."""


def asked_directly(path):
    """The calls of a module that read, list or look at files and are not within a call of `retried`."""
    tree = ast.parse(path.read_text("utf-8"))
    retried = {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "retried"
        for node in ast.walk(call)
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and id(call) not in retried and _asks(call.func):
            yield f"{call.lineno}: {ast.unparse(call)}"


def _asks(function):
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    owner = ast.unparse(function.value)
    known = {"os": OF_OS, "os.path": OF_OS_PATH, "h5py": {"File"}}.get(owner, OF_PATHS)
    return function.attr in known


def test_a_run_directory_is_read_where_a_failed_read_is_tried_again():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in OTHER_ROOMS and (calls := list(asked_directly(path))):
            found[str(path.relative_to(PACKAGE))] = calls
    unexpected = {name: calls for name, calls in found.items() if name not in EXCEPTIONS}
    assert not unexpected, "read through slurmgpu.util.shared_files, or say here why a failed answer does no harm"
    assert not EXCEPTIONS.keys() - found.keys(), "these need no exception any more"
