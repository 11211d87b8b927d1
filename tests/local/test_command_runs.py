"""Runs of `use = "command"`: the same bytes whatever the mode, the batches and the kills; what logs and plans say."""

import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

import slurmgpu as package
from slurmgpu.cli.commands.run import as_toml, whole_run_file
from slurmgpu.cli.completion import complete_folder
from slurmgpu.code import importer, snapshots
from slurmgpu.code.present_files import PresentFiles
from slurmgpu.errors import SlurmGPUError
from slurmgpu.operations import earlier_run
from slurmgpu.plan.binds import container_binds
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.run_file import read_toml
from slurmgpu.run.creation import create_run
from slurmgpu.workloads.command import process
from tests.support.nightly import by_night
from tests.support.runs import (
    copy_run,
    datasets,
    has_ended,
    kill_workers,
    records,
    report,
    start,
    toml,
    wait_until,
    workers,
)
from tests.support.unprivileged import locked_folder, unprivileged

BODY = """
import json, os, sys, time

def row(item):
    text = item["data"]["text"]
    print("looking at", text, flush=True)
    while text == "held" and os.path.exists("held"):
        if not os.path.exists("pids"):
            left = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
            with open("new", "w") as file:
                file.write(f"{os.getpid()} {left}")
            os.rename("new", "pids")
        time.sleep(0.02)
    if text == "bad":
        sys.exit("cannot read it")
    if text == "deadly":
        os.kill(os.getpid(), 11)
    if text == "busy" and not os.path.exists("was-busy"):
        open("was-busy", "w").close()
        sys.exit(75)
    return {"n": len(text), "shout": text.upper()}
"""
MODES = {
    "slice.py": """
sys.stdout = sys.stderr
items = [json.loads(line) for line in open(sys.argv[1])]
with open(sys.argv[2], "w") as file:
    for item in items:
        print(json.dumps({"index": item["index"], **row(item)}), file=file)
""",
    "one.py": """
out, sys.stdout = sys.stdout, sys.stderr
print(json.dumps(row({"data": {"text": sys.argv[1]}})), file=out)
""",
    "stream.py": """
out, sys.stdout = sys.stdout, sys.stderr
print(json.dumps({"ready": True}), file=out, flush=True)
for item in map(json.loads, sys.stdin):
    print(json.dumps({"index": item["index"], **row(item)}), file=out, flush=True)
""",
}
RUN = {
    "slice.py": [sys.executable, "-S", "slice.py", "{in}", "{out}"],
    "one.py": [sys.executable, "-S", "one.py", "{text}"],
    "stream.py": [sys.executable, "-S", "stream.py"],
}
TEXTS = [f"item {i}" for i in range(20)]
TEXTS[6], TEXTS[13] = "bad", "held"
COLUMNS = {"n": "int32", "shout": "text"}


