"""The walls of docs/explanation/architecture.md: imports point down, and each outside library has its rooms."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretend_runs import pretend_run

PACKAGE = Path(__file__).parent.parent / "slurmgpu"

LAYERS = {
    0: [
        "errors",
        "files",
        "shared_files",
        "digests",
        "failures",
        "cgroups",
        "gpus",
        "nvml",
        "trees",
        "surroundings",
        "probing",
        "columns",
        "containers",
        "pipes",
        "escapes",
        "hiding",
        "early_signals",
        "pids",
        "arrays",
        "summaries",
        "plurals",
        "__init__",
    ],
    1: [
        "snapshots",
        "syntax",
        "stretches",
        "importing",
        "claims",
        "histories",
        "meetings",
        "tunnels",
        "private",
        "owners",
        "records",
        "heartbeats",
        "locks",
        "runs",
        "submissions",
        "signs",
        "waiting",
        "rereading",
        "telemetry",
        "samples",
        "logs",
        "regions",
        "skeletons",
        "pieces",
        "shards",
        "results",
        "joins",
        "joined",
        "former_rows",
        "merged_head",
        "recompute",
        "revisions",
        "llm",
        "influence",
        "training",
    ],
    2: ["export", "inputs", "sweeps", "workloads", "config", "site"],
    3: [
        "planning",
        "tracing",
        "locating",
        "renewing",
        "items",
        "placing",
        "containing",
        "binding",
        "attempts",
        "report",
        "naming",
        "ledger",
        "pace",
        "states",
        "status",
        "metrics",
        "searching",
        "computing",
        "scouting",
        "groups",
    ],
    4: ["worker", "injecting", "merge", "pages", "forecast"],
    5: ["processes", "nodes", "following", "launching", "checking", "recording", "deaths", "task"],
    6: ["building", "executors"],
    7: ["api"],
    8: ["cli", "__main__"],
}
LAYER = {name: number for number, names in LAYERS.items() for name in names}

ROOMS = {
    "submitit": {"executors"},
    "typer": {"cli"},
    "rich": {"cli"},
    "pydantic": {"config", "planning", "site"},
    "torch": {"workloads", "groups", "llm", "influence", "training", "export"},
    "transformers": {"workloads", "llm"},
    "huggingface_hub": {"llm"},
    "vllm": {"llm"},
    "pyarrow": {"inputs", "results", "export"},
    "pandas": {"results"},
    "pynvml": {"nvml"},
    "matplotlib": {"pages"},
    "jinja2": {"pages"},
    "h5py": {"skeletons", "pieces", "shards", "joins", "results"},
}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def room(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path):
    """Every module that a file imports, also within functions; not those for type checkers alone."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and isinstance(test.test, ast.Name) and test.test.id == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "slurmgpu":
                yield from (f"slurmgpu.{alias.name}" for alias in node.names)


def opened_as_the_locale_has_it(path):
    """The calls of a file that read or write text and do not say how it is encoded."""
    for call in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(call, ast.Call) or "encoding" in {keyword.arg for keyword in call.keywords}:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        mode = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        is_text = not mode or "b" not in str(getattr(mode[0], "value", "b"))
        if (
            (name == "read_text" and not call.args)
            or (name == "write_text" and len(call.args) < 2)
            or (is_text and isinstance(call.func, ast.Name) and name == "open")
            or (is_text and name == "fdopen")
        ):
            yield f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)}"


def test_no_text_is_read_or_written_as_the_locale_has_it():
    assert [found for path in modules() for found in opened_as_the_locale_has_it(path)] == []


def test_every_module_has_a_layer():
    assert {room(path) for path in modules()} == set(LAYER)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down_and_libraries_stay_in_their_rooms(path):
    here = room(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "slurmgpu" and rest and (there := rest.split(".")[0]) in LAYER and there != here:
            assert LAYER[there] <= LAYER[here], f"{here} (layer {LAYER[here]}) imports {there} (layer {LAYER[there]})"
        elif top in ROOMS:
            assert here in ROOMS[top], f"{here} imports {top}"


def test_no_two_modules_import_each_other():
    graph = {}
    for path in modules():
        graph.setdefault(room(path), set()).update(
            name.split(".")[1] for name in imports(path) if name.startswith("slurmgpu.")
        )
    for start in graph:
        seen, todo = set(), list(graph[start] - {start})
        while todo:
            name = todo.pop()
            assert name != start, f"{start} imports itself in a circle"
            if name not in seen:
                seen.add(name)
                todo += graph.get(name, set()) - {name}


def loaded_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_worker_needs_the_standard_library_numpy_and_h5py_alone():
    foreign = loaded_after("import slurmgpu.worker") & {*ROOMS, "pandas", "cloudpickle"}
    assert foreign == {"h5py"}


def test_help_and_status_import_nothing_that_takes_long(tmp_path):
    folder = pretend_run(tmp_path / "run", 300, n_tasks=2, executor="local").folder
    run = "from slurmgpu.cli.app import app\napp(%r, standalone_mode=False)"
    for argv in (["--help"], ["status", str(folder)]):
        heavy = {"torch", "submitit", "h5py", "numpy", "pydantic", "pydantic_core"}
        assert not loaded_after(run % argv) & heavy, argv
