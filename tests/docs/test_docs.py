"""The docs tell the truth: what they list is what there is, their links lead somewhere, and their examples run."""

import importlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import typer

import slurmgpu
from slurmgpu.cli import exit_codes
from slurmgpu.cli.app import app
from slurmgpu.containers.settings import ContainerRecord, Identity
from slurmgpu.llm import settings
from slurmgpu.llm.interface.engine import Sampling
from slurmgpu.loader.adapted import Adapted
from slurmgpu.loader.names import BUILT_IN
from slurmgpu.plan.run_file import ContainerTable, Resources, RunFile, TrackTable, WorkloadTable
from slurmgpu.run.claims import Claim
from slurmgpu.run.crash_history import History
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import POLICIES
from slurmgpu.run.metric_log import PointLine
from slurmgpu.run.records import Attempt
from slurmgpu.slurm.queue import QueuedJob
from slurmgpu.task.supervisor import Task
from slurmgpu.task.telemetry import GPU_VALUES, HOST_VALUES, Sampler
from slurmgpu.training.settings import TrainingSettings
from slurmgpu.util import env_info
from slurmgpu.workloads.command import Command
from slurmgpu.workloads.tracin import summary as tracin_summary
from slurmgpu.workloads.tracin.planning import Planned
from slurmgpu.workloads.tracin.workload import Tracin
from slurmgpu.workloads.train import rows as train_rows
from slurmgpu.workloads.train import summary as train_summary
from tests.support.nightly import by_night
from tests.unit.test_layers import FLOORS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
REFERENCE = DOCS / "reference"

# What differs from one run, one machine or one version to the next, and what stands for it in comparisons.
BLURRED = [
    (r"\d\d:\d\d:\d\d", "00:00:00"),
    (r"\d+\.\d+\.\d+", "1.2.3"),
    (r" in \d+\.\d+s( \(\d+:\d+:\d+\))?", " in 0.00s"),  # pytest's own, above a minute
    (r"\d+\.\d\d GPU-hours", "0.00 GPU-hours"),
    (r"\d+_0_log", "1234_0_log"),
    (r"  host GB", ""),  # and its numbers, see `blurred`: some runs are too short to be sampled
    (r"it has \d+ bytes, but had \d+", "it has 1 bytes, and had 2"),
]


STANDS_FOR = {"NNNNN": r"\d{5}", "ATTEMPT": r"[a-z]+\d+_\d+\.\d+", "DIGEST": "[0-9a-f]{16}", "NAME": ".+"}
"""Of the names of a run directory's files: what is in the place of these words."""

# What pages consist of


def section(page, heading):
    """The text below a heading, up to the next one of its level or above."""
    text = (REFERENCE / page).read_text()
    found = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.M)
    assert found, f"{page} has no heading {heading!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def rows(page, heading):
    """The cells of the first table below a heading, without its head."""
    lines = [line for line in re.split(r"\n\n", section(page, heading)) if line.lstrip().startswith("|")]
    assert lines, f"{page}: no table under {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].strip().splitlines()[2:]]


def listed(page, heading):
    """Every word in code marks in the first column of the table below a heading."""
    return {word for row in rows(page, heading) for word in re.findall(r"`([^`]+)`", row[0])}