def make(folder, script, batch_size=4, texts=TEXTS, executor="debug", **settings):
    """A folder with a script of a mode, an input and a run file."""
    folder.mkdir(exist_ok=True)
    (folder / script).write_text(BODY + MODES[script])
    (folder / "items.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"run": RUN[script], "columns": COLUMNS, **settings}
    settings |= {"stream": True} if script == "stream.py" else {}
    tables = {
        "workload": {"use": "command", "batch_size": batch_size},
        "settings": settings,
        "resources": {"gpus": 0, "executor": executor},
    }
    top = 'input = "items.jsonl"\nrun_dir = "run"\nhtml = false\nshard_items = 8\nlease_s = 4.0\n'
    lines = (f"[{name}]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in table.items()) for name, table in tables.items())
    (folder / "slurmgpu.toml").write_text(top + "\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory, slurmgpu):
    """The bytes of the items' rows, computed one item a call; and the folder."""
    folder = make(tmp_path_factory.mktemp("command") / "one", "one.py", batch_size=1)
    slurmgpu("submit", cwd=folder, expect=0)
    return folder


@pytest.mark.parametrize(
    ("script", "batch_size"),
    [("one.py", 8), ("slice.py", 8), ("stream.py", 8), by_night("slice.py", 1), by_night("stream.py", 1)],
)
def test_the_bytes_are_the_same_in_every_mode_and_batch(slurmgpu, tmp_path, reference, script, batch_size):
    folder = make(tmp_path / "project", script, batch_size)
    slurmgpu("submit", cwd=folder, expect=0)
    assert datasets(folder) == datasets(reference)
    [error] = report(folder)["errors"]
    assert error["index"] == 6
    assert error["message"].partition("\n")[0] == f"{Path(sys.executable).name} exited with code 1: cannot read it"


@pytest.mark.parametrize("script", ["slice.py", "stream.py", by_night("one.py")])
def test_a_killed_worker_takes_the_process_along_and_changes_no_byte(tmp_path, reference, script):
    project = make(tmp_path / "project", script, executor="local")
    (project / "held").touch()
    run = start("submit", cwd=project)
    wait_until((project / "pids").exists, "the item that waits")
    pids = (project / "pids").read_text().split()
    assert not any(map(has_ended, pids))
    assert kill_workers(project)
    for pid in pids:
        wait_until(lambda pid=pid: has_ended(pid), "the end of the process and of what it started")
    (project / "held").unlink()
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert datasets(project) == datasets(reference)


@pytest.mark.parametrize("script", ["one.py", by_night("stream.py")])
def test_a_script_that_is_edited_runs_as_it_was_submitted(tmp_path, reference, script):
    project = make(tmp_path / "project", script, executor="local")
    (project / "shouting.py").write_text("def shout(text):\n    return text.upper()\n")
    source = (project / script).read_text().replace("text.upper()", "shout(text)")
    (project / script).write_text("from shouting import shout\n" + source)
    (project / "held").touch()
    run = start("submit", cwd=project)
    wait_until((project / "pids").exists, "the item that waits")
    [code] = (project / "run/code").glob("*.json")
    assert sorted(file["name"] for file in json.loads(code.read_text())["files"]) == sorted([script, "shouting.py"])
    (project / "shouting.py").write_text("not Python\n")
    assert kill_workers(project)
    (project / "held").unlink()
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert datasets(project) == datasets(reference)
    logs = "".join(path.read_text() for path in (project / "run/logs").glob("*.log"))
    assert f"{script} or a module that it imports has changed since submission" in logs


EDITED_AS_IT_STARTS = """
import json
from pathlib import Path

if not Path("edited").exists():
    Path("edited").touch()
    Path("words.py").write_text("WORD = FAIL")
import words

print(json.dumps({"shout": words.WORD}))
"""


AS_A_STREAM = """
import sys

print('{"ready": true}', flush=True)
for line in sys.stdin:
    print(json.dumps({"index": json.loads(line)["index"], "shout": words.WORD}), flush=True)
"""


@pytest.mark.parametrize(("edit", "stream"), [("WORD = 'late'", False), ("not Python", False), ("WORD = 'late'", True)])
def test_a_call_that_imports_what_was_edited_as_it_started_is_made_again(slurmgpu, tmp_path, edit, stream):
    run, columns = [sys.executable, "-S", "one.py", *["{text}"] * (not stream)], {"shout": "text"}
    more = {"stream": True} if stream else {}
    folder = make(tmp_path / "project", "one.py", run=run, columns=columns, texts=["a", "b"], **more)
    (folder / "words.py").write_text("WORD = 'first'\n")
    source = EDITED_AS_IT_STARTS.replace('"WORD = FAIL"', repr(edit))
    (folder / "one.py").write_text(source.partition("print")[0] + AS_A_STREAM if stream else source)
    slurmgpu("submit", cwd=folder, expect=0)
    with package.open(folder / "run" / "merged.h5") as merged:
        assert (merged.errors, merged["shout"][:]) == ({}, ["first", "first"])


EDITED_LATE = """
import json, sys, time
from pathlib import Path

if Path("words.py").read_text() == "WORD = 'first'":
    while sys.argv[1] == "late" and not Path("looked").exists():
        time.sleep(0.01)
    Path("words.py").write_text("WORD = 'edited'")
    while sys.argv[1] == "early":
        time.sleep(0.01)
import words

print(json.dumps({"shout": words.WORD}))
"""


@pytest.mark.parametrize(("when", "word"), [("early", "first"), ("late", "edited")])
def test_a_long_call_is_made_again_only_if_a_file_was_edited_as_it_started(tmp_path, monkeypatch, when, word):
    run = [sys.executable, "-S", "one.py", when, "{text}"]
    folder = make(tmp_path / "project", "one.py", run=run, columns={"shout": "text"}, texts=9 * ["a"])
    (folder / "one.py").write_text(EDITED_LATE)
    (folder / "words.py").write_text("WORD = 'first'")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(process, "START_S", 0.0)
    has_just_changed = PresentFiles.has_just_changed

    def look(present: PresentFiles) -> bool:
        if when == "early":
            wait_until(lambda: "edited" in Path("words.py").read_text(), "the edit")
        found = has_just_changed(present)
        Path("looked").touch()
        return found

    monkeypatch.setattr(PresentFiles, "has_just_changed", look)
    package.submit("slurmgpu.toml", gpus=0, executor="debug")
    with package.open("run/merged.h5") as merged:
        assert (merged.errors, merged["shout"][:]) == ({}, [word, *8 * ["first"]])
        [digest] = (file.stem for file in Path("run/code").glob("*.json"))
        assert merged.code.tolist() == [*8 * [digest if when == "early" else None], digest]


KEEPS = """
import json, os, signal, sys, time
from pathlib import Path

kept, n = Path(sys.argv[1] + ".kept"), 0
if kept.exists():
    n = int(kept.read_text())

def keep(signum, frame):
    with open("told", "a") as file:
        file.write("told ")
    time.sleep(1)
    kept.write_text(str(n))
    sys.exit(3)

signal.signal(signal.SIGTERM, keep)
began = n
while n < 6:
    n += 1
    while n == 3 and os.path.exists("held"):
        Path("pid").write_text(str(os.getpid()))
        time.sleep(0.02)
print(json.dumps({"n": n, "began": began}))
"""


DIRECT = (sys.executable, "-S", "one.py", "{text}")
BY_A_SHELL = ("sh", "-c", f'{sys.executable} -S one.py "$1"; exit $?', "sh", "{text}")


@pytest.mark.parametrize(("run", "to_all"), [(DIRECT, False), (DIRECT, True), (BY_A_SHELL, False)])
def test_a_script_that_resumes_has_time_to_keep_its_progress_and_is_told_once(slurmgpu, tmp_path, run, to_all):
    """Also if the signal goes to all processes of the job, as Slurm's does; and behind a shell, which ends at once."""
    columns = {"n": "int32", "began": "int32"}
    more = {"batch_size": 1, "executor": "local", "texts": ["a"], "resumes": True}
    folder = make(tmp_path / "project", "one.py", run=[*run], columns=columns, **more)
    (folder / "one.py").write_text(KEEPS)
    (folder / "held").touch()
    process = start("submit", cwd=folder)
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), "the item that waits")
    [task] = [record["pid"] for record in records(folder)]
    for pid in [int((folder / "pid").read_text()), *(pid for pid, _ in workers(folder))] if to_all else []:
        os.kill(pid, signal.SIGTERM)
    os.kill(task, signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    [record] = records(folder)
    left = "stopped by SIGTERM; shard 0 was given back, with its progress kept"
    assert (record["failure"], record["message"], record["n_errors"]) == ("preempted", left, 0), output
    (folder / "held").unlink()
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    with package.open(folder / "run" / "merged.h5") as merged:
        assert (merged.errors, merged["n"][:], merged["began"][:]) == ({}, [6], [3])
    assert (folder / "told").read_text() == "told "


def test_a_script_that_resumes_is_called_for_one_item(tmp_path, slurmgpu):
    folder = make(tmp_path / "project", "slice.py", resumes=True)
    said = slurmgpu("submit", cwd=folder, expect=2).stderr
    assert "resumes = true, and a call is for a slice" in said


def test_a_script_whose_first_line_was_mended_runs_so_from_the_next_submission_on(slurmgpu, tmp_path):
    folder = make(tmp_path / "project", "one.py", run=["./one.py", "{text}"], texts=["a", "b"])
    script = folder / "one.py"
    source = script.read_text()
    script.write_text(f"#!{tmp_path}/none/python\n{source}")
    script.chmod(0o755)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "none" / "python").chmod(0o755)
    slurmgpu("submit", cwd=folder)
    script.write_text(f"#!{sys.executable}\n{source}")
    told = slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0).stderr
    assert "one.py differs" in told
    assert told.index("2 failed items are recomputed, in 1 shard;") < told.index("item 0 | looking at a")
    assert len(list((folder / "run" / "code").glob("*.json"))) == 2
    with package.open(folder / "run" / "merged.h5") as merged:
        assert (merged.errors, merged["shout"][:]) == ({}, ["A", "B"])


def test_a_package_that_a_script_finds_on_its_path_is_as_it_was_submitted(slurmgpu, tmp_path):
    """As a package that is installed editable, or on PYTHONPATH, and a script in a folder of its own."""
    run, columns = [sys.executable, "scripts/run.py", "{text}"], {"n": "int32"}
    folder = make(tmp_path / "project", "one.py", run=run, columns=columns, env={"PYTHONPATH": "src"}, texts=["a"])
    (folder / "scripts").mkdir()
    (folder / "src" / "of_project").mkdir(parents=True)
    (folder / "scripts" / "run.py").write_text("from of_project.core import number\nprint('{\"n\": %d}' % number())\n")
    (folder / "src" / "of_project" / "__init__.py").touch()
    core = folder / "src" / "of_project" / "core.py"
    core.write_text(
        "from pathlib import Path\ndef number(): return int((Path(__file__).parent / 'data.txt').read_text())\n"
    )
    (core.parent / "data.txt").write_text("1")
    slurmgpu("submit", cwd=folder, expect=0)
    [code] = (folder / "run" / "code").glob("*.json")
    assert [file["name"] for file in json.loads(code.read_text())["read"]] == ["src/of_project/data.txt"]
    core.write_text("def number(): return 2\n")
    for path in ((folder / "run" / "merged.h5"), folder / "run" / "shards" / "00000.h5"):
        path.unlink()
    slurmgpu("resubmit", "run", "--code", "former", cwd=folder, expect=0)
    with package.open(folder / "run" / "merged.h5") as merged:
        assert merged["n"][:] == [1]
        assert merged.code.tolist() == [code.stem]


