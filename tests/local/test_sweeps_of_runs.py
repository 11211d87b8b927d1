"""One command for several runs: [sweep] over inputs, models and other keys of the run file."""

import contextlib
import json
import math
import shutil
import sqlite3
from dataclasses import replace

import pytest

import slurmgpu as package
from slurmgpu import api
from slurmgpu.cli.commands import submitted, sweep
from slurmgpu.errors import SlurmGPUError
from slurmgpu.operations import replacement, submit
from slurmgpu.operations.resubmit import Request
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.variants import drafted, variants_of
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.sweep_file import listed_runs, record_runs, runs_of_sweep
from tests.support.pretend_runs import Pretended

LOCAL = ("--executor", "debug", "--gpus", "0")


@pytest.fixture
def swept(project):
    """A project that is swept over two inputs, of 6 and 5 items."""
    folder = project(6, sweep={"input": ["items.jsonl", "others.jsonl"]})
    lines = (folder / "items.jsonl").read_text().splitlines(keepends=True)
    (folder / "others.jsonl").write_text("".join(lines[:5]))
    return folder


def test_one_submit_computes_a_run_for_each_combination(swept, slurmgpu):
    faults = 'sweep.settings.faults=[{}, {2 = "exception"}]'
    done = slurmgpu("submit", *LOCAL, "-s", faults, cwd=swept, expect=0)
    assert "4 runs: input × settings.faults, in " in done.stderr
    names = ["items_faults-0", "items_faults-1", "others_faults-0", "others_faults-1"]
    for name, n_items, n_failed in zip(names, (6, 6, 5, 5), (0, 1, 0, 1), strict=True):
        with package.open(swept / "run" / name / "merged.h5") as merged:
            assert (len(merged), int(merged.failed.sum())) == (n_items, n_failed)
    listed = json.loads(slurmgpu("status", "run", "--json", cwd=swept, expect=0).stdout)
    assert sorted(row["run"] for row in listed["runs"]) == names
    told = slurmgpu("report", "run", cwd=swept, expect=0).stdout.splitlines()
    assert [line.split()[:5] for line in told[1:3]] == [
        [names[0], "6", "of", "6", "0"],
        [names[1], "6", "of", "6", "1"],
    ]
    said = slurmgpu("show", "run", cwd=swept, expect=2).stderr
    assert "is the folder of a sweep, with 4 runs" in said
    assert said == slurmgpu("compare", "run", "run", cwd=swept, expect=2).stderr
    assert "`slurmgpu export run rows.csv` writes the rows of all." in said
    # All rows stand in one table, beside what varies.
    (swept / "run" / names[0] / "merged.h5").unlink()
    (swept / "run" / names[0] / "shards" / "00000.h5").unlink()
    done = slurmgpu("export", "run", "-o", "-", cwd=swept, expect=0)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    there = {name: [row["index"] for row in rows if row["run"] == name] for name in names}
    assert list(there.values()) == [there[names[0]], [*range(6)], [*range(5)], [*range(5)]]
    assert 0 not in there[names[0]]
    assert f"Runs are incomplete: {6 - len(there[names[0]])} item" in done.stderr
    n_failed = sum(row["error"] is not None for row in rows)
    assert f"{n_failed} of the rows belong to failed items: the column error says why.\n" in done.stderr
    assert rows[-1]["input"] == "others.jsonl"
    assert rows[-1]["faults"] == {"2": "exception"}
    [failed] = [row for row in rows if row["error"] and row["input"] == "items.jsonl"]
    assert (failed["index"], failed["faults"]) == (2, {"2": "exception"})
    slurmgpu(
        "export", "run", "all.csv", "--columns", "run,index,input", "--where", "error is not None", cwd=swept, expect=0
    )
    assert (swept / "all.csv").read_text().splitlines() == [
        "run,index,input", "items_faults-1,2,items.jsonl", "others_faults-1,2,others.jsonl",
    ]  # fmt: skip
    assert "as jsonl, csv or tsv, not as 'pt'" in slurmgpu("export", "run", "a.pt", cwd=swept, expect=2).stderr
    assert "no column 'inputs'" in slurmgpu("export", "run", "a.csv", "--columns", "inputs", cwd=swept, expect=2).stderr