def blocks(page):
    """The code blocks of a page: language, note behind it, text."""
    return re.findall(r"^```(\w+)[ ]?([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S)


# The reference lists what there is


def commands(group, prefix=""):
    """Every command by its words: "image build" is one of the group "image"."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def options(command):
    return {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_reference_lists_every_option_of_every_command_and_no_other(name):
    options_there = options(COMMANDS[name])
    shown = listed("cli.md", f"slurmgpu {name}") if options_there else set()
    assert shown == options_there


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_names_arguments_in_capitals(name):
    arguments = [each for each in COMMANDS[name].params if each.param_type_name == "argument"]
    assert [each.name for each in arguments if not (each.metavar or "").isupper()] == []


def test_the_reference_has_every_command_and_no_other():
    found = re.findall(r"^## slurmgpu ([a-z ]+)$", (REFERENCE / "cli.md").read_text(), re.M)
    assert sorted(found) == sorted(COMMANDS)
    assert listed("cli.md", "Commands") == set(COMMANDS)


def test_the_reference_lists_the_options_of_slurmgpu_itself():
    assert listed("cli.md", "Options of slurmgpu itself") == options(typer.main.get_command(app)) | {"-h", "--help"}


def test_the_reference_lists_every_exit_code():
    codes = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")} | {130, 143}
    assert {int(code) for code in listed("cli.md", "Exit codes")} == codes


TABLES = {"workload", "settings", "sweep", "resources", "container", "slurm", "merge", "track"}


@pytest.mark.parametrize(
    ("heading", "model"),
    [
        ("Top level", RunFile),
        ("[workload]", WorkloadTable),
        ("[resources]", Resources),
        ("[container]", ContainerTable),
        ("[track]", TrackTable),
    ],
)
def test_the_reference_lists_every_key_of_the_run_file_with_its_default(heading, model):
    tables = TABLES if model is RunFile else set()
    assert listed("run-file.md", heading) == set(model.model_fields) - tables
    for key, _, default, *_ in rows("run-file.md", heading):
        field = model.model_fields[key.strip("`")]
        value = field.get_default(call_default_factory=True)
        if value is not None and not field.is_required():
            assert default.strip("`") == json.dumps(value), key
        else:
            assert (default == "required") == field.is_required(), key


def test_every_table_of_the_run_file_has_its_heading():
    text = (REFERENCE / "run-file.md").read_text()
    assert set(re.findall(r"^## \[(\w+)\]", text, re.M)) == TABLES


def test_the_reference_lists_every_failure_class_with_its_policy():
    shown = {row[0].strip("`"): (row[2] == "yes", row[3] == "yes") for row in rows("failures.md", "Classes")}
    assert shown == {name: (policy.retriable, policy.node_at_fault) for name, policy in POLICIES.items()}
    changes = {row[0].strip("`"): row[4] for row in rows("failures.md", "Classes")}
    assert {name for name, policy in POLICIES.items() if policy.more_memory} == {
        name for name, change in changes.items() if "memory" in change
    }
    _, *sections = re.split(r"^### (\w+)$", (REFERENCE / "failures.md").read_text(), flags=re.M)
    told = dict(zip(sections[::2], sections[1::2], strict=True))
    assert told.keys() == POLICIES.keys()
    for name, policy in POLICIES.items():
        assert all(state in told[name] for state in policy.states), name


LANGUAGE_MODELS = "language-models.md"


@pytest.mark.parametrize("name", ["generate", "classify", "score", "perplexity", "judge", "collect", "embed"])
def test_the_reference_lists_every_setting_of_a_workload_with_its_default(name):
    module, _, class_name = BUILT_IN[name].partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), class_name)).parameters
    own = {key: parameter for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert listed(LANGUAGE_MODELS, name) == own.keys()
    for keys, _, shown, *_ in rows(LANGUAGE_MODELS, name):
        for key in re.findall(r"`(\w+)`", keys):
            default = own[key].default
            required = default is inspect.Parameter.empty
            expected = "required" if required else "–" if default is None else json.dumps(default)
            assert shown.strip("`") == expected, key


def test_the_reference_lists_every_setting_of_tracin_with_its_default():
    own = inspect.signature(Tracin).parameters
    assert listed("tracin.md", "Settings") == own.keys()
    for key, _, shown, *_ in rows("tracin.md", "Settings"):
        default = own[key.strip("`")].default
        if default is inspect.Parameter.empty:
            assert shown == "required", key
        elif default is not None:
            assert shown.strip("`") == json.dumps(default), key


def test_the_reference_lists_every_column_of_tracin_and_every_key_of_its_summary():
    columns = {}
    for precision, full in (("fp32", "float32"), ("bf16", "float16")):
        files = {"train": "", "entities": "", "relations": "", "model": "m.pt"}
        tracin = Tracin(**files, full=full, precision=precision)
        tracin.facts = Planned("conve", ["m.pt"], [1.0], False, ["conv"], 3, 2, 1, 9, None, {})
        columns |= tracin.columns
    assert listed("tracin.md", "Columns") == columns.keys()
    assert listed("tracin.md", "Summary") == set(tracin_summary.KEYS)


def test_the_reference_lists_every_setting_of_train_with_its_default():
    own = {"arguments": None} | {field.name: field.default for field in fields(TrainingSettings)}
    assert listed("training.md", "Settings") == {"training", *own}
    for key, _, shown, *_ in rows("training.md", "Settings"):
        default = own.get(key.strip("`"), "required")
        expected = "–" if default is None else default if default == "required" else json.dumps(default)
        assert shown.strip("`") == expected, key


def test_the_reference_lists_every_setting_of_command_with_its_default():
    own = inspect.signature(Command).parameters
    assert listed("command.md", "Settings") == own.keys()
    for key, _, shown, *_ in rows("command.md", "Settings"):
        default = own[key.strip("`")].default
        required = default is inspect.Parameter.empty
        assert shown.strip("`") == ("required" if required else "–" if default is None else json.dumps(default)), key


def test_the_reference_lists_every_column_of_train_and_every_key_of_its_summary():
    assert listed("training.md", "Columns") == train_rows.COLUMNS.keys()
    assert listed("training.md", "Summary") == set(train_summary.KEYS)
    assert list(train_rows.COLUMNS)[-len(train_rows.MEASURED) :] == list(train_rows.MEASURED)


def test_the_reference_lists_the_settings_that_all_language_models_share():
    assert listed(LANGUAGE_MODELS, "Model and engine") == {"model", *get_type_hints(settings.ModelSettings)}
    assert listed(LANGUAGE_MODELS, "Sampling") == settings.sampling_names()
    for key, _, shown, *_ in rows(LANGUAGE_MODELS, "Sampling"):
        default = getattr(Sampling(), key.strip("`"))
        assert shown.strip("`") == json.dumps(default), key


RUN_FILE = """
input = "items.jsonl"
run_dir = "run"
shard_items = 8
workload.use = "sample_workloads.py:Rows"
settings.faults = {3 = "item_error", 17 = "segfault"}
resources = {gpus = 0, executor = "local"}
"""
# Of a submission that is queued, refused, cancelled or made by hand.
ON_SLURM_ONLY = {"array_name", "merge_name", "cluster", "array_job", "merge_job", "by_hand", "message", "cancelled"}
ON_SLURM_ONLY |= {"merges_again"}


def test_the_guide_lists_every_optional_member_of_a_workload():
    guide = (DOCS / "how-to" / "write-a-workload.md").read_text()
    table = guide.partition("## Hooks\n")[2].partition("\n## ")[0]
    members = {name for name in vars(Adapted) if not name.startswith("_")} | {
        "texts"
    }  # which the class itself is read for
    own = {"columns", "batch_size", "load", "check"}  # described above the table, or no attribute of the user's class
    assert set(re.findall(r"^\| `(\w+)", table, re.M)) == members - own


@pytest.fixture(scope="module")
def written(tmp_path_factory, slurmgpu):
    """What a run leaves: an item failed, a worker died, a shard was damaged, and a second submission mended it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "slurmgpu.toml").write_text(RUN_FILE)
    (folder / "sample_workloads.py").write_text((ROOT / "tests" / "support" / "sample_workloads.py").read_text())
    (folder / "items.jsonl").write_text("".join(f'{{"text": "item {index}"}}\n' for index in range(40)))

    def call(*argv):
        return slurmgpu(*argv, cwd=folder).stdout

    call("submit")
    damaged = folder / "run" / "shards" / "00001.h5"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (folder / "run" / "merged.h5").unlink()  # which has its rows
    report = json.loads(call("merge", "run", "--json"))
    call("resubmit", "run", "--executor", "debug")
    task = Task(Run.open(folder / "run"), Attempt("job", 0))
    task.handle({"event": "takeover", "shard": 1, "from": "1_0.0", "host": "gpu1"})
    return {
        "run": folder / "run",
        "plan": json.loads((folder / "run" / "run.json").read_text()),
        "lines": [json.loads(line) for line in (folder / "run" / "submissions.jsonl").read_text().splitlines()],
        "record": json.loads((folder / "run" / "tasks" / "local1_0.0.json").read_text()),
        "takeover": task.record["takeovers"][0],
        "report": report,
        "list": json.loads(call("list", "--json")),
        "logs": json.loads(call("logs", "run", "--json")),
        "show": json.loads(call("show", "run", "--json")),
        "comparison": json.loads(call("compare", "run", "run", "--json")),
        "status": json.loads(call("status", "run", "--json")),
        "dry_run": json.loads(call("submit", "--dry-run", "--json", "--run-dir", "other")),
        "forecast": json.loads(call("submit", "--probe", "8", "--json", "--run-dir", "third")),
    }


