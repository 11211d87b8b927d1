"""The walls of docs/explanation/architecture.md: imports point down, and each outside library has its rooms."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from slurmgpu.plan.executors import EXECUTORS
from tests.support.pretend_runs import pretend_run

PACKAGE = Path(__file__).parents[2] / "slurmgpu"

FLOORS = {
    0: ["__init__", "errors"],
    1: ["util", "workload"],
    2: ["shards", "containers", "influence", "training"],
    3: ["run"],
    4: ["code", "logs"],
    5: ["report", "results", "loader", "llm"],
    6: ["slurm", "search", "inputs", "faults", "progress"],
    7: ["plan", "worker", "page", "workloads"],
    8: ["task", "merge", "trackers"],
    9: ["executors"],
    10: ["operations"],
    11: ["api"],
    12: ["cli", "mapping"],
    13: ["__main__"],
}
FLOOR = {name: number for number, names in FLOORS.items() for name in names}

LIBRARIES = {"influence", "training", "llm"}
"""What workloads are built on: they know no run."""

FOREIGN = {
    "submitit": {"executors"},
    "typer": {"cli"},
    "rich": {"cli", "progress"},
    "IPython": {"progress"},
    "cloudpickle": {"code.pickling"},
    "pydantic": {"plan"},
    "torch": {"workloads", "llm", "influence", "training", "merge.export", "worker.groups", "worker.group_launcher"},
    "transformers": {"workloads", "llm"},
    "huggingface_hub": {"llm", "inputs"},
    "peft": {"llm"},
    "vllm": {"llm"},
    "pyarrow": {"inputs", "results", "merge.export", "workloads.command.parquet_files"},
    "duckdb": {"inputs"},
    "isal": {"inputs"},
    "pandas": {"results"},
    "pynvml": {"util.nvml"},
    "matplotlib": {"page"},
    "jinja2": {"page", "llm.prompts.jinja_templates"},
    "llguidance": {"llm"},
    "PIL": {"llm.prompts.images"},
    "tensorboard": {"trackers"},
    "wandb": {"trackers"},
    "mlflow": {"trackers"},
    "trackio": {"trackers"},
    "math_verify": {"workloads.grading.symbolic_process"},
    "sympy": {"workloads.grading.symbolic_process"},
    "h5py": {"shards"},
}
"""Each outside library, and the folders or modules that may import it."""


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def nodes(path):
    """All nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


@functools.cache
def is_module(name):
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports(path, for_types=False):
    """Every module that a file imports, also within functions; those for type checkers alone only `for_types`."""
    return list(_imports(path, for_types))


def _imports(path, for_types):
    skipped = {
        id(node)
        for test in ([] if for_types else nodes(path))
        if isinstance(test, ast.If) and isinstance(test.test, ast.Name) and test.test.id == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in nodes(path):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in inner if is_module(name)]
            yield from found
            if len(found) < len(inner):
                yield node.module


def opened_as_the_locale_has_it(path):
    """The calls of a file that read or write text and do not say how it is encoded."""
    for call in nodes(path):
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


def test_no_class_takes_a_keyword_that_abcmeta_takes_itself():
    """Until Python 3.11 `class A(Base, name=...)` of an abstract base is a TypeError."""
    taken = [
        f"{dotted(path)}:{node.lineno}"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and {word.arg for word in node.keywords} & {"name", "bases", "namespace"}
    ]
    assert taken == []