def test_runs_that_are_there_stay_and_only_the_others_are_submitted(swept, slurmgpu):
    slurmgpu("submit", *LOCAL, "-s", 'sweep.input=["items.jsonl"]', cwd=swept, expect=0)
    before = (swept / "run" / "items" / "merged.h5").stat().st_ino
    done = slurmgpu("submit", *LOCAL, cwd=swept, expect=0)
    assert "items already exists and is complete." in done.stderr
    assert (swept / "run" / "items" / "merged.h5").stat().st_ino == before
    assert (swept / "run" / "others" / "merged.h5").exists()
    changed = slurmgpu("submit", *LOCAL, "-s", "seed=5", cwd=swept, expect=2)
    assert "items holds a run that computes something else" in changed.stderr


def test_a_run_that_is_there_of_other_code_is_said_to_be(swept, slurmgpu):
    only = (*LOCAL, "-s", 'sweep.input=["items.jsonl"]')
    slurmgpu("submit", *only, cwd=swept, expect=0)
    assert "other code" not in slurmgpu("submit", *only, cwd=swept, expect=0).stderr
    with open(swept / "workloads.py", "a") as file:
        file.write("# A comment is no other code.\n")
    assert "other code" not in slurmgpu("submit", *only, cwd=swept, expect=0).stderr
    with open(swept / "workloads.py", "a") as file:
        file.write("CHANGED = True\n")
    told = slurmgpu("submit", *only, cwd=swept, expect=0).stderr
    assert (
        "items was computed by other code: workloads.py changed since. Its rows stay as they are; slurmgpu resubmit"
        in told
    )


def test_a_run_whose_input_was_read_in_another_format_is_another(project, slurmgpu):
    folder = project(6, sweep={"settings.item_s": [0.0]})
    shutil.copy(folder / "items.jsonl", folder / "items.txt")
    slurmgpu("submit", *LOCAL, cwd=folder, expect=0)
    run = Run.open(next((folder / "run").glob("*/run.json")).parent)
    as_text = ("-s", "input=items.txt")
    assert (
        "holds a run that computes something else" in slurmgpu("submit", *LOCAL, *as_text, cwd=folder, expect=2).stderr
    )
    slurmgpu("plan", "--gpus", "0", *as_text, "--run-dir", "text", cwd=folder, expect=0)
    plan = Run.open(next((folder / "text").glob("*/run.json")).parent).plan
    assert plan.fingerprint == run.plan.fingerprint  # it has the bytes alone


def test_a_run_whose_setting_is_nan_computes_the_same_as_itself():
    now = Pretended(settings={"fill": math.nan}).plan()
    written = Plan.from_json(json.loads(json.dumps(now.to_json())))
    assert now.computes_same(written)
    assert not replace(now, input={**now.input, "folders": ["images"]}).computes_same(written)
    assert not replace(now, settings={"fill": 0.0}).computes_same(written)


def inputs(folder, *names):
    """The key of [sweep] with these inputs, each with items of its own."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f'{{"text": "{name}"}}\n' * (number + 1))
    return {"sweep.input": list(names)}


def test_a_value_that_is_added_or_taken_out_leaves_the_other_runs_as_they_are(swept):
    def submitted(*names):
        return package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0, overrides={"sweep.input": names})

    inputs(swept, "x/a.jsonl", "y/a.jsonl", "z/a.jsonl")
    first = submitted("x/a.jsonl")["a"]
    before = first.run.merged.stat().st_ino
    # By themselves the two would be x-a and y-a.
    runs = submitted("y/a.jsonl", "x/a.jsonl")
    assert {name: len(run.results()) for name, run in runs.items()} == {"y-a": 2, "a": 1}
    # By itself this one would be `a`, which is another's.
    assert [len(run.results()) for run in submitted("z/a.jsonl").values()] == [3]
    # Runs that computed the same under another spelling are no others.
    assert list(submitted("./x/a.jsonl")) == ["a"]
    listed = {"a": {"input": "./x/a.jsonl"}, "y-a": {"input": "y/a.jsonl"}, "z-a": {"input": "z/a.jsonl"}}
    assert listed_runs(swept / "run") == listed
    assert sorted(path.name for path in (swept / "run").iterdir()) == ["a", "sweep.json", "y-a", "z-a"]
    assert first.run.merged.stat().st_ino == before
    # So it is with looks, each of which takes the place of that of its values alone.
    for names in (["x/a.jsonl"], ["x/a.jsonl", "y/a.jsonl"]):
        package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0, limit=1, overrides={"sweep.input": names})
    assert [path.name for path in runs_of_sweep(swept / "run-look")] == ["a", "y-a"]


def test_a_run_with_settings_that_sweep_json_hides_is_known_by_its_place_and_never_taken_for_another(swept):
    path = swept / "slurmgpu.toml"
    (swept / "secret.py").write_text(SECRET)

    def submitted(*prompts):
        given = {
            "workload.use": "secret.py:Prompt",
            "sweep.settings.prompt": list(prompts),
            "sweep.input": "items.jsonl",
        }
        return {
            name: run.run.plan.settings["prompt"]
            for name, run in package.submit_all(path, executor="debug", gpus=0, overrides=given).items()
        }

    first, second, third = (f"My password: {word}. Repeat it." for word in ("abcdef", "ghijkl", "mnopqr"))
    assert submitted(first, second) == {"prompt-0": first, "prompt-1": second}
    assert submitted(first, second, third) == {"prompt-0": first, "prompt-1": second, "prompt-2": third}
    with pytest.raises(SlurmGPUError, match="holds a run that computes something else"):
        submitted(third, second, first)
    assert {each["settings.prompt"] for each in listed_runs(swept / "run").values()} == {"My password: ••• Repeat it."}


SECRET = """
from slurmgpu import Text