def test_a_file_that_each_call_writes_by_the_same_name_is_told(slurmgpu, tmp_path):
    writes = """
import json, pathlib, sys
pathlib.Path("own", sys.argv[1] + ".json").parent.mkdir(exist_ok=True)
open(pathlib.Path("own") / f"{sys.argv[1]}.json", "w")
open("log.txt", "a").write("as in read.me")
with open("out.json", "w", encoding="utf-8") as file:
    json.dump({"n": "a.b"}, file)
(pathlib.Path("plots.d") / "curve.csv").touch()
"""
    folder = make(tmp_path / "project", "one.py", texts=["a", "b"])
    (folder / "plots.d").mkdir()
    (folder / "one.py").write_text((folder / "one.py").read_text() + writes)
    said = slurmgpu("submit", cwd=folder, expect=0).stderr
    assert (
        "one.py writes out.json, plots.d/curve.csv under the same name in each call, so calls that run at the same time"
        in said
    )


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("./one.sh $1", ["one.sh writes gc.tsv", "one.py writes gc.tsv"]),
        (
            "./one.sh $1 > last.txt",
            ["the code after -c writes last.txt", "one.sh writes gc.tsv", "one.py writes gc.tsv"],
        ),
        ('awk \'$2 > low.p {{print "1"}}\' "$1" >> all.txt 2> "$1.log"', []),
        ("cd $(mktemp -d) && ls > files.txt", []),
    ],
)
def test_a_file_that_a_script_of_a_shell_writes_in_each_call_is_told_before_a_run_is_queued(
    slurmgpu, tmp_path, code, told
):
    folder = make(tmp_path / "project", "one.py", run=["bash", "-c", code, "bash", "{text}"], texts=["a"])
    (folder / "one.py").write_text('open("gc.tsv", "w")\n')
    (folder / "one.sh").write_text('#!/bin/bash\npython one.py > "$1.txt"\ncut -f 2 "$1.txt" > gc.tsv\n')
    said = json.loads(slurmgpu("submit", "--dry-run", "--json", cwd=folder, expect=0).stdout)["notes"]
    found = [note.partition(" under the same name in each call")[0] for note in said if " under the same name" in note]
    assert found == told


GC = {
    "one.py": 'open("gc.tsv", "w")\nparser.add_argument("--output_dir", default="out")\n',
    "slice.py": 'subprocess.run([sys.executable, "-S", "one.py", "--output_dir", "x"], cwd=folder)\n',
    "alone.sh": '#!/bin/bash\nhere=$PWD; cd "$(mktemp -d)"\nbash "$here/gc.sh" "$1"\npython "$here/one.py"\n',
    "gc.sh": "#!/bin/bash\nwc -c $1 > gc.tsv\n",
}


@pytest.mark.parametrize(
    "run",
    [
        [sys.executable, "slice.py", "one.py", "{text}"],
        [sys.executable, "slice.py", "{text}"],
        ["bash", "alone.sh", "{text}"],
        [sys.executable, "slice.py", "gc.sh", "{text}"],
    ],
)
def test_of_a_script_that_another_starts_in_a_folder_of_its_own_no_file_is_told(tmp_path, run):
    folder = make(tmp_path / "project", "one.py", run=run, texts=["a"])
    for name, text in GC.items():
        (folder / name).write_text(text)
    assert told_at_planning(folder, "overwrite each other's files") == []


def told_at_planning(folder, words):
    """The sentences on the code that have these words."""
    with draft_run(folder / "slurmgpu.toml") as draft:
        return [each for each in draft.code.left_out if words in each]


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (["./one.sh", "{text}"], ["one.sh"]),
        (["bash", "-c", "./one.sh $1", "bash", "{text}"], ["one.sh"]),
        (["env", "SLURM_ARRAY_TASK_ID={text}", "./one.sh"], []),
        (["bash", "-c", "SLURM_ARRAY_TASK_ID=$1 ./one.sh", "bash", "{text}"], []),
        ([sys.executable, "one.py", "{text}"], ["one.py"]),
        ([sys.executable, "two.py", "{text}"], []),
        (["bash", "two.sh", "{text}"], []),
    ],
)
def test_a_script_that_takes_the_number_of_its_array_task_for_that_of_an_item_is_told(tmp_path, run, told):
    folder = make(tmp_path / "project", "one.py", run=run, texts=["a"])
    (folder / "one.py").write_text('import os\nprint(os.environ["SLURM_ARRAY_TASK_ID"])\n')
    (folder / "one.sh").write_text("#!/bin/bash\n#SBATCH --array=0-9\necho $SLURM_ARRAY_TASK_ID\n")
    (folder / "two.py").write_text('"""Was of an array, by SLURM_ARRAY_TASK_ID."""\n')
    (folder / "two.sh").write_text("./sim $1  # was $SLURM_ARRAY_TASK_ID\n")
    (folder / "one.sh").chmod(0o700)
    found = told_at_planning(folder, "SLURM_ARRAY_TASK_ID")
    assert [each.partition(" reads")[0] for each in found] == told


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (["env", "A=b", "srun", "-n", "4", "./one.sh", "{text}"], ["The command", "one.sh"]),
        (["bash", "-c", "srun --overlap -n 4 ./two.sh $1", "bash", "{text}"], []),
        (["bash", "one.sh", "{text}"], ["one.sh"]),
        (["bash", "two.sh", "{text}"], []),
        (["bash", "three.sh", "{text}"], []),
        (["bash", "-c", "SLURM_OVERLAP=1 srun ./sim $1", "bash", "{text}"], []),
        (["bash", "-c", "n=`srun ./sim $1`", "bash", "{text}"], ["the code after -c"]),
        ([sys.executable, "one.py", "{text}"], ["one.py"]),
        ([sys.executable, "two.py", "{text}"], []),
    ],
)
def test_a_step_that_would_wait_for_its_own_task_is_told(tmp_path, run, told):
    folder = make(tmp_path / "project", "one.py", run=run, texts=["a"])
    (folder / "one.sh").write_text("#!/bin/bash\nsrun ./sim $1\n")
    (folder / "two.sh").write_text("#!/bin/bash\n# srun is not called\nsrun --overlap ./sim $1\n")
    (folder / "three.sh").write_text("#!/bin/bash\n# Start with srun -n 4 ./three.sh\n./sim $1\n")
    (folder / "one.py").write_text('import os\nos.system("srun ./sim")\n')
    (folder / "two.py").write_text('"""Train.\n\nLaunch with srun python two.py\n"""\n# or: srun ./two.py\n')
    found = told_at_planning(folder, " calls srun")
    assert [each.partition(" calls srun")[0] for each in found] == ([", ".join(told)] if told else [])


def test_a_script_that_the_code_of_a_shell_starts_is_named_and_rows_after_its_edit_are_by_unknown_code(
    slurmgpu, tmp_path
):
    run = ["bash", "-c", f'test -f none || {sys.executable} -S one.py "$1"', "bash", "{text}"]
    texts = ["a", "b", "edit"]
    folder = make(tmp_path / "project", "one.py", run=run, columns={"n": "int32"}, texts=texts)
    (folder / "one.py").write_text(EDITS_ITSELF)
    said = slurmgpu("submit", "-s", "shard_items=1", cwd=folder, expect=0)
    before = said.stderr.partition("item 0 | looking")[0]
    assert "Tasks read these files when they run, not as they are now: one.py." in before
    assert "1 by unknown code" in said.stdout