KEYS = {
    "cli.md: JSON of a dry run": lambda written: written["dry_run"],
    "cli.md: JSON of a probe": lambda written: written["forecast"],
    "cli.md: probe of a forecast": lambda written: written["forecast"]["probe"],
    "files.md: run.json": lambda written: written["plan"],
    "files.md: container of run.json": lambda written: (
        {*ContainerRecord.__annotations__, *Identity.__annotations__} - set(ContainerTable.model_fields)
    ),
    "files.md: input of run.json": lambda written: {**written["plan"]["input"], **written["plan"]["input"]["files"][0]},
    "files.md: submissions.jsonl": lambda written: {key for line in written["lines"] for key in line} | ON_SLURM_ONLY,
    "files.md: claims/": lambda written: {field.name for field in fields(Claim)},
    "files.md: Histories": lambda written: {field.name for field in fields(History)},
    "files.md: tasks/": lambda written: written["record"],
    "files.md: deaths": lambda written: written["record"]["deaths"][0],
    "files.md: surroundings": lambda written: env_info.describe(),
    "files.md: GPU values": lambda written: GPU_VALUES,
    "files.md: Host values": lambda written: HOST_VALUES,
    "files.md: What workloads log": lambda written: PointLine.__annotations__,
    "files.md: takeovers": lambda written: written["takeover"],
    "report.md: report.json": lambda written: written["report"],
    "report.md: missing": lambda written: written["report"]["missing"][0],
    "report.md: code": lambda written: written["report"]["code"][0],
    "report.md: errors": lambda written: written["report"]["errors"][0],
    "report.md: attempts": lambda written: written["report"]["attempts"][0],
    "report.md: ledger": lambda written: written["report"]["ledger"],
    "report.md: usage": lambda written: Sampler(Path("nowhere"), [], 0, lambda: None).usage(),
    "report.md: provenance": lambda written: written["report"]["provenance"],
    "report.md: slurmgpu list --json": lambda written: written["list"],
    "report.md: runs of a list": lambda written: written["list"]["runs"][0],
    "report.md: slurmgpu compare --json": lambda written: written["comparison"],
    "report.md: sides of a comparison": lambda written: written["comparison"]["a"],
    "report.md: slurmgpu show --json": lambda written: written["show"],
    "report.md: slurmgpu status --json": lambda written: written["status"],
    "report.md: pace": lambda written: written["status"]["pace"],
    "report.md: queue": lambda written: QueuedJob("7", "PENDING", "", "", "", "").to_json(False, 4),
    "report.md: attempts of a status": lambda written: written["status"]["attempts"][0],
    "report.md: slurmgpu logs --json": lambda written: written["logs"],
    "report.md: attempts of the logs": lambda written: written["logs"]["attempts"][0],
    "report.md: files of the logs": lambda written: written["logs"]["attempts"][0]["files"][0],
}