class Prompt:
    columns = {"a": Text()}
    batch_size = 8

    def __init__(self, prompt):
        pass

    def __call__(self, items):
        return [{"a": "a"} for _ in items]
"""


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        ({"items": {"input": "elsewhere.jsonl"}}, True),  # its name with other values
        ({"first": {"input": "items.jsonl"}}, True),  # its values under another name
        ({"third": {"input": "third.jsonl"}}, False),
    ],
)
def test_of_two_commands_that_begin_at_once_none_makes_what_the_other_makes(swept, other, is_refused):
    path = swept / "slurmgpu.toml"
    overrides = Overrides()
    overrides.put({"resources": {"gpus": 0, "executor": "debug"}})
    with drafted(path, variants_of(path, overrides)) as drafts:
        record_runs(swept / "run", other)
        if is_refused:
            with pytest.raises(SlurmGPUError, match=f"is submitting runs of this sweep, such as .*{next(iter(other))}"):
                drafts.record()
            assert listed_runs(swept / "run") == other
        else:
            drafts.record()
            assert list(listed_runs(swept / "run")) == ["items", "others"]


def test_what_another_command_left_out_is_written_again_before_it_is_made(swept, monkeypatch):
    submit, seen = api.submit_draft, []

    def noting(draft, *args, **given):
        seen.append(list(listed_runs(swept / "run")))
        handle = submit(draft, *args, **given)
        record_runs(swept / "run", {})  # which leaves out runs that are not made yet
        return handle

    monkeypatch.setattr(api, "submit_draft", noting)
    package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0)
    assert seen == [["items", "others"], ["items", "others"]]


def test_a_run_that_is_there_stays_also_if_it_would_now_be_cut_for_other_tasks(swept):
    path = swept / "slurmgpu.toml"
    path.write_text(path.read_text().replace("shard_items = 8\n", ""))
    [first] = package.submit_all(path, executor="debug", gpus=0, overrides={"sweep.input": ["items.jsonl"]}).values()
    runs = package.submit_all(path, executor="debug", gpus=0, tasks=3)
    assert [run.run.plan.shard_items for run in runs.values()] == [first.run.plan.shard_items, 2] == [4, 2]
    with pytest.raises(SlurmGPUError, match="items holds a run that computes something else"):
        package.submit_all(path, executor="debug", gpus=0, tasks=3, overrides={"shard_items": 2})


def test_nothing_is_made_if_one_of_them_cannot_be_planned(swept, slurmgpu):
    (swept / "others.jsonl").write_text("no JSON\n")
    done = slurmgpu("submit", *LOCAL, cwd=swept, expect=2)
    assert "Run others of [sweep]: " in done.stderr
    assert not (swept / "run").exists()


def test_an_error_of_a_submission_says_which_runs_were_submitted(swept, monkeypatch):
    submit = api.submit_draft

    def refusing(draft, *args, **given):
        if draft.run_dir.name == "others":
            raise SlurmGPUError("Slurm refuses it.")
        return submit(draft, *args, **given)

    monkeypatch.setattr(api, "submit_draft", refusing)
    with pytest.raises(SlurmGPUError, match=r"Run others of \[sweep\]: Slurm refuses it. Submitted before it: items"):
        package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0)
    monkeypatch.undo()
    runs = package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0)
    assert [len(run.results()) for run in runs.values()] == [6, 5]


def test_a_dry_run_a_plan_and_a_check_are_of_all_runs(swept, slurmgpu):
    dry = ("submit", *LOCAL, "--dry-run")
    text = slurmgpu(*dry, cwd=swept, expect=0).stdout
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["items", "others"]
    found = json.loads(slurmgpu(*dry, "--json", cwd=swept, expect=0).stdout)["runs"]
    assert [(run["name"], run["values"], run["plan"]["n_items"]) for run in found] == [
        ("items", {"input": "items.jsonl"}, 6),
        ("others", {"input": "others.jsonl"}, 5),
    ]
    assert not (swept / "run").exists()
    checked = slurmgpu("check", "-s", "resources.executor=debug", "-s", "resources.gpus=0", cwd=swept, expect=0)
    assert checked.stdout.count("✓ plan") == 2
    refused = slurmgpu("submit", *LOCAL, "--probe", "1", cwd=swept, expect=2).stderr
    assert "--probe works with one run, and [sweep] makes several" in refused
    planned = json.loads(slurmgpu("plan", "--gpus", "0", "--json", cwd=swept, expect=0).stdout)
    assert [len(run["lines"]) for run in planned["runs"]] == [2, 2]
    assert (swept / "run" / "others" / "run.json").exists()


def test_resubmit_and_cancel_take_the_folder_of_a_sweep(swept, slurmgpu):
    slurmgpu("submit", *LOCAL, cwd=swept, expect=0)
    run = Run.open(swept / "run" / "others")
    run.shard_path(0).unlink()
    run.merged.unlink()
    done = slurmgpu("resubmit", "run", *LOCAL, "--json", cwd=swept, expect=0)
    assert [each["n_rows"] for each in json.loads(done.stdout)["runs"]] == [5]
    assert run.merged.exists()
    assert "All 2 runs are complete" in slurmgpu("resubmit", "run", *LOCAL, cwd=swept, expect=0).stderr
    assert slurmgpu("cancel", "run", cwd=swept, expect=0).stdout.count("no task of this run is alive") == 2
    (swept / "run" / "sweep.json").write_text("{")
    assert "sweep.json is damaged" in slurmgpu("resubmit", "run", *LOCAL, cwd=swept, expect=2).stderr


@pytest.fixture
def computed(swept):
    """The folder of a sweep whose runs `items` and `others` are complete."""
    package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0)
    return swept / "run"


def test_a_run_that_was_never_made_is_named_and_the_report_exits_with_3(computed, slurmgpu):
    shutil.rmtree(computed / "others")
    said = "others: not submitted."
    assert said in slurmgpu("report", computed, expect=3).stderr
    assert said in slurmgpu("status", computed, expect=0).stderr
    listed = json.loads(slurmgpu("status", computed, "--json", expect=0).stdout)
    assert [row["run"] for row in listed["runs"]] == ["items"]
    assert listed["not_submitted"] == [str(computed / "others")]
    assert said in slurmgpu("cancel", computed, expect=0).stderr
    assert said in slurmgpu("resubmit", computed, *LOCAL, expect=2).stderr


def test_a_run_that_was_never_made_is_forgotten_once_sweep_lacks_its_value(computed, slurmgpu):
    shutil.rmtree(computed / "others")
    only = ("-s", 'sweep.input=["items.jsonl"]')
    assert "items already exists" in slurmgpu("submit", *LOCAL, *only, cwd=computed.parent, expect=0).stderr
    assert [path.name for path in runs_of_sweep(computed)] == ["items"]
    assert json.loads(slurmgpu("status", computed, "--json", expect=0).stdout)["not_submitted"] == []
    # A run that was made stays, whatever is submitted beside it.
    slurmgpu("submit", *LOCAL, "-s", 'sweep.input=["others.jsonl"]', cwd=computed.parent, expect=0)
    assert [path.name for path in runs_of_sweep(computed)] == ["items", "others"]


def test_each_run_is_resubmitted_and_cancelled_whatever_another_does(computed, slurmgpu):
    (computed / "items" / "run.json").write_text("{")
    (computed / "others" / "shards" / "00000.h5").unlink()
    (computed / "others" / "merged.h5").unlink()
    done = slurmgpu("resubmit", computed, *LOCAL, "--json", expect=2)
    refused, made = json.loads(done.stdout)["runs"]
    assert (refused["run_dir"], made["n_rows"]) == (str(computed / "items"), 5)
    assert "run.json is damaged" in refused["error"]
    stopped = slurmgpu("cancel", computed, expect=2)
    assert "items: " in stopped.stderr
    assert "others: no task of this run is alive." in stopped.stdout


def test_runs_that_lack_nothing_are_no_refusals(computed, slurmgpu):
    done = slurmgpu("resubmit", computed, *LOCAL, "--failed", expect=0)
    assert done.stderr.count("no item failed: there is nothing to compute") == 2


def test_all_runs_are_resubmitted_before_the_first_is_waited_for(computed, monkeypatch):
    for name in ("items", "others"):
        (computed / name / "merged.h5").unlink()
    calls = []
    monkeypatch.setattr(submitted, "resubmit_followed", lambda run, *_, **__: calls.append(f"submit {run.name}"))
    monkeypatch.setattr(submitted, "conclude", lambda run, *_, **__: (calls.append(f"wait {run.name}"), (0, {}))[1])
    folders, ways = [computed / "items", computed / "others"], {"force": False, "as_json": False}
    assert sweep.resubmit(folders, Request(), wait=True, **ways) == 0
    assert calls == ["submit items", "submit others", "wait items", "wait others"]


def test_with_wait_a_run_that_is_there_and_incomplete_gives_3(computed, slurmgpu):
    (computed / "items" / "merged.h5").unlink()
    shutil.rmtree(computed / "others")
    done = slurmgpu("submit", *LOCAL, "--wait", cwd=computed.parent, expect=3)
    assert (computed / "others" / "merged.h5").exists()
    assert f"{computed / 'items'} lacks rows of its 6" in done.stderr


def test_a_check_does_not_mind_that_the_folder_is_a_run(swept, slurmgpu):
    (swept / "run").mkdir()
    (swept / "run" / "run.json").write_text("{}")
    slurmgpu("check", "-s", "resources.executor=debug", "-s", "resources.gpus=0", cwd=swept, expect=0)


def test_each_run_has_the_modules_that_only_the_first_plan_imports(swept):
    (swept / "imported_once.py").write_text("FACTOR = 1\n")
    source = (swept / "workloads.py").read_text()
    text = 'import importlib\nFIRST = importlib.import_module("imported_" + "once").FACTOR\n'
    (swept / "workloads.py").write_text(source + text)
    path = swept / "slurmgpu.toml"
    with drafted(path, variants_of(path, Overrides())) as drafts:
        assert [{"imported_once.py"} <= {file.name for file in draft.code.files} for _, draft in drafts.to_submit] == [
            True,
            True,
        ]


@pytest.mark.parametrize("are_there", [False, True])
def test_an_input_and_the_repository_are_read_once_for_all_runs(swept, monkeypatch, are_there):
    sweep = {"sweep.settings.item_s": [0.0, 0.001, 0.002]}
    path, read = swept / "slurmgpu.toml", []
    if are_there:
        package.submit_all(path, executor="debug", gpus=0, overrides=sweep)
    for module, name in ((package.inputs, "scan"), (package.code.capture, "_git_output")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name), name, read))
    runs = package.submit_all(path, executor="debug", gpus=0, overrides=sweep)
    assert read.count("scan") == 2  # there are two inputs
    assert read.count("_git_output") <= 2  # for its two questions
    assert [len(run.results()) for run in runs.values()] == [6, 6, 6, 5, 5, 5]


@pytest.mark.parametrize("kind", ["json", "query"])
def test_a_repacked_input_is_repacked_once_and_is_in_each_run_directory(swept, monkeypatch, kind):
    path, read = swept / "slurmgpu.toml", []
    items = [json.loads(line) for line in (swept / "items.jsonl").read_text().splitlines()]
    (swept / "items.json").write_text(json.dumps(items))
    with contextlib.closing(sqlite3.connect(swept / "items.db")) as database, database:
        database.execute("CREATE TABLE items (number INTEGER, item TEXT)")
        database.executemany("INSERT INTO items VALUES (?, ?)", enumerate(map(json.dumps, items)))
    fields = ", ".join(f"json_extract(item, '$.{name}') AS {name}" for name in items[0])
    given = {"json": "items.json", "query": f"sqlite:items.db?SELECT {fields} FROM items ORDER BY number"}[kind]
    sweep = {"sweep.input": [given], "sweep.settings.item_s": [0.0, 0.001], "sweep.workload.batch_size": [2, 3]}
    name = {"json": "scan", "query": "repack_query"}[kind]
    monkeypatch.setattr(package.inputs, name, recorded(getattr(package.inputs, name), name, read))
    runs = [*package.submit_all(path, executor="debug", gpus=0, overrides=sweep).values()]
    assert read == [name]
    assert [len(run.results()) for run in runs] == [6, 6, 6, 6]
    files = [run.folder / "input" / "00000.parquet" for run in runs]
    assert len({file.stat().st_ino for file in files}) == 1
    shutil.rmtree(runs[0].folder)
    package.submit_all(path, executor="debug", gpus=0, overrides=sweep)
    assert read == [name] * 2
    assert files[0].stat().st_ino != files[1].stat().st_ino
    assert [*swept.glob(".*.partial")] == []


def test_an_interrupt_names_the_run_that_was_not_submitted(swept, monkeypatch, capsys):
    submit = sweep.submit_draft
    made = []

    def interrupted(draft, *args, **given):
        if made:
            raise KeyboardInterrupt
        made.append(submit(draft, *args, **given))
        return made[0]

    monkeypatch.setattr(sweep, "submit_draft", interrupted)
    path = swept / "slurmgpu.toml"
    overrides = Overrides()
    overrides.put({"resources": {"executor": "debug", "gpus": 0}}, "the test")
    asked = {"look": None, "after": (), "inject": (), "dry_run": False, "wait": False, "as_json": False}
    with pytest.raises(KeyboardInterrupt):
        sweep.submit(path, variants_of(path, overrides), **asked)
    assert f"interrupted; {swept / 'run' / 'others'} was not submitted." in capsys.readouterr().err


def test_a_run_that_cannot_be_waited_for_leaves_the_wait_for_the_others(swept, monkeypatch, capsys):
    conclude = submitted.conclude

    def failing(run, *args, **given):
        if run.name == "items":
            raise SlurmGPUError("The merge did not finish.")
        return conclude(run, *args, **given)

    monkeypatch.setattr(submitted, "conclude", failing)
    path, overrides = swept / "slurmgpu.toml", Overrides()
    overrides.put({"resources": {"executor": "debug", "gpus": 0}}, "the test")
    asked = {"look": None, "after": (), "inject": (), "dry_run": False, "wait": True, "as_json": True}
    assert sweep.submit(path, variants_of(path, overrides), **asked) == 2
    told = capsys.readouterr()
    failed, complete = json.loads(told.out)["runs"]
    assert failed == {"run_dir": str(swept / "run" / "items"), "error": "The merge did not finish."}
    assert complete["complete"]
    assert "items: The merge did not finish." in told.err


def recorded(function, name, calls):
    def call(*args, **given):
        calls.append(name)
        return function(*args, **given)

    return call


def test_no_look_of_a_sweep_is_replaced_if_another_cannot_be(swept, monkeypatch, slurmgpu):
    def looks(limit):
        return package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0, limit=limit)

    looks(2)
    (swept / "run-look" / "others" / "submissions.jsonl").unlink()
    with pytest.raises(SlurmGPUError, match="others was made less than"):
        looks(3)
    with package.open(swept / "run-look" / "items" / "merged.h5") as merged:
        assert len(merged) == 2
    for command in (("submit", "--executor", "debug", "--dry-run"), ("plan",)):
        done = slurmgpu(*command, "--gpus", "0", "--limit", "3", cwd=swept, expect=2)
        assert "others was made less than" in done.stderr
    monkeypatch.setattr(replacement, "MAKING_S", 0.0)
    monkeypatch.setattr(submit, "create_run", lambda *_: refuse("Slurm refuses it."))
    with pytest.raises(SlurmGPUError, match=r"None was submitted\.$"):
        looks(3)


def refuse(why):
    raise SlurmGPUError(why)


def test_python_submits_a_sweep_by_submit_all(swept):
    with pytest.raises(SlurmGPUError, match=r"slurmgpu\.submit_all submit all of them"):
        package.submit(swept / "slurmgpu.toml", executor="debug", gpus=0)
    runs = package.submit_all(swept / "slurmgpu.toml", executor="debug", gpus=0, limit=2)
    assert {name: len(run.results()) for name, run in runs.items()} == {"items": 2, "others": 2}
    assert runs["items"].folder == swept / "run-look" / "items"
    (swept / "slurmgpu.toml").write_text('input = "items.jsonl"\n[workload]\nuse = "workloads.py:Rows"\n')
    with pytest.raises(SlurmGPUError, match="varies no key of the run file"):
        package.submit_all(swept / "slurmgpu.toml")