EDITS_ITSELF = """
import sys
if sys.argv[1] == "edit":
    open(sys.argv[0], "a").write("# edited")
print("looking", file=sys.stderr)
print(1)
"""


@pytest.mark.parametrize(
    ("run", "line", "env", "place"),
    [
        (RUN["one.py"], 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = str(3)\n', {}, "one.py in line 2"),
        (["env", "CUDA_VISIBLE_DEVICES=1", *RUN["one.py"]], "", {}, "CUDA_VISIBLE_DEVICES=1"),
        (RUN["one.py"], "", {"CUDA_VISIBLE_DEVICES": "0"}, "env under [settings]"),
        (
            ["bash", "-c", "CUDA_VISIBLE_DEVICES=$2 python -S one.py $1", "bash", "{text}", "0"],
            "",
            {},
            "code after -c",
        ),
        (RUN["one.py"], 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\n', {}, None),
        (["bash", "-c", "CUDA_VISIBLE_DEVICES= python -S one.py $1", "bash", "{text}"], "", {}, None),
    ],
)
def test_what_chooses_gpus_itself_is_told(tmp_path, run, line, env, place):
    folder = make(tmp_path / "project", "one.py", run=run, env=env, texts=["a"])
    (folder / "one.py").write_text(line + (folder / "one.py").read_text())
    told = told_at_planning(folder, "CUDA_VISIBLE_DEVICES")
    assert len(told) == (place is not None)
    assert place is None or place in told[0]


@pytest.mark.parametrize(
    ("line", "options", "told"),
    [
        ("TrainingArguments('out')", [], "one.py writes into out"),
        ("Trainer(default_root_dir='logs', devices=1)", [], "one.py writes into logs"),
        (
            "parser.add_argument('--output-dir', default='out')",
            [],
            "one.py writes into out (--output_dir)",
        ),
        ("parser.add_argument('--out', default='out')", [], "one.py writes into out (--out)"),
        ("parser.add_argument('--out', default='out')", ["--out", "fits/{text}"], None),
        ("parser.add_argument('--model', default='gpt2')\nos.makedirs(os.path.join(a.out, a.model))", [], None),
        ("parser.add_argument('--output-dir', default='out')", ["--output-dir=fits/{text}"], None),
        ("parser.add_argument('--output-dir', default='out')", ["--output-dir", "fits/{text}"], None),
        ("TrainingArguments(output_dir=arguments.output_dir)", [], None),
    ],
)
def test_a_folder_into_which_each_call_writes_is_told_unless_an_option_says_another(tmp_path, line, options, told):
    folder = make(tmp_path / "project", "one.py", run=[*RUN["one.py"], *options], texts=["a"])
    with open(folder / "one.py", "a") as script:
        script.write(f"{line}\n")
    found = told_at_planning(folder, "unless the files' names differ")
    assert [each.partition(" in each")[0] for each in found] == ([told] if told else [])
    assert not told_at_planning(folder, "under the same name")


def test_a_launcher_in_the_project_hides_no_output_of_the_script_that_it_starts(tmp_path):
    run = [".venv/bin/torchrun", *RUN["one.py"][1:]]
    folder = make(tmp_path / "project", "one.py", run=run, texts=["a"])
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / run[0]).write_text("#!/usr/bin/python3\nfrom torch.distributed.run import main\nmain()\n")
    (folder / run[0]).chmod(0o755)
    with open(folder / "one.py", "a") as script:
        script.write("TrainingArguments('out')\n")
    [told] = told_at_planning(folder, "one.py writes into out in each call")
    assert "own working folder" in told


def test_a_file_that_a_function_of_the_script_puts_into_a_folder_is_not_told_as_the_same_in_each_call(tmp_path):
    writes = """
def save_checkpoint(name):
    torch.save(model, os.path.join(arguments.output_dir, name))
class Trainer:
    def save_best(self, name):
        self.model.save(self.folder / name)
save_checkpoint("model.pkl")
Trainer().save_best("best.pt")
torch.save(model, "last.pt")
"""
    folder = make(tmp_path / "project", "one.py", texts=["a"])
    (folder / "one.py").write_text((folder / "one.py").read_text() + writes)
    [told] = told_at_planning(folder, "under the same name")
    assert told.startswith("one.py writes last.pt under")


READS = """
import sys
factor = open("conf.yaml").read()
if sys.argv[1] == "edit":
    with open("conf" + ".yaml", "w") as file:
        file.write("2")
print('{"n": %s}' % factor)
"""


def test_rows_of_calls_that_may_have_read_an_edited_configuration_are_by_unknown_code(slurmgpu, tmp_path):
    run, texts = [sys.executable, "run.py", "{text}"], 8 * ["a"] + ["edit"]
    folder = make(tmp_path / "project", "one.py", run=run, columns={"n": "int32"}, texts=texts)
    (folder / "run.py").write_text(READS)
    (folder / "conf.yaml").write_text("1")
    said = slurmgpu("submit", cwd=folder, expect=0)
    assert "Tasks read these files when they run, not as they are now: conf.yaml." in said.stderr
    [code] = (folder / "run" / "code").glob("*.json")
    assert f"code: 8 rows by {code.stem[:4]}, 1 by unknown code" in said.stdout


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("sys.path.insert(0, 'lib')", True),
        ("sys.path.append('lib')", False),
        ("sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'lib'))", False),
        ("sys.path.insert(0, str(Path(__file__).parent.parent / 'lib'))", False),
        ("sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))", False),
        ("env PYTHONPATH=lib", True),
    ],
)
def test_a_folder_that_a_script_puts_on_its_path_is_searched(tmp_path, line, first):
    """A folder of the working folder that is the first has no copies: modules of it are told."""
    env = line.split() if line.startswith("env ") else []
    folder = make(tmp_path / "project", "one.py", run=[*env, sys.executable, "bin/run.py", "{text}"], texts=["a"])
    for name in ("bin", "lib"):
        (folder / name).mkdir()
    (folder / "lib" / "of_lib.py").touch()
    (folder / "bin" / "run.py").write_text(f"{'' if env else line}\nimport of_lib\n")
    with draft_run(folder / "slurmgpu.toml") as draft:
        assert [file.name for file in draft.code.files] == ["bin/run.py", "lib/of_lib.py"]
        assert [file.name for file in draft.code.read] == ["lib/of_lib.py"] * first