@pytest.mark.parametrize("place", KEYS)
def test_the_reference_lists_every_key_that_is_written_and_no_other(place, written):
    page, heading = place.split(": ")
    assert listed(page, heading) == set(KEYS[place](written))


def test_init_and_its_reference_list_every_workload(tmp_path):
    done = subprocess.run([sys.executable, "-m", "slurmgpu", "init", "--help"], capture_output=True, text=True)
    [listed_there] = re.findall(r"The built-in workloads:\n\n((?: {4}\w.*\n)+)", done.stdout)
    assert {line.split()[0] for line in listed_there.splitlines()} == set(BUILT_IN)
    [sentence] = re.findall(r"for the built-in workload `WORKLOAD` \((.*?)\)", section("cli.md", "slurmgpu init"))
    assert set(re.findall(r"`(\w+)`", sentence)) == set(BUILT_IN)


def test_the_reference_lists_every_file_of_a_run_directory(written):
    run = written["run"]
    patterns = [
        re.compile(re.sub("|".join(STANDS_FOR), lambda word: STANDS_FOR[word[0]], re.escape(name)) + "$")
        for name in listed("files.md", "The directory")
    ]
    found = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert len(found) > 10
    assert [name for name in found if not any(pattern.match(name) for pattern in patterns)] == []