def test_every_room_has_a_floor_and_the_root_has_five_modules():
    assert {room(path) for path in modules()} == set(FLOOR)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "api", "errors", "workload"}


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_point_down_and_libraries_stay_in_their_rooms(path):
    here = room(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "slurmgpu" and rest and (there := rest.split(".")[0]) in FLOOR and there != here:
            assert FLOOR[there] < FLOOR[here], f"{here} (floor {FLOOR[here]}) imports {there} (floor {FLOOR[there]})"
        elif top in FOREIGN:
            assert {here, dotted(path)} & FOREIGN[top], f"{dotted(path)} imports {top}"


def test_the_core_imports_no_built_in_workload_and_their_libraries_no_run():
    beside = {"workloads", *LIBRARIES}
    for path in modules():
        for name in imports(path):
            there = name.removeprefix("slurmgpu.").split(".")[0] if name.startswith("slurmgpu.") else ""
            if room(path) not in beside:
                assert there not in {"workloads", "llm", "influence"}, f"{dotted(path)} imports {name}"
            if room(path) in LIBRARIES:
                assert there in {"", "__init__", "errors", "util", "code", *LIBRARIES}, f"{dotted(path)} imports {name}"


def test_each_folder_says_what_lives_there_and_what_it_may_import():
    for path in PACKAGE.glob("*/__init__.py"):
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert said.splitlines()[0].endswith("."), path
        assert "May import" in said, path


def test_no_two_modules_of_a_room_import_each_other():
    names = {dotted(path) for path in modules()}
    graph = {dotted(path): {each.removeprefix("slurmgpu.") for each in imports(path)} & names for path in modules()}
    for start in graph:
        seen, todo = set(), list(graph[start] - {start})
        while todo:
            name = todo.pop()
            assert name != start, f"{start} imports itself in a circle"
            if name not in seen:
                seen.add(name)
                todo += graph.get(name, set()) - {name}


def test_no_two_files_of_workloads_and_their_libraries_need_each_other_even_for_types():
    inside = {dotted(path): path for path in modules() if room(path) in {*LIBRARIES, "workloads"}}
    graph = {
        name: {each.removeprefix("slurmgpu.") for each in imports(path, for_types=True)} & (inside.keys() - {name})
        for name, path in inside.items()
    }
    assert [*TopologicalSorter(graph).static_order()]  # a circle raises


def test_no_two_rooms_of_the_language_models_import_each_other():
    inside = [path for path in modules() if room(path) == "llm" and dotted(path).count(".") == 2]
    graph = {}
    for path in inside:
        here = dotted(path).split(".")[1]
        theirs = {name.split(".")[2] for name in imports(path) if name.startswith("slurmgpu.llm.")}
        graph.setdefault(here, set()).update(theirs - {here})
    assert set().union(*graph.values()) <= graph.keys(), "a room imports what stands on all of them"
    engines = {name for name in graph if name.endswith("_engine")}
    assert [engine for engine in engines if graph[engine] & engines] == [], "what engines share is in none of them"
    assert [*TopologicalSorter(graph).static_order()]  # a circle raises


NAMES = {*EXECUTORS.built_in, "manual"}
TOLD = "run.submissions"
"""The module that tells whether a record is of Slurm's jobs, for those that ask its queue and its accounting."""


def compared_with_executors(path):
    """The comparisons of a file, and the like, that have an executor's name in them."""
    for node in nodes(path):
        is_asked = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "endswith")
        if (isinstance(node, (ast.Compare, ast.MatchValue)) or is_asked) and any(
            isinstance(part, ast.Constant) and part.value in NAMES for part in ast.walk(node)
        ):
            yield f"{dotted(path)}: {ast.unparse(node)}"


def test_nothing_outside_executors_compares_their_names():
    outside = [path for path in modules() if room(path) != "executors"]
    assert [found for path in outside if dotted(path) != TOLD for found in compared_with_executors(path)] == []
    assert list(compared_with_executors(PACKAGE / "run" / "submissions.py")) == [
        "run.submissions: record['executor'] == 'slurm'"
    ]


FINDS_FILES = ("inputs", "code", "workloads", "llm.models")
"""Rooms that find the files of inputs, of models and of code."""


def test_no_input_model_or_code_is_found_by_a_glob_that_hides_errors():
    """`glob` takes a folder that cannot be listed for an empty one; `slurmgpu.util.globs` raises."""
    found = [
        f"{dotted(path)}: {ast.unparse(node)}"
        for path in modules()
        if dotted(path).startswith(FINDS_FILES)
        for node in nodes(path)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("glob", "iglob", "rglob")
    ]
    assert found == []


def loaded_after(code):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_worker_needs_the_standard_library_numpy_and_h5py_alone():
    foreign = loaded_after("import slurmgpu.worker.main") & {*FOREIGN, "pandas", "cloudpickle"}
    assert foreign == {"h5py"}


def test_a_task_needs_the_standard_library_alone():
    """On each node, beside the worker that computes: what it imports costs memory and the time of every start."""
    assert not loaded_after("import slurmgpu.executors.job_entry") & {*FOREIGN, "numpy", "pandas", "pydantic_core"}


def test_submitit_which_starts_tasks_brings_no_numpy_with_it_and_leaves_it_to_jobs_that_need_it():
    start = "from slurmgpu.executors.begin import import_submitit\nimport_submitit()\nimport submitit.core._submit"
    task = loaded_after(f"{start}\nimport slurmgpu.executors.job_entry")
    assert "submitit" in task
    assert "numpy" not in task
    assert "numpy" in loaded_after(f"{start}\nimport numpy\nnumpy.zeros(1)")
    assert "numpy" in loaded_after(f"import numpy\n{start}\nnumpy.zeros(1)")


def test_what_submits_in_the_background_and_merges_imports_no_pydantic_before_the_tasks_start():
    assert not loaded_after("import slurmgpu.executors.detached") & {"pydantic", "pydantic_core", "submitit", "torch"}


def test_help_and_status_import_nothing_that_takes_long(tmp_path):
    folder = pretend_run(tmp_path / "run", 300, n_tasks=2, executor="local").folder
    run = "from slurmgpu.cli.app import app\napp(%r, standalone_mode=False)"
    for argv in (["--help"], ["status", str(folder)]):
        heavy = {"torch", "submitit", "h5py", "numpy", "pydantic", "pydantic_core"}
        assert not loaded_after(run % argv) & heavy, argv