@pytest.mark.parametrize(
    ("line", "kept", "read"),
    [
        ('exec PYTHON "$(dirname "$0")/one.py" "$1"', ["one.py", "run.sh", "words.py"], ["conf.yaml"]),
        ('HERE=.\nPYTHON ${HERE}/one.py "$1"', ["one.py", "run.sh", "words.py"], ["conf.yaml"]),
        ('cd "$(dirname "$0")"\n PYTHON one.py "$1"', ["one.py", "run.sh", "words.py"], ["conf.yaml"]),
        ('# other.py\nPYTHON one.py "$1" --set=conf.yaml >made.json', ["run.sh"], ["conf.yaml", "one.py", "words.py"]),
        ('PYTHON -m one "$1"', ["run.sh"], ["conf.yaml", "one.py", "words.py"]),
        (
            'LAST=last.json\nPYTHON -m one --out $LAST "$1"|tee made.json\ncat made.json',
            ["run.sh"],
            ["conf.yaml", "one.py", "words.py"],
        ),
    ],
)
def test_what_a_script_of_a_shell_starts_is_code_of_the_run_or_told(tmp_path, line, kept, read):
    options = ["--log-file=last.json", "--output", "made.json"]
    folder = make(tmp_path / "project", "one.py", run=["sh", "run.sh", "{text}", *options], texts=["a"])
    (folder / "run.sh").write_text(line.replace("PYTHON", sys.executable) + "\n")
    for name in ("other.py", "made.json", "last.json", "conf.yaml"):
        (folder / name).touch()
    (folder / "words.py").write_text("CONF = 'conf.yaml'\n")
    (folder / "one.py").write_text("import words\n" + (folder / "one.py").read_text())
    with draft_run(folder / "slurmgpu.toml") as draft:
        assert [file.name for file in draft.code.files] == kept
        assert [file.name for file in draft.code.read] == read


def test_a_module_that_python_runs_by_name_is_code_of_the_run(slurmgpu, tmp_path):
    run = [sys.executable, "-S", "-m", "tool.one", "{text}"]
    folder = make(tmp_path / "project", "one.py", run=run, texts=["a", "bad"])
    (folder / "tool").mkdir()
    (folder / "one.py").rename(folder / "tool" / "one.py")
    source = (folder / "tool" / "one.py").read_text()
    (folder / "tool" / "one.py").write_text("from .words import BAD\n" + source.replace('"bad"', "BAD"))
    (folder / "tool" / "words.py").write_text("BAD = 'bad'\n")
    slurmgpu("submit", cwd=folder, expect=0)
    (folder / "tool" / "words.py").write_text("BAD = 'worse'\n")
    assert "tool/words.py differs" in slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0).stderr
    with package.open(folder / "run" / "merged.h5") as merged:
        assert (merged.errors, merged["shout"][:]) == ({}, ["A", "BAD"])


def test_a_script_elsewhere_and_what_it_imports_are_code_of_the_run(tmp_path):
    (tmp_path / "lab").mkdir()
    folder = make(tmp_path / "lab" / "trial", "one.py", run=[sys.executable, "-S", "../src/one.py", "{text}"])
    source = tmp_path / "lab" / "src"
    source.mkdir()
    (source / "one.py").write_text("import words\n" + (folder / "one.py").read_text())
    (source / "words.py").touch()
    with draft_run(folder / "slurmgpu.toml") as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
        snapshots.write(run.folder, draft.code)
        assert [file.name for file in draft.code.files] == ["src/one.py", "src/words.py"]
        (tmp_path / "lab" / "configs").mkdir()
        with importer.using(run.folder, draft.code.digest):
            assert importer.present_files().as_submitted(source / "one.py") == source / "one.py"
            (source / "words.py").write_text("WORD = 1\n")
            copy = importer.present_files().as_submitted(source / "one.py")
    assert copy == run.folder / "code" / draft.code.digest / "src" / "one.py"
    assert (copy.parents[1] / "configs").samefile(tmp_path / "lab" / "configs")
    assert not (copy.parents[1] / "trial").exists()  # the run directory is below it
    run = [sys.executable, os.__file__, "{text}"]
    with draft_run(make(tmp_path / "other", "one.py", run=run) / "slurmgpu.toml") as draft:
        assert draft.code.files == ()  # of Python itself


def test_a_script_and_a_package_of_its_name_are_both_in_the_snapshot(slurmgpu, tmp_path):
    folder = make(tmp_path / "project", "one.py", run=["./tool", "{text}"], texts=["a"])
    (folder / "one.py").rename(folder / "tool")
    library = tmp_path / "library" / "tool"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    source = (folder / "tool").read_text()
    (folder / "tool").write_text(f"#!{sys.executable}\nimport tool\n{source}")
    (folder / "tool").chmod(0o755)
    slurmgpu("submit", cwd=folder, expect=0, PYTHONPATH=str(library.parent))
    [code] = (folder / "run" / "code").glob("*.json")
    names = [file["name"] for file in json.loads(code.read_text())["files"]]
    assert sorted(names) == ["2/tool/__init__.py", "tool"]


def test_a_killed_task_leaves_no_process(tmp_path):
    project = make(tmp_path / "project", "stream.py", texts=["held", "b"], executor="local")
    (project / "held").touch()
    run = start("submit", cwd=project)
    wait_until((project / "pids").exists, "the item that waits")
    try:
        [task] = [record["pid"] for record in records(project)]
        pids = (project / "pids").read_text().split()
        [worker] = workers(project)
        os.kill(task, signal.SIGKILL)
        for pid in (worker[0], *pids):
            wait_until(lambda pid=pid: has_ended(pid), "the end of worker, process, and what that started")
    finally:
        (project / "held").unlink()
        run.communicate(timeout=200)


@pytest.mark.parametrize("script", ["slice.py", "stream.py", by_night("one.py")])
def test_an_item_that_kills_its_process_costs_itself_alone_and_a_busy_one_nothing(slurmgpu, tmp_path, script):
    texts = ["busy", "a", "b", "deadly", "c", "d"]
    project = make(tmp_path / "project", script, texts=texts, executor="local")
    slurmgpu("submit", cwd=project, expect=0)
    outcome = report(project)
    assert [(error["index"], error["class"]) for error in outcome["errors"]] == [(3, "crash")]
    assert "died by SIGSEGV" in outcome["errors"][0]["message"]
    assert outcome["worker_deaths"] == {}
    assert sum(attempt["n_retried"] for attempt in outcome["attempts"]) == (1 if script == "one.py" else 4)


def test_a_program_that_always_fails_ends_the_task(slurmgpu, tmp_path):
    project = make(tmp_path / "project", "slice.py", texts=["bad"] * 20)
    slurmgpu("submit", cwd=project, expect=3)
    [attempt] = report(project)["attempts"]
    assert attempt["failure"] == "workload_error"
    assert "exited with code 1: cannot read it" in attempt["message"]


def test_a_program_that_fails_for_the_first_items_is_not_started_for_all(slurmgpu, tmp_path):
    given = {"executor": "local", "columns": {"other": "int32"}, "run": ["sh", "one.sh", "{text}"]}
    project = make(tmp_path / "project", "one.py", batch_size=1, texts=["a"] * 110, **given)
    (project / "one.sh").write_text("""echo '{"n": 1, "shout": "A"}'\n""")  # a Python's start takes 40 ms
    file = project / "slurmgpu.toml"
    file.write_text(file.read_text().replace("shard_items = 8", "shard_items = 1"))
    slurmgpu("submit", cwd=project, expect=3)
    [attempt] = report(project)["attempts"]
    assert (attempt["failure"], attempt["n_shards"]) == ("workload_error", 0)
    assert "column 'other' is missing" in attempt["message"]
    assert not list((project / "run" / "claims").iterdir())
    log = (project / "run" / "logs" / "local1_0.0.log").read_text()
    assert log.count(": item_error: ") == 100