def test_the_architecture_page_has_the_layers_that_the_imports_keep_to():
    lines = re.findall(r"^\| (\d+) \| ([^|]+) \|", (DOCS / "explanation" / "architecture.md").read_text(), re.M)
    assert {int(layer): set(re.findall(r"`(\w+)`", names)) for layer, names in lines} == {
        layer: set(names) for layer, names in FLOORS.items()
    }


# Links


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_module_that_a_page_names_is_there():
    """Also a folder, and an attribute of a module; a path begins in the package, or with `tests`."""
    gone = []
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"`([a-z_]+(?:/[a-z_]+)+)(?:\.py)?/?`", text)
        named += [name.replace(".", "/") for name in re.findall(r"\bslurmgpu(?:\.[a-z_]+)+", text)]
        for name in sorted(set(named)):
            base = ROOT if name.startswith("tests/") else ROOT / "slurmgpu"
            path = base / name.removeprefix("slurmgpu/")
            if not (base / path.relative_to(base).parts[0]).exists():
                continue  # of the user's, or of another package
            if not any(each.exists() for each in (path, path.with_suffix(".py"), path.parent.with_suffix(".py"))):
                gone.append(f"{page.name}: {name}")
    assert gone == []


def first_lines():
    """A row of the table of public names: the name, with its arguments, and the first paragraph of its docstring."""
    members = {name: getattr(slurmgpu, name) for name in slurmgpu.__all__ if name != "__version__"}
    for cls in (slurmgpu.RunHandle, slurmgpu.Merged):
        named = {
            name: value
            for name, value in vars(cls).items()
            if not name.startswith("_") and name != "run" and value is not None
        }
        members |= {f"{cls.__name__}.{name}": value for name, value in named.items() if inspect.getdoc(value)}
    for name in sorted(members, key=lambda name: (name.partition(".")[0].lower(), "." in name)):
        value, arguments = members[name], ""
        if inspect.isfunction(value):
            given = [each for each in inspect.signature(value).parameters.values() if each.name != "self"]
            arguments = (
                f"({', '.join(f'**{each.name}' if each.kind is each.VAR_KEYWORD else each.name for each in given)})"
            )
        yield f"| `{name}{arguments}` | {' '.join(inspect.getdoc(value).partition(chr(10) * 2)[0].split())} |"