@pytest.fixture(scope="module")
def printed(tmp_path_factory, slurmgpu):
    """A run of slices by a worker, whose program prints a line for each item."""
    folder = make(tmp_path_factory.mktemp("printed") / "project", "slice.py", executor="local")
    slurmgpu("submit", cwd=folder, expect=0)
    return folder / "run"


def test_logs_show_what_was_printed_for_an_item(slurmgpu, printed):
    found = slurmgpu("logs", printed, "--item", "9", expect=0).stdout
    assert "items 8..11 | looking at item 9\n" in found
    failed = slurmgpu("logs", printed, "--item", "6", expect=0).stdout
    assert "item 6 | looking at bad\n" in failed
    assert "item 6 | cannot read it\n" in failed
    assert re.search("item 6: item_error: .* exited with code 1: cannot read it\n", failed)


def test_logs_show_what_was_printed_for_a_part_of_a_batch(slurmgpu, tmp_path, printed):
    copy_run(printed, tmp_path / "run")
    [path] = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"8..11 | " in path.read_bytes()]
    noise = b"items 10..11 | noise\n" * 1000
    text = path.read_bytes().replace(b"items 8..11 | looking at item 9\n", noise + b"items 8..9 | looking\n" + noise)
    path.write_bytes(text)
    assert "items 8..9 | looking\n" in slurmgpu("logs", "run", "--item", "9", cwd=tmp_path, expect=0).stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run": ["cat", "{txet}"]}, "takes the field 'txet', which the input"),
        ({"run": ["cat", "{index}"]}, "The number of an item is $SLURMGPU_INDEX, or {start}"),
        ({"run": ["sh", "-c", "cat ${HOME}", "sh", "{text}"]}, "If the braces are the program's own, write ${{HOME}}."),
        ({"run": ["cat", "{text}"], "env": {"XX": 1}}, """As text: XX = "1", on the command line -s 'env.XX="1"'."""),
        ({"run": ["no-such-program", "{text}"]}, "there is no program 'no-such-program' on the PATH"),
        ({"run": ["cat", "{text}", "{in}"]}, "Use one or the other"),
        ({"run": []}, "run is empty"),
        ({"run": "cat {text}"}, "setting 'run' should be a valid array"),
        ({"columns": {"n": "int23"}}, "the column 'n' has the type 'int23': 'int23' is not a NumPy dtype"),
        ({"columns": {}}, "columns is empty"),
        ({"time_out": 3}, "has no setting 'time_out'. Did you mean 'timeout_s'?"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(slurmgpu, tmp_path, settings, said):
    project = make(tmp_path / "project", "slice.py", **settings)
    done = slurmgpu("submit", cwd=project, expect=2)
    assert said in done.stderr
    assert not (project / "run").exists()


@pytest.mark.parametrize(("to", "is_told"), [("feats/{key}.npy", True), ("{name}.npy", False)])
def test_files_of_one_key_are_told_to_who_names_outputs_by_it(slurmgpu, tmp_path, to, is_told):
    for name in ("a/1.wav", "a/2.wav", "b/2.wav"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    words = ["--each", "a", "--each", "b", "--col", "n:int32", "--gpus", "0", "--executor", "debug"]
    done = slurmgpu("run", *words, "--", "bash", "-c", 'echo "$1" > "$2"; echo 1', "bash", "{path}", to, cwd=tmp_path)
    told = " ".join(done.stderr.split())
    assert is_told == (
        "2 share their key with another, such as '2': what calls write under {key} is overwritten" in told
    )


def test_a_program_that_setup_may_bring_is_left_to_the_tasks(tmp_path):
    project = make(tmp_path / "project", "one.py", run=["whisper-of-a-module", "{text}"], executor="slurm")
    with pytest.raises(SlurmGPUError, match="no program 'whisper-of-a-module'"), draft_run(project / "slurmgpu.toml"):
        pass
    with open(project / "slurmgpu.toml", "a") as file:
        file.write('[slurm]\nsetup = ["module load whisper"]\n')
    with draft_run(project / "slurmgpu.toml") as draft:
        assert draft.notes[-1].endswith("[slurm] setup may provide it, so the tasks check again.")
    with pytest.raises(SlurmGPUError), draft_run(project / "slurmgpu.toml", {"resources": {"executor": "local"}}):
        pass


def test_without_columns_a_sentence_says_so(slurmgpu, tmp_path):
    project = make(tmp_path / "project", "slice.py")
    path = project / "slurmgpu.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("columns")))
    assert "needs the setting 'columns'" in slurmgpu("submit", cwd=project, expect=2).stderr


def test_a_script_elsewhere_is_bound_into_the_image(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = elsewhere / "score.py"
    script.touch()
    project = make(tmp_path / "project", "slice.py", run=[sys.executable, str(script), "{in}", "{out}"])
    with draft_run(project / "slurmgpu.toml") as draft:
        run = create_run(draft.run_dir, draft.plan, draft.items.files)
    assert {str(script), str(project)} <= {bind.src for bind in container_binds(run)}


def test_a_link_into_a_folder_that_may_not_be_entered_is_not_bound(monkeypatch):
    with locked_folder() as locked:
        files = locked.parent / "files"
        files.mkdir()
        (files / "mine").touch()
        for name, target in (("readable", files / "mine"), ("closed", locked / "file")):
            (files / name).symlink_to(target)
        run = [sys.executable, "slice.py", "{in}", "{out}", str(files)]
        project = make(locked.parent / "project", "slice.py", run=run)
        with draft_run(project / "slurmgpu.toml") as draft:
            created = create_run(draft.run_dir, draft.plan, draft.items.files)
        with unprivileged():
            bound = {bind.src for bind in container_binds(created)}
            monkeypatch.chdir(locked.parent)
            assert complete_folder("") == ["files/", "locked/", "project/"]
            assert complete_folder("locked/") == []
        assert not any(path.startswith(str(locked)) for path in bound)


# slurmgpu run


def options(project):
    return ["--each", "items.jsonl", "--col", "n:int32", "--col", "shout:text", "--executor", "debug", "--gpus", "0"]


def test_run_submits_a_command_without_a_run_file(slurmgpu, tmp_path, reference):
    project = make(tmp_path / "project", "one.py")
    (project / "slurmgpu.toml").unlink()
    slurmgpu("run", *options(project), "--run-dir", "run", "--", *RUN["one.py"], cwd=project, expect=0)
    assert datasets(project) == datasets(reference)


def test_run_plans_what_the_run_file_that_it_prints_does(slurmgpu, tmp_path):
    project = make(tmp_path / "project", "slice.py")
    more = ["--batch-size", "4", "--set", "timeout_s=60", "--slurm", "mem=2G", "--tasks", "2"]
    given = ["run", *options(project), *more, "--dry-run"]
    shown = slurmgpu(*given, "--", *RUN["slice.py"], cwd=project, expect=0).stdout
    text = shown.partition("\nrun  ")[0]
    (project / "printed.toml").write_text(text)
    planned = json.loads(slurmgpu(*given, "--json", "--", *RUN["slice.py"], cwd=project, expect=0).stdout)
    printed = json.loads(slurmgpu("submit", "printed.toml", "--dry-run", "--json", cwd=project, expect=0).stdout)
    for value in (planned, printed):
        assert value["plan"]["provenance"].pop("run_file")
        del value["plan"]["provenance"]["written"]  # of a file alone
    assert planned["plan"] == printed["plan"]
    assert planned["run_dir"] == printed["run_dir"] == str(project / "runs" / "slice")
    assert planned["submission"] == printed["submission"]


def test_a_run_file_is_printed_with_whatever_its_texts_hold(tmp_path):
    odd = ["x", "\"'\n\t\\ ä \U0001f600 \x7f\x1b", "{a}"]
    tables = whole_run_file(["a.jsonl", "b.jsonl"], ["n:int32", "a b:text"], odd, {"slurm": ["mem=2G"]})
    (tmp_path / "a.toml").write_text(as_toml(tables), encoding="utf-8")
    assert read_toml(tmp_path / "a.toml") == tables


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--col", "n:int32", "wc", "{text}", "--json"], "-- is missing between the options and the program"),
        (["--col", "n:int32", "--"], "run is empty"),
        (["--col", "n", "--", "wc", "{text}"], "--col 'n' is not of the form NAME:TYPE"),
        (["--col", "n:text", "--col", "n:int32", "--", "wc", "{text}"], "--col names the column 'n' twice"),
        (
            ["--", "wc", "{text}"],
            "--col NAME:TYPE is missing: give one for each key to keep from what the program prints",
        ),
        (
            ["--col", "n:str", "--", "wc", "{text}"],
            "the column 'n' has the type 'str'; for such values use 'text'",
        ),
        (
            ["--each", "images/1.png", "images/2.png", "images/3.png", "--col", "n:int32", "--", "wc", "{path}"],
            "2 words before -- belong to no option, such as 'images/2.png'. If the shell has expanded a glob, quote "
            "it: --each 'images/*.png'",
        ),
        (
            ["--col", "n:int32", "-s", "values.text=a", "--", "wc", "{text}", "{in}", "{out}"],
            "command has a value 'text' in [settings], but the input",
        ),
        (["--col", "n:int32", "--keep", "idd", "--", "wc", "{text}"], "keep takes the field 'idd'"),
        (["--col", "n:int32", "--", "wc", "{txet}"], "takes the field 'txet'"),
        (
            ["--col", "n:int32", "--", "cp", "{input}", "{output}"],
            "a call reads its items from is {in:jsonl}.",
        ),
    ],
)
def test_run_says_what_is_wrong(slurmgpu, tmp_path, argv, said):
    project = make(tmp_path / "project", "one.py")
    done = slurmgpu("run", "--each", "items.jsonl", "--executor", "debug", "--gpus", "0", *argv, cwd=project, expect=2)
    assert said in done.stderr


def test_run_takes_a_grid_in_place_of_an_input(slurmgpu, tmp_path):
    grid = "-s", "sweep.lr=[0.1, 0.01]", "-s", "sweep.seed=[0, 1]", "--keep", "lr,seed", "--col", "n:float32"
    slurmgpu(
        "run",
        *grid,
        "--executor",
        "debug",
        "--gpus",
        "0",
        "--",
        "bash",
        "-c",
        'echo "$1"',
        "bash",
        "{lr}{seed}",
        cwd=tmp_path,
    )
    rows = slurmgpu("export", "runs/bash", "-o", "-", "--format", "csv", cwd=tmp_path).stdout.split()
    assert rows[1:] == ["0,0.1,0.1,0,", "1,0.11,0.1,1,", "2,0.01,0.01,0,", "3,0.011,0.01,1,"]


def test_run_says_how_a_sweep_goes_with_an_input_and_which_of_its_keys_the_program_does_not_get(slurmgpu, tmp_path):
    (tmp_path / "a.txt").write_text("a\nbb\n")
    start = "run", "--col", "n:float32", "--gpus", "0", "--executor", "debug", "--dry-run", "-s", "sweep.lr=[0.1, 0.01]"
    beside = slurmgpu(*start, "--each", "a.txt", "--", "expr", "{text}", "{lr}", cwd=tmp_path, expect=2).stderr
    assert "to make a run for each value of {lr}, write -s 'sweep.values.lr=[…]'" in beside
    (tmp_path / "b.jsonl").write_text('{"seed": 1}\n')  # a field of the items, and the run's seed, which is varied
    seeds = *start[:-1], "sweep.seed=[0, 1]", "--each", "b.jsonl"
    assert "lr" not in slurmgpu(*seeds, "--", "echo", "{seed}", cwd=tmp_path, expect=0).stderr
    alone = slurmgpu(*start, "--", "echo", "{lr}", "{text}", cwd=tmp_path, expect=2).stderr
    assert "'text', which [sweep] lacks. Known: lr. Add it to [sweep], or name an input whose items have it." in alone
    unused = *start, "-s", "sweep.wd=[0, 1]"
    told = slurmgpu(*unused, "--", "echo", "{lr}", cwd=tmp_path, expect=0).stderr
    assert "sweep.wd is in no argument of the program, so each of its values repeats the same call" in told
    for program in (["echo", "{lr}", "{wd:file}"], ["cp", "{in:jsonl}", "{out}"]):
        assert "is in no argument" not in slurmgpu(*unused, "--", *program, cwd=tmp_path, expect=0).stderr


def test_rows_of_an_earlier_run_are_taken_by_their_index_which_lines_of_items_have_for_their_own(slurmgpu, tmp_path):
    (tmp_path / "a.txt").write_text("a\nbb\nccc\n")
    copies = "--col", "n:int32", "--gpus", "0", "--executor", "debug", "--run-dir"
    slurmgpu(
        "run", "--each", "a.txt", *copies, "runs/a", "--", "bash", "-c", "echo ${{#1}}", "bash", "{text}", cwd=tmp_path
    )
    code = ["sed", "-n", "w {out}", "{in:jsonl}"]  # each line as it is
    again = "run", "--each", "runs/a/merged.h5", "--items", "1:3", *copies, "runs/b"
    done = slurmgpu(*again, "--", *code, cwd=tmp_path, expect=2)
    assert "merged.h5 has a field 'index', a name that {in:jsonl} reserves." in done.stderr
    assert not (tmp_path / "runs/b").exists()
    slurmgpu(*again, "--set", "match=index", "--", *code, cwd=tmp_path)
    rows = slurmgpu("export", "runs/b", "-o", "-", "--format", "csv", cwd=tmp_path).stdout.split()
    assert rows == ["index,n,error", "1,2,", "2,3,"]


def test_run_says_what_an_input_is_for(slurmgpu, tmp_path):
    done = slurmgpu("run", "--gpus", "0", "--", "python", "train.py", cwd=tmp_path, expect=2)
    assert "--each FILE is missing: the input, for each item of which the program runs." in done.stderr


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (["python", "score.py", "{in}"], "score"),
        (["bash", "-c", "python {text}.py"], "bash"),
        (["bash", "-c", 'for script in *.py $HOME/.sh; do python "$script" $1; done', "bash", "{text}"], "bash"),
        (["bash", "-c", 'cd "$1" && python -u "src/fit.py"; cat out', "bash", "{path}"], "fit"),
        (["tool", "--with=a.py", "{path}.sh", "b.R"], "b"),
        (["/opt/bin/python3.11", "-W", "ignore", "-m", "llava.eval.model_vqa_loader", "{in}"], "model_vqa_loader"),
        (["accelerate", "launch", "--module", "lab.train", "--lr", "{lr}"], "train"),
        (["bash", "-c", 'cd "$1" && python -m whisperx a.wav', "bash", "{path}"], "whisperx"),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lab.train", "{in}"], "train"),
        (["sort", "-m", "{path}"], "sort"),
        (["python", "-m", "{module}"], "python"),
        (["bash", "-c", 'python -m "$TOOL" "$1"', "bash", "{path}"], "bash"),
    ],
)
def test_a_script_names_the_run(program, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").touch()
    assert whole_run_file(["a.jsonl"], ["n:int32"], program, {})["run_dir"] == f"runs/{name}"


def test_a_command_that_is_run_again_has_the_next_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def named(**given):
        return whole_run_file(["a.jsonl"], ["n:int32"], ["wc", "{text}"], given)["run_dir"]

    assert named() == "runs/wc"
    (tmp_path / "runs" / "wc").mkdir(parents=True)
    assert named() == "runs/wc"  # the folder of a sweep, or what the plan refuses with a sentence
    (tmp_path / "runs" / "wc" / "run.json").write_text("{}")
    assert named() == "runs/wc-2"
    (tmp_path / "runs" / "wc-2").mkdir()
    assert named() == "runs/wc-3"
    assert named(limit=3) == named(items="0:3") == named(run_dir=Path("runs/wc")) == "runs/wc"


def test_a_command_that_is_run_again_is_told_what_the_earlier_run_has(tmp_path, slurmgpu):
    (tmp_path / "a.jsonl").write_text('{"text": "seven"}\n')
    (tmp_path / "count.sh").write_text("""echo '{"n": 5}'\n""")

    def again(*words):
        columns = ("--each", "a.jsonl", "--col", "n:int64", "--gpus", "0", "--executor", "local")
        return slurmgpu("run", *columns, "--", "bash", "count.sh", "{text}", *words, cwd=tmp_path).stderr

    earlier, begun = tmp_path / "runs" / "count", f"This run computes all items, in {tmp_path}/runs/count"
    assert begun not in again()
    assert f"{begun}-2. {earlier} has the same program and items, and is complete: its rows are in" in again()
    Path(f"{earlier}-2", "merged.h5").unlink()
    assert f"{begun}-3. {earlier}-2 has the same program and items, and is incomplete: `slurmgpu resubmit" in again()
    assert f"{begun}-4: {earlier}-3 has another program, other items or other columns." in again("x")
    (tmp_path / "count.sh").write_text("""echo '{"n": 6}'\n""")
    assert f"{begun}-5: {earlier}-4 has the same program and items, but other code: count.sh changed" in again("x")


def test_an_earlier_run_is_told_of_only_once_the_scheduler_has_taken_the_next(tmp_path, slurmgpu):
    """It says that all items are computed, which they are not if the scheduler refuses the run."""
    (tmp_path / "a.jsonl").write_text('{"n": 7}\n')
    (tmp_path / "bin").mkdir()
    sbatch = 'test "$1" = --version || { echo "$SAID" >&2; echo "$SAID"; exit "$CODE"; }'
    for name, code in {"sbatch": sbatch, "scontrol": "", "squeue": "", "scancel": ""}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def again(executor, expect, code=1, said="no such account"):
        given = ("--each", "a.jsonl", "--col", "n:int64", "--gpus", "0", "--executor", executor)
        told = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CODE": str(code), "SAID": said}
        return slurmgpu("run", *given, "--", "echo", "{n}", cwd=tmp_path, expect=expect, **told).stderr

    again("local", 0)
    refused = again("slurm", 2)
    assert "no such account" in refused
    assert "This run computes all items" not in refused
    assert "This run computes all items" in again("slurm", 0, code=0, said="Submitted batch job 7")


def test_an_earlier_run_that_cannot_be_read_stands_in_nobodys_way(tmp_path, project, monkeypatch):
    with draft_run(project() / "slurmgpu.toml") as draft:
        create_run(tmp_path / "count", draft.plan, draft.items.files)
        refused = PermissionError(errno.EACCES, "Permission denied", tmp_path / "count" / "merged.h5")
        monkeypatch.setattr(earlier_run, "is_complete", mock.Mock(side_effect=refused))
        said = earlier_run.compare_earlier(tmp_path / "count", draft, "program", "", "", lambda earlier: draft.plan)
    assert said == f"This run computes all items, in {draft.run_dir}, because {tmp_path}/count exists."


def test_an_argument_that_is_no_utf_8_is_refused():
    with pytest.raises(SlurmGPUError, match="is not UTF-8"):
        whole_run_file(["a.jsonl"], ["n:int32"], ["x", "\udcff"], {})


ROWS = """sed -E 's/.*"index": ([0-9]+),.*/{"index": \\1, "n": 1, "shout": "A"}/' "$1" > "$2"\n"""


def slices_of(tmp_path, slurmgpu, code, expect, size=48):
    """A run of two slices by a script of a shell; the report, and how often it was started."""
    given = {"texts": [str(i) for i in range(2 * size)], "run": ["sh", "slice.sh", "{in}", "{out}"]}
    project = make(tmp_path / "project", "slice.py", batch_size=size, **given)
    (project / "slice.sh").write_text(f"printf x >> started\n{code}\n{ROWS}")
    file = project / "slurmgpu.toml"
    file.write_text(file.read_text().replace("shard_items = 8", f"shard_items = {size}"))
    slurmgpu("submit", cwd=project, expect=expect)
    return report(project), len((project / "started").read_text())


def test_a_program_that_fails_for_every_slice_is_not_started_for_every_item(slurmgpu, tmp_path):
    outcome, n_started = slices_of(tmp_path, slurmgpu, "echo 'it lacks a module' >&2; exit 1", expect=3, size=120)
    [attempt] = outcome["attempts"]
    assert (attempt["failure"], outcome["n_rows"]) == ("workload_error", 0)
    assert "it lacks a module" in attempt["message"]
    assert n_started == 1 + 100 + 1 + 8


def test_a_slice_whose_items_all_fail_is_published_after_another_that_does_not(slurmgpu, tmp_path):
    code = """if grep -Eq '"index": ([1-3]?[0-9]|4[0-7]),' "$1"; then echo 'bad slice' >&2; exit 1; fi"""
    outcome, n_started = slices_of(tmp_path, slurmgpu, code, expect=0)
    assert [error["index"] for error in outcome["errors"]] == list(range(48))
    assert n_started == 1 + 48 + 1


def test_a_program_that_fails_for_nearly_all_items_ends_no_task(slurmgpu, tmp_path):
    code = """if grep -vq '"index": 47,' "$1"; then echo 'bad item' >&2; exit 1; fi"""
    outcome, _ = slices_of(tmp_path, slurmgpu, code, expect=0)
    assert [error["index"] for error in outcome["errors"]] == [*range(47), *range(48, 96)]