def test_the_page_of_python_has_every_public_name_with_what_its_docstring_says_first():
    text = (REFERENCE / "python.md").read_text()
    table = text.partition("## At a glance\n")[2].partition("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == list(first_lines())


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text()
    for page in DOCS.rglob("*.md"):
        if page != DOCS / "README.md":
            assert f"]({page.relative_to(DOCS)})" in index


def test_the_file_tree_of_the_readme_is_the_one_there_is():
    tree = next(text for _, note, text in blocks(ROOT / "README.md") if note == "tree")
    names = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    ignored = {line.strip("/\n") for line in (ROOT / ".gitignore").read_text().splitlines()}
    there = {path.name for path in ROOT.iterdir() if path.is_file() or any(path.iterdir())}
    assert {name for name in names if not (ROOT / name).exists()} == set()
    assert {name for name in there - names - ignored if not name.startswith(".")} == set()


# Examples

RUNNING = ["tutorial.md", "how-to/write-a-workload.md", "how-to/debug-locally.md", "how-to/resubmit.md"]
RUNNING += ["how-to/train-a-model.md", "how-to/rehearse-failures.md", "how-to/run-a-command.md"]
RUNNING += ["how-to/sweep-over-runs.md", "how-to/map-a-function.md", "how-to/bring-a-script.md"]
# What these do is shown by day: in tests/files by test_inputs_files.py and test_inputs_tar.py, in tests/local by
# test_groups.py, in tests/models by test_training_throughput.py and test_training_batch_size.py.
BY_NIGHT = [by_night("how-to/map-a-folder.md")]
WITH_TORCH = ["how-to/several-processes.md", "how-to/measure-training.md"]
BY_NIGHT += [pytest.param(page, marks=[pytest.mark.model, pytest.mark.nightly]) for page in WITH_TORCH]


@pytest.mark.parametrize("page", [*RUNNING, *BY_NIGHT])
def test_the_examples_of_a_page_print_what_it_shows(page, tmp_path, slurmgpu):
    """A block that begins with the comment `# NAME` is a file; a block `console` is typed, one with a note is not."""
    folder = tmp_path / "sheep"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    slurmgpu.put(tmp_path / "bin")
    n_commands = 0
    for language, note, text in blocks(DOCS / page):
        if name := re.match(r"# ([\w.-]+\.(?:py|toml|sh))\n", text):
            (folder / name[1]).write_text(text)
        elif language == "console" and not note:
            for command, shown, printed in type_in(folder, text):
                n_commands += 1
                assert matches(shown, printed), f"$ {command}\nthe page shows:\n{shown}\nit printed:\n{printed}"
    assert n_commands


@pytest.mark.model
@pytest.mark.parametrize("every", [10, by_night(1)])
def test_the_demo_prints_what_the_readme_shows(tmp_path, every):
    """By day with the definitions that the page shows, and a tenth of those that are less near to them, in one task."""
    folder = tmp_path / "embed"
    shutil.copytree(DOCS / "examples" / "embed", folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    [whole] = re.findall(r"^```\n( +bank .*?)^```$", (folder / "README.md").read_text(), re.M | re.S)
    words = set(re.findall(r"^[\d. ]{4}  (\S+)", whole, re.M))
    lines = (folder / "glosses.jsonl").read_text().splitlines(keepends=True)
    kept = [line for n, line in enumerate(lines) if n % every == 0 or json.loads(line)["word"] in words]
    (folder / "glosses.jsonl").write_text("".join(kept))
    if every > 1:  # another task would be another process that imports PyTorch
        demo = (folder / "demo.py").read_text()
        assert demo.count("N_TASKS = ") == 1
        (folder / "demo.py").write_text(re.sub("N_TASKS = .*", "N_TASKS = 1", demo))
    done = subprocess.run([sys.executable, folder / "demo.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run, neighbours = done.stdout.split("$ python neighbours.py\n")
    assert f"glosses  complete  {len(kept):,} of {len(kept):,} rows, 0 of them failed" in run
    [shown] = [text for _, note, text in blocks(ROOT / "README.md") if note == "demo"]
    beginning = shown.split("$ python neighbours.py\n")[1].split("…")[0]
    assert neighbours.startswith(beginning)
    assert neighbours.rstrip() == whole.rstrip()


def type_in(folder, text):
    """Each command of a block with what the page shows and what it prints here, both blurred."""
    parts = re.split(r"^\$ ", text, flags=re.M)[1:]
    typed = [part.split("\n", 1) for part in parts]
    script = "".join(f"{command}\nrc=$?; printf '\\x1e\\n'; (exit $rc)\n" for command, _ in typed)
    # A page's own pytest clears away folders of former ones as it ends, and would say here what it cannot remove.
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",  # lines come in the order of a terminal
            "PYTEST_DEBUG_TEMPROOT": str(temporary),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    for (command, shown), printed in zip(typed, done.stdout.split("\x1e\n")[:-1], strict=True):
        yield command, blurred(shown, folder), blurred(printed, folder)


def blurred(text, folder):
    """Without what differs between runs: times, paths, versions, progress, and which task did how much."""
    text = text.replace(str(folder), "/home/ada/sheep")
    text = re.sub(rf"\b{re.escape(platform.node())}\b", "laptop", text)
    for pattern, instead in BLURRED:
        text = re.sub(pattern, instead, text)
    lines = []
    for line in text.splitlines():
        line = " ".join(line.split())
        if re.match(r"(local|debug)\d+_\d+\.\d+ laptop ", line):
            line = re.sub(r" (#\.#|–)", "", re.sub(r"\d[\d,]*", "#", line))
        if line and not re.match(r"\S+ \S+ (running|merging); [\d,]+ of [\d,]+ items ", line):
            lines.append(line)
    return "\n".join(lines)


def matches(shown, printed):
    """Whether they are equal, where a line `…` stands for any lines."""
    pattern = "".join(r"(?:.*\n)*" if line == "…" else re.escape(line) + r"\n" for line in shown.splitlines())
    return re.fullmatch(pattern, f"{printed}\n" if printed else "") is not None
