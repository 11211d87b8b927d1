"""`use = "command"` by itself: its settings, its calls of real programs, and what each failure says."""

import datetime
import errno
import itertools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from slurmgpu import Array, Item, ItemError, Json, Ragged, Retry, SlurmGPUError, TaskContext, Text
from slurmgpu.code.present_files import PresentFiles
from slurmgpu.code.started_modules import module_of
from slurmgpu.errors import GPUFaultError, Interrupted, NodeError, WorkerBrokenError, WorkloadError
from slurmgpu.util import gpus
from slurmgpu.util.guard import Guard
from slurmgpu.util.out_of_memory import OutOfMemoryError
from slurmgpu.workload import Share
from slurmgpu.workloads.command import (
    Command,
    caller,
    output_formats,
    placeholders,
    printed_row,
    process,
    programs,
    sinks,
    submitted_program,
    workload,
    written_back,
)
from slurmgpu.workloads.command.process import CallFailedError, Child
from tests.support.runs import has_ended, wait_until

SLICE = "--in", "{in}", "--out", "{out}"

SCORE = """
import csv, json, os, signal, subprocess, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
items = [json.loads(line) for line in open(arguments["--in"])]
path = arguments["--out"]
def row(item):
    return {"index": item["index"], "n": len(item["data"]["text"])}
def write(rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(each) + "\\n" for each in rows)
"""

SERVE = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    item = json.loads(line)
    answer = {"index": item["index"], "n": len(item["data"]["text"])}
"""


def loaded(folder, monkeypatch, **settings):
    """A workload in a folder, loaded for the CPU."""
    monkeypatch.chdir(folder)
    command = Command(**{"columns": {"n": "int32"}, **settings})
    command.load(TaskContext("cpu", 0, folder))
    return command


@pytest.fixture
def score(tmp_path, monkeypatch):
    """A workload of slices, whose script does what `body` says with `items`, `row` and `write`."""

    def make(body, *, form="{out}", **settings):
        (tmp_path / "score.py").write_text(SCORE + body)
        run = [sys.executable, "-S", "score.py", "--in", "{in}", "--out", form]
        return loaded(tmp_path, monkeypatch, run=run, **settings)

    return make


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A stream, whose script does what `body` says with `item` and `answer`."""
    made = []

    def make(body, head=SERVE, **settings):
        (tmp_path / "serve.py").write_text(head + "".join(f"    {line}\n" for line in body.splitlines()))
        made.append(loaded(tmp_path, monkeypatch, run=[sys.executable, "-S", "serve.py"], stream=True, **settings))
        return made[-1]

    yield make
    for command in made:
        command._stream.close()


@pytest.fixture
def one(tmp_path, monkeypatch):
    """A workload of one item a call: Python's code, which finds the field `text` in sys.argv[1]."""

    def make(code, *arguments, **settings):
        code = code.replace("{", "{{").replace("}", "}}")
        run = [sys.executable, "-S", "-c", code, *(arguments or ("{text}",))]
        return loaded(tmp_path, monkeypatch, run=run, **settings)

    return make


def items(*texts):
    return [Item(index, {"text": text}) for index, text in enumerate(texts)]


def failing(command, asked):
    with pytest.raises(CallFailedError) as caught:
        command(asked)
    return str(caught.value)


ECHO = "import json, os, sys; print(json.dumps({'text': sys.argv[1], 'n': len(os.fsencode(sys.argv[1]))}))"
LENGTH = "import json, sys; print(json.dumps({'n': len(sys.argv[1])}))"

# Settings


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("float32", Array("float32")),
        ("bool", Array("bool")),
        ("text", Text()),
        ("json", Json()),
        ("float32[384]", Array("float32", (384,))),
        ("float32[3, 4]", Array("float32", (3, 4))),
        ("int32[]", Ragged("int32")),
    ],
)
def test_a_type_is_a_column(text, column):
    assert Command(run=["wc", "{text}"], columns={"a": text}).columns == {"a": column}


@pytest.mark.parametrize(
    "text", ["flaot32", "text[]", "float32[-1]", "float32[3", "float32[3 4]", "float32[,]", "list[int]", ""]
)
def test_an_unknown_type_is_refused_with_its_column(text):
    with pytest.raises(SlurmGPUError, match="the column 'a' has the type"):
        Command(run=["wc", "{text}"], columns={"a": text})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run": []}, "run is empty"),
        ({"run": [""]}, "run is empty"),
        ({"run": ["wc"]}, "no placeholder"),
        ({"run": ["{text}", "a"]}, "expected the name of a program"),
        ({"run": ["wc", "{}"]}, "not a placeholder"),
        ({"run": ["wc", "{text"]}, "write {{ and }} for literal braces"),
        ({"run": ["wc", "{text}", "{in}"]}, "Use one or the other"),
        ({"run": ["wc", "{text}", "{start}"]}, "Use one or the other"),
        ({"run": ["awk", "{print $1}", "{in}"]}, "If the braces are the program's own, write {{print $1}}."),
        ({"run": ["awk", "{print $1}"], "stream": True}, "If the braces are the program's own, write {{print $1}}."),
        ({"run": ["wc", "{out}"]}, "nothing says for which items"),
        ({"run": ["wc", "{start}", "{out}"]}, "nothing says for which items"),
        ({"run": ["wc", "{in}", "{out:xml}"]}, "no format 'xml'"),
        ({"run": ["wc", "{in}", "{out}", "{out:csv}"]}, "two formats, csv and jsonl"),
        ({"run": ["wc", "{in:csv}", "{in}", "{out}"]}, "run has {in} in two formats, csv and items"),
        ({"run": ["wc", "{in:npz}", "{out}"]}, "run has {in:npz}, but {in} has no format 'npz'"),
        ({"run": ["wc", "{in}"], "stream": True}, "remove one of the two"),
        ({"run": ["wc", "a\0", "{in}"]}, "NUL"),
        ({"run": ["wc", "{text}"], "columns": {}}, "columns is empty"),
        ({"run": ["wc", "{text}"], "columns": {"index": "int64"}}, "'index' is written by slurmgpu itself"),
        ({"run": ["wc", "{in}", "{out:npz}"], "columns": {"a": "int32[]"}}, "cannot hold the column 'a'"),
        ({"run": ["wc", "{text}"], "match": "id"}, "match = 'id', and a call is for one item"),
        ({"run": ["wc"], "stream": True, "match": "id"}, "match = 'id', and a call is for a stream"),
        ({"run": ["wc", "{text}"], "in_order": True}, "in_order = true, and a call is for one item"),
        ({"run": ["wc", "{in}", "{out}"], "in_order": True, "match": "id"}, "and in_order = true; expected one of"),
        ({"run": ["wc", "{in}", "{out:npy}"]}, "{out:npy} has no index. If the array has a row for each item, in"),
        ({"run": ["wc", "{in}", "{out:npy}"], "columns": {"a": "json"}}, "expected one column, which is not json"),
        ({"run": ["wc", "{in}", "{out:npy}"], "columns": {"a": "int8", "b": "int8"}}, "the columns are a, b; expected"),
        ({"run": ["wc", "{text}"], "timeout_s": 0}, "timeout_s is 0"),
        ({"run": ["wc", "{text}"], "timeout_s": float("nan")}, "timeout_s is nan"),
        ({"run": ["wc", "{text}"], "timeout_s": float("inf")}, "timeout_s is inf"),
        ({"run": ["wc", "{text}"], "values": {"least": 2}}, "values has 'least', and run has no {least}"),
        ({"run": ["wc", "{least}"], "values": {"least": 2}}, "run has no placeholder for an item"),
        ({"run": ["{least}", "{text}"], "values": {"least": "wc"}}, "expected the name of a program"),
        ({"run": ["python train.py --lr {lr}"]}, "remove the quotes around the command"),
        ({"run": ["wc", "{text}", "{out}"], "values": {"out": "a"}}, "values has 'out'; expected a name of letters"),
        ({"run": ["wc", "{text}", "{a b}"], "values": {"a b": "x"}}, "values has 'a b'; expected a name of letters"),
        ({"run": ["wc", "{text}", "{a}"], "values": {"a": "x\0"}}, "NUL"),
        ({"run": ["wc", "{text}"], "env": {"A=": "b"}}, "env has 'A='"),
        ({"run": ["wc", "{text}"], "env": {"A": "b\0"}}, "env has 'A'"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(settings, said):
    with pytest.raises(SlurmGPUError) as caught:
        Command(**{"columns": {"n": "int32"}, **settings})
    assert said in str(caught.value)
    assert str(caught.value).startswith("command: ")


def test_where_a_field_is_missing_whose_braces_may_be_the_programs_own_it_is_said_how_to_write_them():
    arguments = ["{print $1}", "echo ${HOME} {text}", '{"a": 1}', "{a b:file}", "{text} {other}"]
    command = Command(run=["x", *arguments], columns={"n": "int32"})
    assert command.advice == {
        name: f" If the braces are the program's own, write {text}."
        for name, text in {
            "print $1": "{{print $1}}",
            "HOME": "${{HOME}}",
            '"a": 1': '{{"a": 1}}',
            "a b": "{{a b:file}}",
        }.items()
    }
    assert placeholders.parse(["x", "${{HOME}}"]).texts[1] == "${HOME}"
    assert placeholders.parse(["/usr/bin/python3.11", "-c", "{code}"]).code == {2: "/usr/bin/python3.11"}


def test_a_program_that_is_not_here_is_refused_only_when_this_machine_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = {"n": "int32"}
    with pytest.raises(SlurmGPUError, match="no program 'no-such-program' on the PATH"):
        Command(run=["no-such-program", "{text}"], columns=columns).check_here()
    script = tmp_path / "own"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(SlurmGPUError, match=r"no program '\./else' at /.*/else"):
        Command(run=["./else", "{text}"], columns=columns).check_here()
    with pytest.raises(
        SlurmGPUError, match=r"no program 'own' on the PATH\. A file of that name is here: write '\./own'"
    ):
        Command(run=["own", "{text}"], columns=columns).check_here()
    script.chmod(0o755)
    Command(run=["./own", "{text}"], columns=columns).check_here()
    Command(run=["own", "{text}"], columns=columns, env={"PATH": str(tmp_path)}).check_here()


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("#!/bin/sh\n", 0o644, "it is not executable. Type chmod +x ./x.py, or write python ./x.py instead."),
        (
            "print(1)\n",
            0o755,
            "it has no #! line that names its interpreter, such as #!/bin/sh. Add one, or write python",
        ),
        ("", 0o755, "the file is empty."),
        ("#!/bin/sh\r\necho 1\r\n", 0o755, "its #! line ends with a carriage return, as in files from Windows"),
        ("#!/usr/bin/env sh\r\n", 0o755, "its #! line ends with a carriage return"),
        ("#!/no/such/python -u\n", 0o755, "its interpreter /no/such/python is not on this machine."),
        ("#! /usr/bin/env no-such-python\n", 0o755, "its interpreter no-such-python, which env looks for, is not on"),
        ("#!\n", 0o755, "its #! line names no interpreter"),
        (None, 0o755, "it is a folder"),
    ],
)
def test_a_script_that_cannot_be_executed_is_refused_here_and_where_it_loads_and_is_not_the_nodes_fault(
    tmp_path, monkeypatch, content, mode, why
):
    good = tmp_path / "good.py"
    good.write_text("#!/bin/sh\necho '{\"n\": 1}'\n")
    good.chmod(0o755)
    (tmp_path / "x.py").symlink_to("good.py")
    command = loaded(tmp_path, monkeypatch, run=["./x.py", "{text}"])
    assert command(items("a")) == [{"n": 1}]
    (tmp_path / "x.py").unlink()
    if content is None:
        (tmp_path / "x.py").mkdir()
    else:
        (tmp_path / "x.py").write_text(content)
        (tmp_path / "x.py").chmod(mode)
    for refused in (command.check_here, lambda: command.load(TaskContext("cpu", 0, tmp_path))):
        with pytest.raises(SlurmGPUError) as caught:
            refused()
        assert str(caught.value).startswith(f"command: ./x.py cannot be started: {why}")
    if "env" not in str(content):  # env has started, and says itself what it does not find
        with pytest.raises(WorkloadError) as met:
            command(items("a"))
        assert str(met.value).startswith(f"x.py cannot be started: {why}")


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("python extrct.py {text}", "extrct.py"),
        ("sh -x extrct.py", "extrct.py"),
        ("env A=1 python3.11 -u lib/extrct.py --to x.py {text}", "lib/extrct.py"),
        ("nice -n 5 timeout -s KILL 1h torchrun --nproc-per-node 2 extrct.py {text}", "extrct.py"),
        ("python extract.py --module gone.py {text}", None),
        ("python -c 1 extrct.py {text}", None),
        ("bash -lc extrct.py {text}", None),
        ("Rscript -e 1 extrct.R {text}", None),
        ("apptainer exec image.sif python /app/extrct.py {text}", None),
        ("python -m extrct extrct.py {text}", None),
        ("python {text} extrct.py", None),
        ("true extrct.py {text}", None),
        ("apptainer exec --nv image.sif python /opt/extrct.py {text}", None),
        ("timeout 1h apptainer exec image.sif python /opt/extrct.py {text}", None),
        ("env -u A ssh host python extrct.py {text}", None),
        ("convert --lang python --to extrct.py {text}", None),
        ("env -C lib python extrct.py {text}", None),
    ],
)
def test_a_script_that_is_not_there_is_refused_here(tmp_path, monkeypatch, line, script):
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "extract.py", tmp_path / "lib" / "extract.py"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.setattr(workload, "check_program", lambda program, path: None)  # torchrun may not be here
    command = Command(run=[*line.split(), "{text}"], columns={"n": "int32"})
    if script is None:
        command.check_here()
        return
    there = script.replace("extrct", "extract")
    with pytest.raises(SlurmGPUError, match=rf"no script '{script}' .*{script}\. Did you mean '{there}'"):
        command.check_here()


@pytest.mark.parametrize("line", ["#!/bin/sh -e", "#!\t/usr/bin/env\tsh", "#!/usr/bin/env -S sh -e", "#!/bin/sh -"])
def test_scripts_that_the_kernel_executes_are_not_refused(tmp_path, monkeypatch, line):
    (tmp_path / "x").write_text(f"{line}\necho '{{\"n\": 1}}'\n")
    (tmp_path / "x").chmod(0o755)
    command = loaded(tmp_path, monkeypatch, run=["./x", "{text}"])
    command.check_here()
    assert command(items("a")) == [{"n": 1}]


def test_the_mode_says_how_many_items_a_call_has():
    def batch_size(*run, **more):
        return Command(run=["x", *run], columns={"n": "int32"}, **more).batch_size

    assert batch_size("{text}") == batch_size("{in}") == batch_size("{text}", "{out}") == 1
    assert batch_size("{in}", "{out}") == batch_size("{start}", "{end}", "{out}") == 256
    assert batch_size(stream=True) == 32


def test_a_process_for_each_gpu_is_refused():
    command = Command(run=["x", "{text}"], columns={"n": "int32"})
    assert command.place(Share(4)).processes == "one"
    with pytest.raises(SlurmGPUError, match="array = true"):
        command.place(Share(4, processes="per-gpu"))


# One item a call

HOSTILE = [
    "",
    " ",
    "two words",
    "'single' \"double\"",
    "a\nb",
    "-rf",
    "--help",
    "$(touch gone); `touch gone` && $HOME",
    "*",
    "ä \U0001f600",
    "\\",
    "{text}",
    "%s",
]


def test_a_field_is_one_argument_whatever_is_in_it(one, tmp_path):
    command = one(ECHO, columns={"text": "text", "n": "int32"})
    asked = items(*HOSTILE)
    expected = [{"text": text, "n": len(text.encode())} for text in HOSTILE]
    assert [command([item]) for item in asked] == [[row] for row in expected]
    assert command(asked) == expected
    assert not (tmp_path / "gone").exists()


def test_a_value_of_the_users_own_stands_for_its_placeholder_in_every_call(one):
    values = {"mark": "<>", "least": 0.5, "loud": True}
    command = one(ECHO, "{text}{mark}{least}{loud}", columns={"text": "text", "n": "int32"}, values=values)
    assert [row["text"] for row in command(items("a", "b"))] == ["a<>0.5true", "b<>0.5true"]
    assert (command.batch_size, command.fields) == (1, ("text",))
    [row] = command([Item(0, {"text": "a", "mark": "b"})])
    assert str(row) == "it has a field 'mark', which is also one of the values under [settings]"


def test_what_is_no_text_is_json_or_bytes(one):
    command = one(ECHO, columns={"text": "text", "n": "int32"})
    day = datetime.date(2026, 1, 2)
    values = [3, 2.5, True, [1, "a"], {"a": None}, np.int64(7), b"raw", day, np.datetime64("2026-01-02"), [day]]
    texts = [row["text"] for row in command(items(*values))]
    assert texts[:7] == ["3", "2.5", "true", '[1, "a"]', '{"a": null}', "7", "raw"]
    assert texts[7:] == ["2026-01-02", "2026-01-02", '["2026-01-02"]']
    [row] = command(items(b"\xff\xfe"))
    assert row["n"] == 2


def test_a_field_is_a_file_where_that_is_asked_for_and_the_file_is_removed(one, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    code = "import json, sys; print(json.dumps({'n': len(open(sys.argv[1], 'rb').read()), 'path': sys.argv[2]}))"
    command = one(code, "{seg.jpg:file}", "--path={seg.jpg:file}", columns={"n": "int32", "path": "text"})
    contents = [bytes(range(256)), "ä", {"bytes": b"\0\1", "path": "x.png"}, "x" * 200_000]
    rows = command([Item(index, {"seg.jpg": content}) for index, content in enumerate(contents)])
    assert [row["n"] for row in rows] == [256, 2, 2, 200_000]
    assert all(row["path"].startswith("--path=/") and row["path"].endswith(".seg.jpg") for row in rows)
    [missing] = command([Item(0, {"jpg": b""})])
    assert str(missing).startswith("no field 'seg.jpg'")
    assert command.fields == ("seg.jpg",)
    [failed] = one("import sys; sys.exit(sys.argv[1])", "{jpg:file}")([Item(0, {"jpg": b""})])
    assert str(failed).splitlines()[0].endswith("exited with code 1: {jpg:file}")  # the same at each attempt
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"text": None}, "field 'text' is null"),
        ({"txet": "a"}, "no field 'text'. Did you mean 'txet'?"),
        ({"text": "a\0b"}, "NUL character, which no argument can hold. Write {text:file} for a file"),
        ({"text": "\ud800"}, "cannot be an argument"),
        ({"text": object()}, "cannot be an argument"),
        ({"text": [float("nan")]}, "cannot be an argument: it has NaN or Infinity, which JSON does not have"),
        ({"text": "x" * 131072}, "has 131,072 bytes; Linux takes less than 131,072"),
    ],
)
def test_a_field_that_cannot_be_an_argument_is_its_items_error(one, data, said):
    command = one(LENGTH)
    error, row = command([Item(0, data), Item(1, {"text": "fine"})])
    assert said in str(error)
    assert row == {"n": 4}


def test_the_longest_argument_that_linux_takes_is_taken(one):
    assert one(LENGTH)(items("x" * 131071)) == [{"n": 131071}]


def test_braces_are_doubled_and_placeholders_stand_within_arguments(one):
    command = one(ECHO, "<{{{text}}}:{text}>", columns={"text": "text", "n": "int32"})
    assert command(items("a"))[0]["text"] == "<{a}:a>"


def test_one_item_may_be_written_to_a_file_with_or_without_its_index(one):
    code = "import json, sys; open(sys.argv[2], 'w').write(json.dumps({'n': len(sys.argv[1])%s}))"
    assert one(code % "", "{text}", "{out}")(items("abc", "d")) == [{"n": 3}, {"n": 1}]
    assert isinstance(one(code % ", 'index': 9", "{text}", "{out}")(items("abc"))[0], ItemError)


def test_an_item_may_be_read_from_a_file(one):
    code = "import json, sys; item = json.load(open(sys.argv[1])); print(json.dumps({'n': item['seed'] % 1000}))"
    [item] = items("abc")
    assert one(code, "{in}")([item]) == [{"n": item.seed % 1000}]


def test_index_and_seed_are_in_the_environment_and_gpus_are_counted_by_their_bus(one):
    code = (
        "import json, os; e = os.environ; print(json.dumps({'n': int(e['SLURMGPU_INDEX']), "
        "'seed': e['SLURMGPU_SEED'], 'order': e['CUDA_DEVICE_ORDER'], "
        "'mine': e['MINE'], 'gpus': e['CUDA_VISIBLE_DEVICES']}))"
    )
    columns = dict.fromkeys(("seed", "order", "mine", "gpus"), "text") | {"n": "int32"}
    item = Item(7, {"text": "a"})
    [row] = one(code, columns=columns, env={"MINE": "x"})([item])
    assert row == {"n": 7, "seed": str(item.seed), "order": "PCI_BUS_ID", "mine": "x", "gpus": ""}


def test_a_program_that_prints_a_number_gives_the_only_column(one):
    assert one("print(4)", columns={"n": "int32"})(items("a")) == [{"n": 4}]
    assert one("print(0.5)", columns={"n": "float32"})(items("a")) == [{"n": 0.5}]
    assert one("print('true')", columns={"n": "bool"})(items("a")) == [{"n": True}]
    two = {"n": "int32", "m": "int32"}
    for text, columns in (("4", two), ("4", {"n": "text"}), ("x", {"n": "int32"}), ("4\\n5", {"n": "int32"})):
        [row] = one(f"print('{text}')", columns=columns)(items("a"))
        assert 'stdout has no JSON object, such as {"n": …' in str(row)
        assert ("A number alone is a row only if nothing else is printed" in str(row)) is (text == "4\\n5")


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("Loading\n{ROW}", ["Loading"]),
        ("{ROW}\nbye\n", ["bye"]),
        ("{'loss': '2.1'}\n  {ROW}", ["{'loss': '2.1'}"]),
        ("10%\r20%\r{ROW}", []),
        ('{"epoch": 1}\n{"epoch": 2}\n{ROW}', ['{"epoch": 1}', '{"epoch": 2}']),
        ('{"epoch": nan}\n{ROW}', ['{"epoch": nan}']),
        ('{"epoch": 1, "error": 0.5}\n{"epoch": 2, "error": 0.4}\n{ROW}', None),
        ("{\n{ROW}", ["{"]),
        ('one\n{\n  "n": 1,\n  "error": null\n}\ntwo', ["one", "two"]),
        ('{"n":\n 1\n }', []),
        ("\ufeff{ROW}\r\n", []),
        ("7\n{ROW}", ["7"]),
        ("{\n  a b\n}\n{ROW}", ["{", "  a b", "}"]),
        ("f()\n{\n  {\n{ROW}\nbye", ["f()", "{", "  {", "bye"]),
        ('{\n{\n  "n": 1\n}\nbye', ["{", "bye"]),
        (
            '[\n {\n  "m": 1\n },\n {\n  "m": 2\n }\n]\n{ROW}',
            ["[", " {", '  "m": 1', " },", " {", '  "m": 2', " }", "]"],
        ),
        ('{"n":\n1}\nbye', ["bye"]),
        ('{\n "m": [\n{ROW}\n], "l": nan\n}\n{ROW}', ["{", ' "m": [', '{"n": 1}', '], "l": nan', "}"]),
        ('{"m": 1},\n{\n "m": [\n{"m": 2}\n]\n}\n{ROW}', ['{"m": 1},', "{", ' "m": [', '{"m": 2}', "]", "}"]),
        ('{"m":\n{"m": 2}\n{ROW}', None),
        ('{\n "m": "}", "l": "\\"{["\n}\n{ROW}\nbye', ["{", ' "m": "}", "l": "\\"{["', "}", "bye"]),
    ],
)
def test_a_row_is_found_among_what_else_is_printed_which_goes_to_the_log(one, capfd, text, logged):
    text = text.replace("{ROW}", '{"n": 1}')
    command = one("import sys; sys.stdout.buffer.write(sys.argv[1].encode())")
    assert command([Item(17, {"text": text})]) == [{"n": 1}]
    said = capfd.readouterr().err.splitlines()
    assert logged is None or said == [f"item 17 | {line}" for line in logged]


@pytest.mark.parametrize(
    "text",
    [
        10_000 * '{"m": 1,\n',
        10_000 * "void f()\n{\n  g();\n}\n",
        10_000 * '{"m":\n',
        1_000 * '{"m":\n',  # as deep as Python 3.11 reads
        '{"m": [{' + 10_000 * "\n},\n{" + "}]}\n",
    ],
    ids=["begun", "functions", "nested", "deep", "closed"],
)
def test_lines_that_begin_objects_are_read_once(text):
    found = printed_row.PrintedRow({"n": Array("int32")}, sinks.ToLog(""))
    started = time.process_time()
    found.take(text.encode() + b'};\n{"n": 1}\n')
    assert found.row() == {"n": 1}
    assert time.process_time() - started < 3


def test_what_a_program_writes_beside_the_columns_is_not_kept_and_the_log_says_so(one, capfd, caplog):
    command = one("""print('{"n": 1, "words": ["a"], "loss": 0.5}')""")
    assert command(items("a", "b")) == [{"n": 1}, {"n": 1}]
    row = '{"n": 1, "words": ["a"], "loss": 0.5}'
    assert capfd.readouterr().err == f"item 0 | {row}\nitem 1 | {row}\n"
    assert [each.message for each in caplog.records] == [
        'not a column, so not kept: \'words\', \'loss\'. To keep them, add "words" = "json", "loss" = "float64" '
        "to the columns (with `slurmgpu run`: --col words:json --col loss:float64), and submit again into another run "
        "directory."
    ]


def test_fields_of_the_item_beside_the_columns_may_be_kept_and_are_no_news(one, caplog):
    assert one("""print('{"n": 1, "text": "a"}')""")(items("a")) == [{"n": 1}]
    assert caplog.messages == []


def test_a_number_named_error_is_a_value_beside_the_columns(one, capfd):
    assert one("""print('{"n": 1, "error": 0.25}')""")(items("a")) == [{"n": 1}]
    assert capfd.readouterr().err == 'item 0 | {"n": 1, "error": 0.25}\n'


def test_a_row_with_more_than_the_columns_is_the_row_among_objects_with_others(one):
    for first, then in (("saved", "row"), ("row", "saved")):
        texts = {"saved": '{"event": "saved"}', "row": '{"n": 1, "loss": 0.5}'}
        assert one(f"print('{texts[first]}'); print('{texts[then]}')")(items("a")) == [{"n": 1}]


def test_what_is_written_and_not_printed_beside_the_columns_is_an_error_as_no_log_has_it():
    command = Command(run=["program", "{in}", "{out}"], columns={"n": "int32"})
    assert command.explain_misfit({"n": 1, "words": ["a"], "loss": 0.5}) == (
        'Do not write it. To keep them, add "words" = "json", "loss" = "float64" to the columns (with `slurmgpu run`: '
        "--col words:json --col loss:float64), and submit again into another run directory."
    )
    assert command.explain_misfit({"m": 1}) == command.explain_misfit({"n": "one"}) == ""


def test_a_row_that_lacks_a_column_has_all_that_it_wrote_as_a_name_may_be_mistyped(one):
    assert one("""print('{"m": 1, "loss": 2}')""")(items("a")) == [{"m": 1, "loss": 2}]


def test_the_row_of_a_long_call_is_in_the_log_as_it_may_not_fit_the_columns(one, capfd, monkeypatch):
    monkeypatch.setattr(caller, "LONG_CALL_S", 0.0)
    assert one("print('{\"n\": null}')")(items("a")) == [{"n": None}]
    assert capfd.readouterr().err == 'item 0 | {"n": null}\n'


def test_what_a_failed_call_printed_is_in_the_log(one, capfd):
    code = "print('10 layers'); print('{\"n\": 1}'); raise SystemExit(3)"
    [error] = one(code)(items("a"))
    assert str(error).splitlines()[0].endswith('exited with code 3: {"n": 1}')
    assert capfd.readouterr().err == 'item 0 | 10 layers\nitem 0 | {"n": 1}\n'


def test_a_child_has_the_gpus_of_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    code = "import json, os; print(json.dumps({{'gpus': os.environ['CUDA_VISIBLE_DEVICES']}}))"
    command = Command(run=[sys.executable, "-c", code, "{text}"], columns={"gpus": "text"})
    command.load(TaskContext("cuda:0", 2, tmp_path))
    assert command(items("a")) == [{"gpus": "3,1"}]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("import sys; sys.exit('no such voice')", "exited with code 1: no such voice"),
        ("raise SystemExit(76)", "exited with code 76"),
        ("raise SystemExit(139)", "exited with code 139 (SIGSEGV)"),
        ("import os; os.kill(os.getpid(), 11)", "died by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 6)", "died by SIGABRT"),
        ("pass", 'failed: stdout has no JSON object, such as {"n": …}'),
        ("print('Loading…')", "no JSON object, such as {\"n\": …}; its last line is 'Loading…'"),
        ("print('{\"n\": 1')", "no JSON object, such as"),
        ("print([1])", "its last line is '[1]'"),
        ("import json; print(json.dumps([{'n': 1}, {'n': 2}], indent=2))", "its last line is ']'"),
        ('print(\'[\\n {\\n  "n": 1\\n },\\n {\\n  "n": 2\\n }\\n]\')', "its last line is ']'"),
        ("print({'n': 1})", "a dictionary as Python prints it: print json.dumps(…) instead"),
        ('print(\'{"n": 1}\\n{"n": 2}\')', 'stdout has 2 JSON objects with these columns; expected one, {"n": …}'),
        ('print(\'{"m": 1}\\n{"m": 2}\')', "stdout has 2 JSON objects with other columns"),
        ("print('the text is empty'); raise SystemExit(2)", "exited with code 2: the text is empty"),
        ("import warnings; warnings.warn('old'); print(1, 2)", "its last line is '1 2'\nThe end of its stderr:\n"),
        ('print(\'{"n": 1, "index": 5}\')', "has the index 5, but this call has no such item"),
        ('print(\'{"error": "too loud"}\')', "too loud"),
        ('print(\'{"error": {"code": 5}}\')', "failed: stdout has {'code': 5} as error; expected a text"),
        ("print('{\"error\": NaN}')", "failed: stdout has nan as error; expected a text"),
        ("print('{\"error\": 0}')", "failed: stdout has 0 as error; expected a text"),
    ],
)
def test_a_failed_call_is_its_items_error(one, code, said):
    [error] = one(code)(items("a"))
    assert isinstance(error, ItemError)
    assert said in str(error)


def test_a_signal_from_outside_is_told_after_a_moment_in_which_it_may_come_here(one, monkeypatch):
    monkeypatch.setattr(process, "SETTLE_S", 0.01)
    for number in (9, 15):
        [error] = one(f"import os; os.kill(os.getpid(), {number})")(items("a"))
        assert f"died by {signal.Signals(number).name}" in str(error)
        assert error.failure == "crash"


DIES = "import os, sys\nwith open('calls', 'a') as file: file.write('x')\n"
DIES += "if os.path.getsize('calls') <= {n}: os.kill(os.getpid(), {number})\nprint('{{\"n\": 1}}')"


@pytest.mark.parametrize(("number", "n_calls"), [(11, 2), (5, 2), (9, 4)])
def test_an_item_that_kills_its_process_is_tried_until_that_is_no_chance(one, tmp_path, monkeypatch, number, n_calls):
    monkeypatch.setattr(process, "SETTLE_S", 0.0)
    assert one(DIES.format(n=n_calls - 1, number=number))(items("a")) == [{"n": 1}]
    assert len((tmp_path / "calls").read_text()) == n_calls
    (tmp_path / "calls").unlink()
    [error] = one(DIES.format(n=99, number=number))(items("a"))
    assert (error.failure, len((tmp_path / "calls").read_text())) == ("crash", n_calls)


def test_a_slice_that_dies_is_halved_and_its_last_item_tried_again(score, tmp_path, monkeypatch):
    command = score("open('calls', 'a').write('x'); os.kill(os.getpid(), 11)")
    with pytest.raises(CallFailedError) as raised:
        command(items("a", "bad"))
    assert raised.value.failure == "crash"
    assert (tmp_path / "calls").read_text() == "x"
    with pytest.raises(CallFailedError, match="died by SIGSEGV"):
        command(items("bad"))
    assert (tmp_path / "calls").read_text() == "xxx"


def test_a_program_that_resumes_may_hear_of_the_end_before_its_task_does(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = [sys.executable, "-S", "-c", "raise SystemExit(1)", "{text}"]  # not by a signal: called once
    hears = iter([False, True])
    command = Command(run=run, columns={"n": "int32"}, resumes=True)
    command.load(TaskContext("cpu", 0, tmp_path, stopping=lambda: next(hears)))
    with pytest.raises(Interrupted):
        command(items("a"))
    assert "the program was told to end, and left no row: " in caplog.text


def test_a_finished_program_that_resumes_keeps_its_row_whatever_it_has_started(tmp_path, monkeypatch):
    """A monitor that it leaves behind is not waited for, until the task is killed with the row."""
    monkeypatch.chdir(tmp_path)
    script = '(sleep 20; touch waited) & echo "{\\"n\\": $1}"'
    command = Command(
        run=["sh", "-c", script.replace("{", "{{").replace("}", "}}"), "sh", "{text}"],
        columns={"n": "int32"},
        resumes=True,
    )
    command.load(TaskContext("cpu", 0, tmp_path, stopping=lambda: True))
    assert command([Item(0, {"text": "7"})]) == [{"n": 7}]
    assert not Path("waited").exists()


def test_exit_code_75_is_tried_again_later(one, score):
    [error] = one("import sys; print('busy', file=sys.stderr); raise SystemExit(75)")(items("a"))
    assert isinstance(error, Retry)
    assert str(error).endswith("exited with code 75: busy")
    with pytest.raises(Retry, match="exited with code 75"):
        score("sys.exit(75)")(items("a", "b"))


def test_a_row_says_that_its_error_may_pass(one):
    [error] = one('print(\'{"error": "HTTP 429", "retry": 30}\')')(items("a"))
    assert (type(error), str(error), error.after) == (Retry, "HTTP 429", 30)
    for yes, after in (("true", 0.0), ("0.5", 0.5)):
        [error] = one(f'print(\'{{"error": "HTTP 503", "retry": {yes}}}\')')(items("a"))
        assert (type(error), error.after) == (Retry, after)
    for no in ("0", "-1", "false"):
        [error] = one(f'print(\'{{"error": "HTTP 404", "retry": {no}}}\')')(items("a"))
        assert type(error) is ItemError


def test_a_kill_for_lack_of_host_memory_is_the_workers_if_an_item_is_alone(one, score, monkeypatch):
    kills = itertools.count()
    monkeypatch.setattr("slurmgpu.util.cgroups.oom_kills", lambda: next(kills))
    monkeypatch.setattr(process, "SETTLE_S", 0.0)
    with pytest.raises(
        WorkerBrokenError, match=r"the kernel killed a process of this job for lack of host memory: .* died by SIGKILL"
    ) as told:
        one("import os; os.kill(os.getpid(), 9)")(items("a"))
    assert told.value.is_sure  # it is not called again with as much memory
    with pytest.raises(MemoryError, match="for lack of host memory"):
        score("os.kill(os.getpid(), 9)")(items("a", "b"))
    with pytest.raises(WorkerBrokenError, match=r"for lack of host memory: .* exited with code 1: rank 0 was killed"):
        one("import sys; sys.exit('rank 0 was killed')")(items("a"))


def test_a_gpu_that_is_lost_is_no_items_error(one, monkeypatch):
    asked = []

    def check(n_gpus):
        asked.append(n_gpus)
        raise GPUFaultError("cuInit failed with code 999: unknown error")

    monkeypatch.setattr(gpus, "check_again", check)
    command = one("import sys; sys.exit('RuntimeError: CUDA error: GPU is lost')")
    [error] = command(items("a"))
    assert (error.failure, asked) == ("item_error", [])  # a task without GPUs
    command._n_gpus = 2
    with pytest.raises(GPUFaultError, match="unknown error"):
        command(items("a"))
    assert asked == [2]


WRAPPER = """
import subprocess, sys, pathlib
made = pathlib.Path(sys.argv[1]).with_name("source")
made.mkdir()
inner = f"raise OSError('no image: {made}/3.jpg')"
subprocess.run([sys.executable, "-S", "-c", inner, made], check=True)
"""


def test_the_error_of_a_script_that_another_starts_is_its_own_and_names_no_temporary_folder(tmp_path, monkeypatch):
    (tmp_path / "slice.py").write_text(WRAPPER)
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "-S", "slice.py", "{in:jsonl}", "{out}"])
    said = failing(command, items("a"))
    assert said.partition("\n")[0].endswith("exited with code 1: OSError: no image: …/source/3.jpg")
    assert "subprocess.CalledProcessError: Command" in said
    assert said == failing(command, items("a"))


def test_equal_failures_are_of_one_way_and_others_are_not(one):
    code = "import sys; sys.exit(int(sys.argv[1]))"
    first, second, third = one(code)(items("3", "3", "4"))
    assert first.way == second.way != third.way


def test_an_error_ends_with_the_last_2_kib_of_stderr_in_whole_lines(one):
    code = "import sys; [print(f'line {i:04}', file=sys.stderr) for i in range(9000)]; sys.exit(2)"
    [error] = one(code)(items("a"))
    first, title, *lines = str(error).splitlines()
    assert first.endswith("exited with code 2: line 8999")
    assert title == "The end of its stderr:"
    assert lines == [f"line {i:04}" for i in range(9000 - len(lines), 9000)]
    assert 1990 < len("\n".join(lines)) <= 2048


LAUNCHER = """
import sys

def say(error):
    print("Traceback (most recent call last):\\n[rank1]: " + error, file=sys.stderr)
    print("E1126 failed (exitcode: 1)\\n" * 200, "Traceback (most recent call last):", sep="", file=sys.stderr)
    print("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "=" * 60, sep="\\n", file=sys.stderr)
    print("train.py FAILED\\n" + "=" * 60, file=sys.stderr)
    sys.exit(1)
"""
"""Behind the traceback of a rank, torchrun writes 2 KiB and more of its own."""


@pytest.mark.parametrize(
    ("run", "place"),
    [
        (["bash", "-c", "echo {text}"], "Write \"$1\" instead, and after the code 'bash' and {text}"),
        (["env", "A=1", "/bin/sh", "-ec", "echo {text}"], "and after the code '/bin/sh' and {text}"),
        (["bash", "-euo", "pipefail", "-ce", "echo {text}"], "and after the code 'bash' and {text}"),
        ([sys.executable, "-W", "ignore", "-c", "print('{text}')"], "Write sys.argv[1] instead"),
        ([sys.executable, "-S", "-c", "print('{text}')"], "Write sys.argv[1] instead, and after the code {text}"),
        (["bash", "-c", "--", "echo {text}"], "and after the code 'bash' and {text}"),
        (["bash", "-c", "-e", "-o", "pipefail", "echo {text}"], "and after the code 'bash' and {text}"),
        (["perl", "-I", "lib", "-e", "print '{text}'"], "Write $ARGV[0] instead, and after the code {text}"),
    ],
)
def test_a_field_within_code_is_taken_if_it_is_a_word_and_else_says_where_it_belongs(tmp_path, monkeypatch, run, place):
    command = loaded(tmp_path, monkeypatch, run=run)
    number, *others = command(items("-1.5e-3", "$(touch ran)", "a b", ""))
    assert number == {"n": -0.0015}
    assert all(isinstance(each, ItemError) and place in str(each) for each in others)
    assert not (tmp_path / "ran").exists()


def test_an_argument_of_code_is_what_it_is(tmp_path, monkeypatch):
    run = ["bash", "-c", 'echo "{{\\"n\\": ${{#1}}}}"', "bash", "{text}"]
    assert loaded(tmp_path, monkeypatch, run=run)(items("$(touch ran)")) == [{"n": 12}]


def test_a_script_that_looks_for_a_field_at_the_top_of_a_line_is_told_of_in_jsonl(tmp_path, monkeypatch):
    code = "import json, sys; json.loads(open(sys.argv[1]).readline())['text']"
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "-S", "-c", code, "{in}", "{out}"])
    told = r"KeyError: 'text'. \{in\} has the fields .* write \{in:jsonl\} to have"
    with pytest.raises(CallFailedError, match=told) as raised:
        command(items("a", "b"))
    assert raised.value.__cause__ is not raised.value


def test_each_call_has_a_port_of_its_own_unless_one_is_set(one, monkeypatch):
    code = "import os; print(os.environ['MASTER_PORT'])"
    ports = {row["n"] for row in one(code)(items("a", "b", "c"))}
    assert len(ports) > 1
    assert all(1024 < port < 1 << 16 for port in ports)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert one(code)(items("a")) == [{"n": 29500}]


@pytest.mark.parametrize("before", ["[INFO] - ", "\\rstep 1/2 loss=0.5"])
def test_an_object_that_does_not_begin_its_line_is_no_row_and_the_error_says_so(one, before):
    [error] = one(f"""print('{before}{{"n": 1}}')""")(items("a"))
    assert "where text precedes the object: print a newline before it" in str(error)


def test_the_reason_of_an_error_of_hydras_is_its_first_line(one):
    said = "Could not override 'modle'.\\n    object_type=dict\\n\\nSet the environment variable HYDRA_FULL_ERROR=1."
    [error] = one(f"""import sys; sys.exit("{said}")""")(items("a"))
    assert str(error).splitlines()[0].endswith(" exited with code 1: Could not override 'modle'.")


def test_a_bar_of_progress_is_no_reason(one):
    bars = "Working ━━━━━━━━━━ 100% 0:00:00\\n", "\\r100%|██████████| 30/30 [00:00<00:00, 183.59it/s]\\n"
    for bar in bars:
        code = f"import sys; sys.stdout.buffer.write('{bar}'.encode()); sys.exit(3)"
        [error] = one(code)(items("a"))
        assert str(error).splitlines()[0] == f"{Path(sys.executable).name} exited with code 3"


def test_the_reason_of_a_pipe_of_bash_is_its_process_that_died_and_the_same_in_each_call(tmp_path, monkeypatch):
    (tmp_path / "pipe.sh").write_text("set -o pipefail\nbash -c 'kill -SEGV $$' | cat")
    command = loaded(tmp_path, monkeypatch, run=["bash", "pipe.sh", "{text}"])
    errors = [str(error) for error in command(items("a", "a"))]
    assert errors[0] == errors[1]
    first, _, *lines = errors[0].splitlines()
    assert first == "bash exited with code 139 (SIGSEGV): pipe.sh: line 2: Segmentation fault bash -c 'kill -SEGV $$'"
    assert len(lines) == 2


def test_the_headline_of_an_error_is_what_was_raised_also_behind_what_a_launcher_prints(one):
    [error] = one(f"{LAUNCHER}\nsay('ValueError: the tokenizer has no pad token')")(items("a"))
    first, title, *lines = str(error).splitlines()
    assert first.endswith("exited with code 1: [rank1]: ValueError: the tokenizer has no pad token")
    assert (title, lines[-1]) == ("The end of its stderr:", "=" * 60)
    [error] = one("import sys; print('no such file: x\\n' + '-' * 40, file=sys.stderr); sys.exit(1)")(items("a"))
    assert str(error).splitlines()[0].endswith("exited with code 1: no such file: x")


def test_memory_and_gpus_are_seen_in_what_was_raised_far_from_the_end_of_stderr(one, score, monkeypatch):
    with pytest.raises(
        OutOfMemoryError, match=r"exited with code 1: \[rank1\]: torch.OutOfMemoryError: CUDA out of memory"
    ):
        score(f"{LAUNCHER}\nsay('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')")(
            items("a", "b")
        )
    # An item that is alone in its call by design has no smaller batch.
    [error] = one(f"{LAUNCHER}\nsay('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')")(items("a"))
    assert isinstance(error, ItemError)
    asked = []
    monkeypatch.setattr(gpus, "check_again", asked.append)
    command = one(f"{LAUNCHER}\nsay('RuntimeError: CUDA error: uncorrectable ECC error encountered')")
    command._n_gpus = 2
    command(items("a"))
    assert asked == [2]
    # A line that only mentions it, before much else, is nothing that was raised.
    [error] = one(f"{LAUNCHER}\nprint('CUDA out of memory is avoided', file=sys.stderr)\nsay('ValueError: no')")(
        items("a")
    )
    assert error.raised == []


def test_of_a_progress_bar_an_error_has_what_a_terminal_shows(one):
    [error] = one("import sys; sys.stderr.write('10%\\r50%\\rbroken\\n'); sys.exit(1)")(items("a"))
    assert str(error).endswith("exited with code 1: broken")


def test_what_is_printed_goes_to_the_log_behind_the_item(one, capfd):
    code = "import sys; print('half', end='', file=sys.stderr); print('{\"n\": 1}')"
    one(code)([Item(17, {"text": "a"})])
    assert capfd.readouterr().err == "item 17 | half\n"


def test_a_call_that_prints_without_end_does_not_fill_the_log(one, capfd, monkeypatch):
    monkeypatch.setattr(sinks, "LOG_BYTES", 1000)
    code = "import sys\nfor n in range(500): print('line', n, file=sys.stderr)\nsys.exit('the end')"
    [error] = one(code)(items("a"))
    said = capfd.readouterr().err
    assert said.count("item 0 | ") == len(said.splitlines()) < 200
    left_out = sum(len(f"line {n}\n") for n in range(500)) + len("the end\n") - 1000
    assert f"item 0 | [… {left_out:,} more bytes are not in the log, which takes 1,000 of a call]" in said
    assert str(error).endswith("line 499\nthe end")


def test_a_process_that_takes_too_long_is_killed_with_what_it_started(one, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.2)
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(1000)"
    )
    [error] = one(code, timeout_s=5.0)(items("a"))  # time to start, also on a busy machine
    assert "took longer than timeout_s = 5" in str(error)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: has_ended(pid), "the end of what was started")


def test_what_a_process_leaves_behind_ends_with_it_and_holds_nothing_up(one, tmp_path):
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "open('pid', 'w').write(str(child.pid)); print('{\"n\": 1}')"
    )
    assert one(code)(items("a")) == [{"n": 1}]
    wait_until(lambda: has_ended((tmp_path / "pid").read_text()), "the end of what was left")


def test_a_daemon_that_holds_the_pipes_is_not_waited_for_long(one, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 0.1)
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "open('pid', 'w').write(str(child.pid)); print('{\"n\": 1}')"
    )
    try:
        assert one(code)(items("a")) == [{"n": 1}]
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("for _ in range(40): sys.stdout.write('x' * (1 << 16))", "a line of stdout"),
        ("while True: sys.stdout.write('x' * (1 << 16))", "a line of stdout"),
        ("print('{')\nwhile True: print('\"m\": \"' + 'x' * 9999 + '\",')", "an object on stdout"),
    ],
)
def test_an_answer_without_end_is_bounded_and_not_waited_for(one, monkeypatch, code, what):
    monkeypatch.setattr(sinks, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(printed_row, "MAX_BYTES", 1 << 20)
    [error] = one(f"import sys\n{code}")(items("a"))
    assert f"{what} has more than 1 MiB" in str(error)


def test_a_node_without_the_program_fails_as_it_loads(tmp_path, monkeypatch):
    with pytest.raises(SlurmGPUError, match=r"no program '\./gone'"):
        loaded(tmp_path, monkeypatch, run=["./gone", "{text}"])


@pytest.mark.parametrize("now", [None, "no #! line any more"])
def test_of_a_script_that_has_changed_since_it_was_submitted_the_copy_is_looked_at(tmp_path, monkeypatch, now):
    (tmp_path / "kept").write_text("#!/bin/sh\necho '{\"n\": 1}'\n")
    (tmp_path / "kept").chmod(0o755)
    if now is not None:
        (tmp_path / "x").write_text(now)
    copies = {tmp_path / "x": tmp_path / "kept"}
    monkeypatch.setattr(PresentFiles, "as_submitted", lambda _, path: copies.get(path, path))
    assert loaded(tmp_path, monkeypatch, run=["./x", "{text}"])(items("a")) == [{"n": 1}]
    copies.clear()
    with pytest.raises(SlurmGPUError, match="no program" if now is None else "not executable"):
        loaded(tmp_path, monkeypatch, run=["./x", "{text}"])


def test_a_module_that_python_runs_by_name_runs_as_it_was_submitted(tmp_path, monkeypatch):
    run = "import json, sys\nfrom .lib import N\n"
    run += "print(json.dumps({'n': N, 'said': sys.argv[1:], 'name': __spec__.name}))\n"
    for folder, number in (("now", 2), ("code/9f2c", 1)):
        tool = tmp_path / folder / "tool"
        tool.mkdir(parents=True)
        for name, source in (("__init__", ""), ("run", run), ("lib", f"N = {number}\n")):
            (tool / f"{name}.py").write_text(source)
    now, kept = tmp_path / "now", tmp_path / "code" / "9f2c"
    line = [sys.executable, "-S", "-m", "tool.run", "-m", "{text}"]
    columns = {"n": "int32", "said": "json", "name": "text"}
    command = loaded(now, monkeypatch, run=line, columns=columns)
    assert command(items("a")) == [{"n": 2, "said": ["-m", "a"], "name": "tool.run"}]
    assert command.scripts == [Path("tool/run.py"), Path("tool/__init__.py")]
    copies = {now / "tool/run.py": kept / "tool/run.py"}
    monkeypatch.setattr(PresentFiles, "as_submitted", lambda _, path: copies.get(path, path))
    assert command(items("a")) == [{"n": 1, "said": ["-m", "a"], "name": "tool.run"}]


def test_an_argument_may_name_a_link_that_leads_to_itself(tmp_path, monkeypatch):
    (tmp_path / "latest").symlink_to("latest")
    code = """import json, sys; print(json.dumps({{"n": len(sys.argv[1])}}))"""
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "-S", "-c", code, "latest", "{text}"])
    assert command.scripts == []
    assert command(items("a")) == [{"n": len("latest")}]


def test_the_script_of_an_entry_point_is_code_if_it_imports_modules_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "of_a_lab.py").touch()
    for name, module in (("mine", "of_a_lab"), ("theirs", "numpy")):
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import main\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert programs.entry_script("mine", str(tmp_path)) == tmp_path / "mine"
    assert [programs.entry_script(name, str(tmp_path)) for name in ("theirs", "none", "./mine")] == [None] * 3
    assert programs.entry_script("sh", None) is None


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("python -m tool.run -m slow", 2),
        ("env A=1 python3.11 -X dev -Werror -W error -m tool.run", 9),
        ("torchrun --nproc-per-node 2 -m tool.run", 4),
        ("torchrun --standalone --module tool.run", 3),
        ("accelerate launch --num_processes 2 -m tool.run", 5),
        ("python -m torch.distributed.run --nproc-per-node=2 -m tool.run", 5),
        ("deepspeed --module tool.run", 2),
        ("python score.py -m tool.run", None),
        ("torchrun --nproc-per-node 2 score.py -m tool.run", None),
        ("python -c pass -m tool.run", None),
        ("python -m pytest tests", None),
        ("grep -m tool.run", None),
        ("python -m ../tool.run", None),
    ],
)
def test_the_module_that_an_interpreter_or_a_launcher_runs_is_found(tmp_path, monkeypatch, line, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "run.py").touch()
    found = module_of(dict(enumerate(line.split())))
    assert found == (None if place is None else (place, "tool.run"))


def test_a_program_that_is_gone_is_the_workloads_fault_and_no_items_error(tmp_path, monkeypatch):
    (tmp_path / "gone").write_text("#!/bin/sh\n")
    (tmp_path / "gone").chmod(0o755)
    command = loaded(tmp_path, monkeypatch, run=["./gone", "{text}"])
    (tmp_path / "gone").unlink()
    with pytest.raises(WorkloadError, match="gone cannot be started: No such file or directory"):
        command(items("a"))


def test_a_program_that_cannot_be_started_for_a_moment_is_started_again(one, monkeypatch):
    command, errors, popen = one(LENGTH), [errno.EAGAIN, errno.ETXTBSY], subprocess.Popen

    def start(*arguments, **more):
        if errors:
            raise OSError(errors.pop(), "for a moment")
        return popen(*arguments, **more)

    monkeypatch.setattr(process, "PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(subprocess, "Popen", start)
    assert command(items("a")) == [{"n": 1}]


@pytest.mark.parametrize(
    ("number", "blamed"),
    [
        *((number, NodeError) for number in (errno.ENOMEM, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ENFILE)),
        *((number, WorkloadError) for number in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ELOOP)),
    ],
)
def test_the_node_is_at_fault_only_where_the_error_says_so(one, monkeypatch, number, blamed):
    def start(*arguments, **more):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(process, "PAUSES_S", ())
    command = one(LENGTH)
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(blamed, match=os.strerror(number)):
        command(items("a"))


def test_a_path_that_begins_with_the_packages_of_slurmgpu_is_handed_on_as_the_users(monkeypatch):
    """A module of EasyBuild sets such a one, for slurmgpu and what else it has."""
    monkeypatch.setenv("PYTHONPATH", "/a/site-packages:/mine")
    monkeypatch.setattr(submitted_program, "__file__", "/a/site-packages/slurmgpu/workloads/command/x.py")
    assert submitted_program.inherited_environment()["PYTHONPATH"] == "/a/site-packages:/mine"


def test_the_array_of_the_tasks_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    found = submitted_program.inherited_environment()
    assert [name for name in found if name.startswith(("SLURM_ARRAY_", "SLURM_JOB_ID"))] == ["SLURM_JOB_ID"]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}, set()),
        ({"RANK": "0", "WORLD_SIZE": "4"}, set()),
        ({"RANK": "3"}, set()),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, {"RANK", "WORLD_SIZE", "MASTER_ADDR"}),
        ({"MASTER_PORT": "29500"}, {"MASTER_PORT"}),
    ],
)
def test_a_program_is_no_rank_of_a_group_that_the_submitting_shell_was_in(monkeypatch, told, kept):
    for name in submitted_program.OF_A_GROUP:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert submitted_program.OF_A_GROUP & submitted_program.inherited_environment().keys() == kept


def test_the_guard_removes_a_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    guard = Guard()
    guard.remove(str(tmp_path / "folder"))
    guard._process.stdin.close()
    guard._process.wait()
    assert not (tmp_path / "folder").exists()


def test_a_process_that_does_not_end_by_sigkill_is_no_items_error(one, monkeypatch):
    monkeypatch.setattr(process, "KILL_S", 0.01)
    command, popen = one(LENGTH), subprocess.Popen

    class Stuck(popen):
        def wait(self, timeout=None):
            if timeout is None:
                return super().wait()
            raise subprocess.TimeoutExpired("stuck", timeout)

    monkeypatch.setattr(subprocess, "Popen", Stuck)
    with pytest.raises(NodeError, match="has not ended"):
        command(items("a"))


# A slice a call


def test_a_slice_gives_its_rows_in_any_order(score):
    command = score("write(row(item) for item in reversed(items))")
    assert command(items("a", "bb", "ccc")) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_slice_has_what_an_item_has(score):
    body = "write({'index': i['index'], 'n': 1, 'all': i} for i in items)"
    [item] = [Item(5, {"text": "ä", "x": [1, None, 0.5], "jpg": b"\0\xff"}, run_seed=3)]
    [row] = score(body, columns={"n": "int32", "all": "json"})([item])
    assert row["all"] == {"index": 5, "seed": item.seed, "data": {"text": "ä", "x": [1, None, 0.5], "jpg": "AP8="}}


def test_items_that_json_cannot_hold_fail_alone(score):
    asked = [Item(0, {"text": object()}), Item(1, {"text": "a"}), Item(2, {"text": "a", "x": float("-inf")})]
    error, row, infinite = score("write(map(row, items))")(asked)
    assert "the item's data cannot be written as JSON" in str(error)
    assert row == {"n": 1}
    assert (
        str(infinite)
        == "the item's data cannot be written as JSON: it has NaN or Infinity, which JSON does not have; use null"
    )


def test_a_missing_row_and_an_error_are_their_items_alone(score):
    body = "write([row(items[0]), {'index': 2, 'error': 'too long'}, {'index': 3, 'n': 5, 'error': None}])"
    first, second, third, fourth = score(body)(items("a", "b", "c", "d"))
    assert (first, fourth) == ({"n": 1}, {"n": 5})
    assert str(second) == "the command wrote no row for this item"
    assert str(third) == "too long"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", "exited with code 0, but wrote no row to {out}"),
        ("write([])", "exited with code 0, but wrote no row to {out}"),
        ("os.mkdir(path)", "exited with code 0, but wrote no row to {out}"),
        (
            "write([row(items[0]), row(items[0])])",
            "line 2 of {out} is a second row for item 0. Write one row for each item",
        ),
        ("write([{'index': 9, 'n': 1}])", "line 1 of {out} has the index 9, but this call has no such item"),
        ("write([{'n': 1}])", "line 1 of {out} has no index"),
        ("write([{'index': None, 'n': 1}])", "that differs between items: --set match=FIELD"),
        ("write([{'index': '0', 'n': 1}])", "line 1 of {out} has '0' as index"),
        ("write([{'index': True, 'n': 1}])", "line 1 of {out} has True as index"),
        ("write([[1]])", "line 1 of {out} is '[1]'; expected a JSON object"),
        ("write([{'index': 0, 'error': 1.5}])", "line 1 of {out} has 1.5 as error; expected a text"),
        ('open(path, \'w\').write(\'{"index": 0, "n": 1}\\n{"ind\')', "line 2 of {out} is '{\"ind'"),
        ("open(path, 'wb').write(b'\\xff\\n')", "line 1 of {out} is"),
        ("open(path, 'w').write('[' * 100_000)", "line 1 of {out} is '[[["),
        ("write(map(row, items)); sys.exit(4)", "exited with code 4"),
        ("write(map(row, items)); os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV"),
        ("sys.exit(f'cannot read {path}')", "exited with code 1: cannot read {out}"),
    ],
)
def test_a_slice_that_fails_has_no_rows(score, body, said):
    assert said in failing(score(body), items("a", "b"))


@pytest.mark.parametrize(
    ("form", "text", "settings", "said"),
    [
        ("{out}", '{"n": 1}\n{"n": 2}', {}, "line 1 of {out} has no index"),
        ("{out:csv}", "n\n1\n2\n", {}, "record 1 of {out} has no index"),
        ("{out}", '{"n": 1}\n{"n": 2}', {"match": "text"}, "line 1 of {out} has no 'text'"),
        ("{out:json}", '{"mean": 1.5, "rows": [{"n": 1}, {"n": 2}]}', {}, "objects. Write a list with an object for "),
        ("{out:json}", '{"rows": [{"n": 1}, {"n": 2}]}', {}, "each item, such as the one in 'rows'"),
    ],
)
def test_a_program_whose_rows_name_no_item_is_wrong_and_not_its_items(score, form, text, settings, said):
    body = f"open(path, 'w').write({text!r}) if items[0]['data']['text'] == 'a' else write(map(row, items))"
    command = score(body, form=form, **settings)
    with pytest.raises(WorkloadError) as caught:
        command(items("a", "b"))
    assert said in str(caught.value)


def test_rows_without_an_index_after_good_ones_fail_their_slice(score):
    text = '{"n": 1}\n{"n": 2}'
    command = score(f"open(path, 'w').write({text!r}) if items[0]['data']['text'] == 'b' else write(map(row, items))")
    assert command(items("a")) == [{"n": 1}]
    assert "line 1 of {out} has no index" in failing(command, items("b", "c"))


def test_a_last_line_without_its_end_counts_and_so_do_empty_ones_not(score):
    body = 'open(path, \'w\').write(\'\\n{"index": 0, "n": 1}\\n\\n{"index": 1, "n": 2}\')'
    assert score(body)(items("a", "b")) == [{"n": 1}, {"n": 2}]


def test_a_line_without_end_is_bounded(score, monkeypatch):
    monkeypatch.setattr("slurmgpu.workloads.command.output_formats.MAX_BYTES", 1 << 20)
    body = "f = open(path, 'wb'); f.truncate(600 << 20)"  # a hole: 600 MB without an end of line
    assert "line 1 of {out} has more than 1 MiB" in failing(score(body), items("a"))


def test_what_a_call_leaves_is_removed(score, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    score("write(map(row, items))")(items("a"))
    failing(score("write(map(row, items)); sys.exit(1)"), items("a"))
    assert not list((tmp_path / "temporary").iterdir())


def test_what_fails_without_room_for_temporary_files_is_no_items_error(score, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    command = score("write([row(item) for item in items if item['data']['text'] == 'a'])")
    monkeypatch.setattr("slurmgpu.workloads.command.caller.LEAST_BYTES", 1 << 60)  # more than is left
    assert command(items("a")) == [{"n": 1}]
    said = rf"^the folder for temporary files, {folder}, is full; \S+ exited with code 0, but wrote no row"
    with pytest.raises(NodeError, match=said):
        command(items("b"))
    monkeypatch.setattr("slurmgpu.workloads.command.caller.LEAST_BYTES", 0)
    assert "temporary" not in failing(command, items("b"))
    folder.rmdir()
    with pytest.raises(NodeError, match=f"^the folder for temporary files, {folder}, cannot be used: No such file"):
        command(items("a"))


def test_a_lack_of_memory_is_one_so_that_batches_stay_small(score):
    command = score("sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')")
    with pytest.raises(MemoryError):
        command(items("a", "b"))


def test_csv_has_typed_columns(score):
    columns = {
        "n": "int32",
        "x": "float64",
        "ok": "bool",
        "name": "text",
        "v": "float32[2]",
        "r": "int32[]",
        "j": "json",
    }
    body = (
        "f = csv.writer(open(path, 'w', newline=''))\n"
        "f.writerow(['name', 'index', 'n', 'x', 'ok', 'v', 'r', 'j', 'error'])\n"
        "f.writerow(['a, \"b\"\\nc', 1, 3, 'nan', 'True', '[1, 2]', '[]', '{\"a\": 1}', ''])\n"
        "f.writerow(['', 0, 'x', 1, 1, '[1, 2]', '[]', '1', ''])\n"
        "f.writerow(['', 2, '', '', '', '', '', '', 'too long'])"
    )
    first, second, third = score(body, form="{out:csv}", columns=columns)(items("a", "b", "c"))
    assert str(first) == "column 'n': found 'x', which does not fit the column's type"
    assert np.isnan(second.pop("x"))
    assert second == {"name": 'a, "b"\nc', "n": 3, "ok": True, "v": [1, 2], "r": [], "j": {"a": 1}}
    assert str(third) == "too long"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("index,n\n0,1,2\n", "does not have as many fields as the header"),
        ("index,n\n0\n", "does not have as many fields as the header"),
        ("n\n1\n", "record 1 of {out} has no index"),
        ("index,n\nzero,1\n", "record 1 of {out} has 'zero' as index"),
        ('index,n\n0,"1\n', "{out} is not CSV in UTF-8"),
        ("index,n\n", "wrote no row"),
        ("index,n,n\n0,1,2\n", "the header of {out} has the column 'n' twice"),
        ("index,n,index\n0,1,0\n", "the header of {out} has the column 'index' twice"),
        ("index,n\n1_0,1\n", "record 1 of {out} has '1_0' as index"),
    ],
)
def test_csv_that_is_none_fails_its_slice(score, text, said):
    assert said in failing(score(f"open(path, 'w').write({text!r})", form="{out:csv}"), items("a"))


def test_npz_has_arrays_and_texts(tmp_path, monkeypatch):
    code = (
        "import sys, numpy as np; np.savez(sys.argv[2], index=[2, 0, 1], v=np.arange(6, dtype='f4').reshape(3, 2), "
        "name=['c', 'a', 'b'], ok=[True, False, True], error=['', '', 'bad'])"
    )
    run = [sys.executable, "-c", code, "{in}", "{out:npz}"]
    columns = {"v": "float32[2]", "name": "text", "ok": "bool"}
    first, second, third = loaded(tmp_path, monkeypatch, run=run, columns=columns)(items("a", "b", "c"))
    assert (first["v"].tolist(), first["name"], first["ok"]) == ([2, 3], "a", False)
    assert str(second) == "bad"
    assert third["name"] == "c"


def test_false_and_null_are_no_error(one):
    for error in ("false", "null", '""'):
        assert one(f'print(\'{{"n": 1, "error": {error}}}\')')(items("a")) == [{"n": 1}]


TABLE = """
import csv, sys
rows = list(csv.DictReader(open(sys.argv[1], newline="", encoding="utf-8", errors="surrogateescape")))
with open(sys.argv[2], "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
    out = csv.DictWriter(file, ["", *rows[0], "n", "seen"])
    out.writeheader()
    out.writerows({"": at, **row, "n": len(row["text"]), "seen": ascii([*row.values()])} for at, row in enumerate(rows))
"""


def test_a_carriage_return_ends_no_line_of_a_table(tmp_path, monkeypatch):
    (tmp_path / "table.py").write_text(TABLE)
    run = [sys.executable, "-S", "table.py", "{in:csv}", "{out:csv}"]
    command = loaded(tmp_path, monkeypatch, run=run, columns={"n": "int32", "seen": "text"})
    rows = command([Item(0, {"text": "a\rb"}), Item(1, {"text": "c"})])
    assert [row["seen"] for row in rows] == [r"['0', 'a\rb']", "['1', 'c']"]


def test_a_script_that_reads_a_table_and_writes_it_back_with_a_column_more_is_taken_in(tmp_path, monkeypatch):
    (tmp_path / "table.py").write_text(TABLE)
    run = [sys.executable, "-S", "table.py", "{in:csv}", "{out:csv}"]
    command = loaded(tmp_path, monkeypatch, run=run, columns={"n": "int32", "seen": "text"})
    when, path = datetime.date(2026, 11, 26), os.fsdecode(b"\xff.png")
    asked = [
        Item(5, {"text": 'a "b",\nc', "x": None, "day": when}),
        Item(7, {"text": path, "x": [1, True]}),
        Item(8, {"text": "a", "error": "from an earlier run"}),
        Item(9, {"text": "\ud800", "index": 1}),
    ]
    first, second, third, fourth = command(asked)
    assert (first["n"], eval(first["seen"])) == (8, ["5", 'a "b",\nc', "", "2026-11-26"])
    assert (second["n"], eval(second["seen"])) == (5, ["7", path, "[1, true]", ""])
    assert str(third) == (
        "it has a field 'error', a name that {in:csv} reserves. Use {in}, whose lines have the fields under data."
    )
    assert str(fourth).endswith("Use {in}, whose lines have the fields under data, or --set match=index.")
    [row] = command([Item(5, {"text": "\ud800"})])
    assert row["seen"] == ascii(["5", "\\ud800"])


LINES = """
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
with open(sys.argv[2], "w") as file:
    for row in reversed(rows):
        print(json.dumps({**row, "n": len(row["text"]), "seen": [*row, sys.argv[1][-9:]]}), file=file)
"""


def test_a_script_that_reads_json_lines_and_writes_them_back_with_a_field_more_is_taken_in(tmp_path, monkeypatch):
    (tmp_path / "lines.py").write_text(LINES)
    run = [sys.executable, "-S", "lines.py", "{in:jsonl}", "{out}"]
    command = loaded(tmp_path, monkeypatch, run=run, columns={"n": "int32", "seen": "json", "x": "json"})
    asked = [
        Item(5, {"text": "a\nß", "x": {"y": [None]}, "data": 1}),
        Item(7, {"text": "\udcff", "x": 1.5}),
        Item(8, {"text": "a", "index": 3}),
    ]
    first, second, third = command(asked)
    assert first == {"n": 3, "seen": ["index", "text", "x", "data", "/in.jsonl"], "x": {"y": [None]}}
    assert second == {"n": 1, "seen": ["index", "text", "x", "/in.jsonl"], "x": 1.5}
    assert str(third).startswith("it has a field 'index', a name that {in:jsonl} reserves. Use")


OVERWRITING = """
import csv, json, sys
if sys.argv[1].endswith("csv"):
    rows, write = [*csv.DictReader(open(sys.argv[1]))], lambda file, row: csv.writer(file).writerow(row.values())
else:
    rows, write = [json.loads(line) for line in open(sys.argv[1])], lambda file, row: print(json.dumps(row), file=file)
for row in rows:
    row["n"] = len(row["text"])
    if row["id"] in ("b", "c"):
        row["text"] = {"b": "the answer", "c": ""}[row["id"]]
    row |= eval(row.get("written") or "{}")
with open(sys.argv[2], "w") as file:
    if sys.argv[1].endswith("csv"):
        write(file, dict(zip(rows[0], rows[0])))
    for row in rows:
        write(file, row)
"""


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_field_that_a_script_overwrites_is_a_result_and_not_left_out(tmp_path, monkeypatch, form):
    (tmp_path / "answer.py").write_text(OVERWRITING)
    run = [sys.executable, "-S", "answer.py", f"{{in:{form}}}", "{out:csv}" if form == "csv" else "{out}"]
    asked = [Item(number, {"id": name, "text": "a question"}) for number, name in enumerate("abc")]
    answers = loaded(tmp_path, monkeypatch, run=run, match="id")(asked)
    assert answers[0] == answers[2] == {"n": 10}
    assert answers[1] == {"n": 10, "text": "the answer"}  # `text` is no column, which fails the item
    columns = {"n": "int32", "text": "text"}
    answers = loaded(tmp_path, monkeypatch, run=run, match="id", columns=columns)(asked)
    assert [row["text"] for row in answers] == ["a question", "the answer", ""]


PANDAS = """
import sys, pandas
lines = {"orient": "records", "lines": True}
table = pandas.read_csv(sys.argv[1]) if sys.argv[1].endswith("csv") else pandas.read_json(sys.argv[1], **lines)
table["n"] = table["text"].str.len()
for name in sys.argv[3:]:
    table[name] = table[name].astype(object).map(lambda value: [value])
table.to_csv(sys.argv[2]) if sys.argv[2].endswith("csv") else table.to_json(sys.argv[2], **lines)
"""


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_field_that_pandas_writes_in_its_own_way_is_the_one_that_it_read(tmp_path, monkeypatch, form):
    pytest.importorskip("pandas")
    (tmp_path / "table.py").write_text(PANDAS)
    run = [sys.executable, "table.py", f"{{in:{form}}}", f"{{out:{form}}}"]
    item = {"id": "007", "text": "a\r\nb", "flag": True, "whole": 3, "number": 1.2345678901e-8, "none": None}
    item |= {"created_at": "2026-11-26", "date": "2026-11-26T10:00:00+01:00", "some": [0.12345678901234567, {"x": 1}]}
    asked = [Item(0, item), Item(1, {**item, "whole": None, "flag": None, "more": "text"})]
    assert loaded(tmp_path, monkeypatch, run=run)(asked) == [{"n": 4}, {"n": 4}]
    for name in ("whole", "created_at", "some"):
        assert loaded(tmp_path, monkeypatch, run=[*run, name])(asked[:1])[0].keys() == {"n", name}


@pytest.mark.parametrize(
    ("given", "written", "result"),
    [
        (1700000000.4, "1700000000.4", 1700000000.9),  # seconds
        ("1700000000123", 1700000000123.0, 1700000000124),
        (12345678901234567890.0, 1.234567890e19, 1.2345679e19),
        ("2026-11-26T10:00:00.123956", 1795687200123, "2026-11-26T10:00:01.123956"),
        ("2026-11-26T10:00:00", "2026-11-26T10:00:00.000", "2026-11-26T10:00:00.100"),
    ],
)
def test_a_time_or_an_id_that_differs_little_from_the_items_is_a_result(given, written, result):
    assert written_back.is_written_back("", written, given)
    assert not written_back.is_written_back("", result, given)


@pytest.mark.parametrize("forms", ["jsonl jsonl", "jsonl csv", "csv csv", "csv jsonl"])
def test_tables_and_dates_that_pandas_writes_are_those_that_it_read(tmp_path, monkeypatch, forms):
    pytest.importorskip("pandas")
    (tmp_path / "table.py").write_text(PANDAS)
    read, written = forms.split()
    run = [sys.executable, "table.py", f"{{in:{read}}}", f"{{out:{written}}}"]
    item = {"text": "four", "meta": {"b": [1, None], "a": "é"}, "tags": ["x", "y"], "none": None}
    item |= {"timestamp": 1700000000, "sent_at": "2026-11-26T10:00:00Z"}
    if written == "jsonl":
        item |= {"created_at": "Wed Oct 10 20:19:24 +0000 2018", "date": "Nov 26, 2026"}
    assert loaded(tmp_path, monkeypatch, run=run)([Item(0, item), Item(1, item)]) == [{"n": 4}, {"n": 4}]
    found = loaded(tmp_path, monkeypatch, run=[*run, "meta", "timestamp"])([Item(0, item)])
    assert found[0].keys() == {"n", "meta", "timestamp"}


@pytest.mark.parametrize(
    ("name", "value", "given", "is_same"),
    [
        ("text", "a\nb", "a\rb", True),
        ("text", "a question", " a  question\n", True),  # of a script that strips
        ("text", "a question", "aquestion", False),
        ("score", "NA", None, True),  # of R
        ("answer", "NA", "which?", False),
        ("score", "None", None, True),  # of an f-string
        ("meta", {"a": 1, "b": None}, {"a": 1}, True),  # of a table of structs
        ("meta", {"a": 1, "b": 2}, {"a": 1}, False),
        ("meta", {}, {"a": 1}, False),
        ("meta", '{"b":[1],"a":"é"}', {"a": "é", "b": [1]}, True),
        ("meta", {"a": 1, "b": 2}, {"a": 1, "b": 3}, False),
        ("tags", "['a', 'c']", ["a", "b"], False),
        ("tags", ["a", "c"], ["a", "b"], False),
        ("tags", ["a"], ["a", "b"], False),
        ("tags", ["a"], "a", False),
        ("meta", {"a": 1}, [1], False),
        ("meta", [1], {"a": 1}, False),
        ("score", "high", 5, False),
        ("score", 5, "high", False),
        ("score", 0.1234567891, 0.12345678912345, True),
        ("score", 0.123456789, 0.1234567895, False),
        ("n", 1.23456789e17, 123456789012345678, True),
        ("n", 1.2345678e17, 123456789012345678, False),
        ("created_at", 1700000000000, 1700000000, True),
        ("created_at", 1700000000123, 1700000000123000, True),
        ("created_at", 1700000000123, 1700000000123000000, True),
        ("created_at", 1700000000124, 1700000000123000, False),
        ("seconds", 3000, 3, False),
        ("created_at", 1543190400000, 1700000000, False),
        ("date", "2026-11-26", "Nov 26, 2026", False),  # a script that reads dates
        ("text", 1700000000, "Nov 26, 2026", False),
        ("day", datetime.date(2026, 11, 26), "2026-11-26", True),
        ("seen", datetime.datetime(2026, 11, 26, 8, tzinfo=datetime.timezone.utc), "2026-11-26T09:00:00+01:00", True),
        ("seen", datetime.datetime(2026, 11, 26, 8), "2026-11-26 08:00:00", True),
        ("seen", datetime.datetime(2026, 11, 26, 8), "2026-11-26", False),
        ("tag", datetime.date(2026, 11, 26), "Nov 26, 2026", False),
    ],
)
def test_a_value_that_is_written_in_another_way_is_the_items_and_another_is_not(name, value, given, is_same):
    assert written_back.is_written_back(name, value, given) is is_same


LIST = """
import json, sys
rows = json.load(open(sys.argv[1]))
seen = [list(row) for row in rows]
json.dump([{**row, "n": len(row["text"]), "seen": seen} for row in reversed(rows)], open(sys.argv[2], "w"), indent=1)
"""


def test_a_script_that_reads_a_list_and_writes_it_back_with_a_field_more_is_taken_in(tmp_path, monkeypatch):
    (tmp_path / "list.py").write_text(LIST)
    run = [sys.executable, "-S", "list.py", "{in:json}", "{out:json}"]
    command = loaded(tmp_path, monkeypatch, run=run, columns={"n": "int32", "seen": "json"})
    seen = [["index", "text"], ["index", "text"]]
    assert command(items("a", "ßß")) == [{"n": 1, "seen": seen}, {"n": 2, "seen": seen}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"index": 0, "n": 1}', "{out} is not JSON: "),
        ('{"index": 0, "n": 1}', "{out} is JSON, but not a list of objects"),
        ('[{"index": 0, "n": 1}, 2]', "{out} is JSON, but not a list of objects"),
        ('[{"index": 0, "n": 1}, {"n": 2}]', "object 2 of {out} has no index"),
        ("[]", "wrote no row"),
    ],
)
def test_json_that_is_no_list_of_rows_fails_its_slice(score, text, said):
    assert said in failing(score(f"open(path, 'w').write({text!r})", form="{out:json}"), items("a", "b"))


BY_ID = """
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
open("calls", "a").write(f"{len(rows)} ")
with open(sys.argv[2], "w") as file:
    for number, row in enumerate(reversed(rows)):
        print(json.dumps({"index": number, "id": row["id"], "n": len(row["text"])}), file=file)
"""


@pytest.fixture
def by_id(tmp_path, monkeypatch):
    """A workload of slices, whose script writes the `id` of each item, in another order, and an index of its own."""

    def make(code=BY_ID, **settings):
        (tmp_path / "by_id.py").write_text(code)
        run = [sys.executable, "-S", "by_id.py", "{in:jsonl}", "{out}"]
        return loaded(tmp_path, monkeypatch, run=run, match="id", **settings)

    return make


def test_rows_are_matched_by_a_field_that_the_script_echoes(by_id):
    asked = [Item(40 + n, {"id": name, "text": "a" * n}) for n, name in enumerate(["q0", 7, "8", True, [1]])]
    command = by_id()
    assert command.fields == ("id",)
    assert command(asked) == [{"n": n} for n in range(5)]


def test_with_match_a_line_has_what_the_item_has_also_a_field_index(by_id):
    code = BY_ID.replace('"n": len(row["text"])', '"n": row.get("index", -1), "text": row["text"]')
    asked = [Item(40, {"id": "a", "text": "", "index": 3}), Item(41, {"id": "b", "text": ""})]
    assert by_id(code)(asked) == [{"n": 3}, {"n": -1}]
    keeps = {"n": "int32", "id": "text", "text": "text"}
    assert by_id(code, columns=keeps)(asked)[0] == {"n": 3, "id": "a", "text": ""}


def test_items_that_share_what_rows_are_matched_by_are_in_different_calls(by_id, tmp_path, caplog):
    asked = [Item(40 + n, {"id": name, "text": "a" * n}) for n, name in enumerate(["a", "b", "a", "c", "a", "7", 7])]
    assert by_id()(asked) == [{"n": n} for n in range(7)]
    assert (tmp_path / "calls").read_text() == "4 2 1 "
    assert "several items have the same 'id', which match needs: calling 3 times" in caplog.text


def test_an_item_without_what_rows_are_matched_by_fails_alone(by_id):
    first, second, third = by_id()([Item(0, {"text": ""}), Item(1, {"id": None}), Item(2, {"id": "a", "text": "a"})])
    assert str(first) == str(second) == "the item has no field 'id', which match needs"
    assert third == {"n": 1}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"index": 0, "n": 1}, "line 1 of {out} has no 'id', which match needs to find its item"),
        ({"id": None, "n": 1}, "line 1 of {out} has no 'id'"),
        ({"id": "q9", "n": 1}, "line 1 of {out} has 'q9' as 'id', but no item of this call has that value"),
        ({"id": "a ", "n": 1}, "line 1 of {out} has 'a ' as 'id'"),
        ({"id": float("nan"), "n": 1}, "line 1 of {out} has 'nan' as 'id'"),
        ({"id": "a", "n": 1}, "line 2 of {out} is a second row for item 0. Write one row for each item"),
    ],
)
def test_a_row_that_matches_no_item_fails_its_slice(by_id, row, said):
    n_times = 1 if row.get("id") is None else 2  # several rows that name no item are the program's fault
    code = f"import sys; open(sys.argv[2], 'w').write({json.dumps(row) + chr(10)!r} * {n_times})"
    assert said in failing(by_id(code), [Item(0, {"id": "a"}), Item(1, {"id": "b"})])


@pytest.mark.parametrize(("name", "written"), [("007", 7), ("7", 7.0)])
def test_a_row_whose_name_became_another_number_is_told_of_its_item(by_id, name, written):
    code = f"import sys; open(sys.argv[2], 'w').write({json.dumps({'id': written, 'n': 1})!r})"
    said = failing(by_id(code), [Item(0, {"id": "b"}), Item(1, {"id": "5"}), Item(2, {"id": name})])
    assert (
        f"has '{written}' as 'id', but no item of this call has that value; one has '{name}'. Keep 'id' a text" in said
    )


def test_a_row_without_index_is_told_of_the_field_that_it_could_be_matched_by(tmp_path, monkeypatch):
    (tmp_path / "by_id.py").write_text(BY_ID.replace('"index": number, ', ""))
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "-S", "by_id.py", "{in:jsonl}", "{out}"])
    with pytest.raises(WorkloadError, match="--set match=id"):
        command([Item(0, {"id": "a", "text": ""}), Item(1, {"id": "b", "text": ""})])


def test_a_table_and_arrays_are_matched_by_a_field_as_well(tmp_path, monkeypatch):
    (tmp_path / "table.py").write_text(
        "import csv, sys\nrows = list(csv.DictReader(open(sys.argv[1])))\nfile = csv.writer(open(sys.argv[2], 'w'))\n"
        "file.writerow(['id', 'n'])\nfile.writerows([row['id'], len(row['text'])] for row in rows)\n"
    )
    asked = [Item(5, {"id": 12, "text": "abc"}), Item(6, {"id": "x,y", "text": ""})]
    run = [sys.executable, "-S", "table.py", "{in:csv}", "{out:csv}"]
    assert loaded(tmp_path, monkeypatch, run=run, match="id")(asked) == [{"n": 3}, {"n": 0}]
    code = "import numpy, sys; numpy.savez(sys.argv[1], id=numpy.array(sys.argv[2:]), n=[1, 2])"
    run = [sys.executable, "-c", code.replace("[2:]", "[4:]"), "{out:npz}", "{start}", "{end}", "x,y", "12"]
    assert loaded(tmp_path, monkeypatch, run=run, match="id")(asked) == [{"n": 2}, {"n": 1}]


@pytest.mark.parametrize("field", ["index", "id"])
def test_a_row_of_a_table_is_matched_by_its_text_and_not_by_a_number_that_it_may_be(tmp_path, monkeypatch, field):
    code = f"import sys; open(sys.argv[2], 'w').write('{field},n\\n007,1\\n1e3,2\\n')"
    run = [sys.executable, "-c", code, "{in:csv}", "{out:csv}"]
    columns = {"n": "int32", **({"id": "float64"} if field == "id" else {})}
    command = loaded(tmp_path, monkeypatch, run=run, match=field, columns=columns)
    asked = [Item(number, {field: name}) for number, name in enumerate(["7", "007", 1000, "1e3"])]
    none, first, also_none, second = command(asked)
    assert (first["n"], second["n"]) == (1, 2)
    assert str(none) == str(also_none) == "the command wrote no row for this item"


ORDERED = """
import json, sys
import numpy as np
rows = [json.loads(line) for line in open(sys.argv[1])]
lengths = [len(row["text"]) for row in rows if row["text"] != "bad"]
"""


@pytest.fixture
def ordered(tmp_path, monkeypatch):
    """A workload of slices, whose script writes as `code` says what it makes of the rows in their order."""

    def make(code, form="{out}", **settings):
        (tmp_path / "ordered.py").write_text(ORDERED + code)
        run = [sys.executable, "ordered.py", "{in:jsonl}", form]
        return loaded(tmp_path, monkeypatch, run=run, **{"in_order": True, **settings})

    return make


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ("{out}", "open(sys.argv[2], 'w').writelines(f'{{\"n\": {n}}}\\n' for n in lengths)"),
        (
            "{out}",
            "open(sys.argv[2], 'w').writelines(json.dumps({**row, 'n': n}) + '\\n' for row, n in zip(rows, lengths))",
        ),
        ("{out:json}", "json.dump([{'index': 7, 'n': n} for n in lengths], open(sys.argv[2], 'w'))"),
        ("{out:csv}", "open(sys.argv[2], 'w').writelines(['n\\n', *(f'{n}\\n' for n in lengths)])"),
        ("{out:npz}", "np.savez(sys.argv[2], n=lengths)"),
        ("{out:npy}", "np.save(sys.argv[2], np.array(lengths, dtype='int16'))"),
    ],
)
def test_rows_may_be_matched_by_their_order_and_are_as_many_as_the_items(ordered, form, code):
    command = ordered(code, form)
    asked = [Item(5, {"text": "abc"}), Item(6, {"text": "", "index": 9}), Item(8, {"text": "a"})]
    assert command(asked) == [{"n": 3}, {"n": 0}, {"n": 1}]
    said = failing(command, [*asked, Item(9, {"text": "bad"})])
    assert "{out} has 3 rows, and in_order = true needs one for each of the 4 items of the call" in said
    assert "no row" in failing(command, [Item(9, {"text": "bad"})])


def test_rows_in_another_order_are_noticed_by_a_field_of_the_item(ordered):
    code = "print(*(json.dumps({**row, 'n': 1}) for row in reversed(rows)), sep='\\n', file=open(sys.argv[2], 'w'))"
    said = failing(ordered(code), items("a", "b"))
    assert "line 1 of {out} has another 'text' than its item: the rows are not in the order of the items" in said
    columns = {"n": "int32", "text": "text"}
    assert ordered(code, columns=columns)(items("a", "b")) == [{"n": 1, "text": "b"}, {"n": 1, "text": "a"}]


IN_PARQUET = """
import sys
import pyarrow as pa
from pyarrow import parquet

table = parquet.read_table(sys.argv[1])
texts = table["text"].to_pylist()
"""


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """A workload of slices, whose script writes as `code` says what it makes of a table."""
    pytest.importorskip("pyarrow")

    def make(code, **settings):
        (tmp_path / "table.py").write_text(IN_PARQUET + code)
        run = [sys.executable, "table.py", "{in:parquet}", "{out:parquet}"]
        return loaded(tmp_path, monkeypatch, run=run, **settings)

    return make


def test_a_program_may_read_and_write_parquet(parquet):
    code = "lengths = pa.array([len(text) for text in texts])\n"
    code += (
        "parquet.write_table(table.append_column('n', lengths).take(list(reversed(range(len(texts))))), sys.argv[2])"
    )
    data = [
        {"text": "a", "id": 7, "odd": 1, "list": [0.5], "day": datetime.date(2026, 11, 29), "raw": b"x"},
        {"text": "odd \udcff", "id": None, "odd": "one", "list": [], "day": None, "raw": None},
        {"text": ""},
    ]
    command = parquet(code)
    assert command([Item(index, each) for index, each in enumerate(data)]) == [{"n": 1}, {"n": 10}, {"n": 0}]
    said = "told = {field.name: str(field.type) for field in table.schema}\nassert told == {}, told"
    said = failing(parquet(said), [Item(index, each) for index, each in enumerate(data)])
    assert "'index': 'int64', 'text': 'large_string', 'id': 'int64', 'odd': 'large_string', 'list'" in said


def test_rows_in_parquet_may_be_in_order_and_lack_numbers(parquet):
    code = "made = {'x': [None, 2.5], '__index_level_0__': [4, 7], 'error': [None, None]}\n"
    command = parquet(
        f"{code}parquet.write_table(pa.table(made), sys.argv[2])", columns={"x": "float32"}, in_order=True
    )
    first, second = command(items("a", "b"))
    assert math.isnan(first["x"])
    assert second == {"x": 2.5}


def test_parquet_that_is_none_fails_its_slice(parquet):
    said = failing(parquet("open(sys.argv[2], 'w').write('none')"), items("a", "b"))
    assert "{out} is not a Parquet file: " in said


def test_an_array_is_the_value_of_a_call_of_one_item(tmp_path, monkeypatch):
    code = "import sys, numpy as np; np.save(sys.argv[2], np.arange(int(sys.argv[1]), dtype='float16'))"
    run = [sys.executable, "-c", code, "{text}", "{out:npy}"]
    command = loaded(tmp_path, monkeypatch, run=run, columns={"v": "float16[]"})
    assert [row["v"].tolist() for row in command(items("3", "1"))[:1]] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("np.savez(sys.argv[2], n=lengths); import os; os.replace(sys.argv[2] + '.npz', sys.argv[2])", "use {out:npz}"),
        ("open(sys.argv[2], 'w').write('none')", "{out} is not an npy file of numbers or texts: "),
        ("np.save(sys.argv[2], np.array(3))", "{out} is a single number; expected an array with a row for each item"),
        ("np.save(sys.argv[2], np.array([None, None]))", "{out} is not an npy file of numbers or texts: Object arrays"),
    ],
)
def test_npy_that_is_none_fails_its_slice(ordered, code, said):
    assert said in failing(ordered(code, "{out:npy}"), items("a", "b"))


def test_an_integer_in_csv_is_what_it_is_in_json(score):
    texts = ["3", "-3.0", "1e3", "1_0", "1.5", "9007199254740992.0", "nan", "inf", "", "9007199254740993"]
    rows = "".join(f"{index},{text}\n" for index, text in enumerate(texts))
    body = f"open(path, 'w').write({'index,n' + chr(10) + rows!r})"
    found = score(body, form="{out:csv}", columns={"n": "int64"})(items(*texts))
    assert [row["n"] for row in found if not isinstance(row, ItemError)] == [3, -3, 1000, 9007199254740993]
    assert [str(row) for row in found[3:9]] == [
        f"column 'n': found {text!r}, which does not fit the column's type" for text in texts[3:9]
    ]


def test_an_output_that_may_not_be_read_fails_its_slice(score, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setitem(output_formats.READERS, "jsonl", denied)
    assert "failed: {out} cannot be read: Permission denied" in failing(score("write(map(row, items))"), items("a"))


COMPRESSED = "np.savez_compressed(path, index=[0], n=np.zeros(9999)); data = bytearray(open(path, 'rb').read()); "
CLAIMING = (
    "import io; head = io.BytesIO(); "
    "np.lib.format.write_array_header_1_0(head, {'descr': '<f8', 'fortran_order': False, 'shape': (10**15,)}); "
    "zipfile.ZipFile(path, 'w').writestr('n.npy', head.getvalue())"
)
LZMA = (
    "file = zipfile.ZipFile(path, 'w', zipfile.ZIP_LZMA); file.writestr('n.npy', bytes(9999)); file.close(); "
    "data = bytearray(open(path, 'rb').read()); data[45:60] = bytes(15); open(path, 'wb').write(data)"
)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("np.savez(path, index=[0, 0], n=[1])", "different lengths"),
        ("np.savez(path, n=[1])", "row 1 of {out} has no index"),
        ("np.savez(path, index=[0], n=[None])", "not an npz file"),
        ("np.savez(path, index=[0], n=[1], error=[b'bad'])", "as error; expected a text"),
        ("np.savez(path, index=[0], n=[1], error=[np.nan])", "as error; expected a text"),
        ("np.savez(path, index=[0], n=[1], error=[['a', 'b']])", "as error; expected a text"),
        ("np.savez(path, index=[[0]], n=[1])", "as index. Copy the index of the item from {in}"),
        ("np.save(open(path, 'wb'), [1])", "one array without a name"),
        ("zipfile.ZipFile(path, 'w').writestr('n.txt', 'a')", "different lengths"),
        (COMPRESSED + "i = data.find(b'n.npy') + 25; data[i] ^= 255; open(path, 'wb').write(data)", "not an npz file"),
        (COMPRESSED + "i = data.rfind(b'PK\\1\\2'); data[i + 8] |= 1; open(path, 'wb').write(data)", "not an npz file"),
        (
            COMPRESSED + "i = data.rfind(b'PK\\1\\2'); data[i + 10] = 99; open(path, 'wb').write(data)",
            "not an npz file",
        ),
        (CLAIMING, "not an npz file of numbers and texts: Unable to allocate"),
        (LZMA, "not an npz file"),
    ],
)
def test_npz_that_is_none_fails_its_slice(tmp_path, monkeypatch, code, said):
    exec(code, {"np": np, "zipfile": zipfile, "path": str(tmp_path / "made.npz")})
    run = ["sh", "-c", 'cp made.npz "$2"', "sh", "{in}", "{out:npz}"]
    found = failing(loaded(tmp_path, monkeypatch, run=run), items("a"))
    assert "failed: " in found
    assert said in found


def test_start_and_end_name_each_stretch_without_a_gap(tmp_path, monkeypatch):
    code = (
        "import json, sys; start, end = map(int, sys.argv[1:3]); open('calls', 'a').write(f'{start} {end};')\n"
        "open(sys.argv[3], 'w').writelines(json.dumps({{'index': i, 'n': i}}) + '\\n' for i in range(start, end))"
    )
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "-S", "-c", code, "{start}", "{end}", "{out}"])
    asked = [Item(index, {}) for index in (3, 4, 5, 8, 9)]
    assert command(asked) == [{"n": index} for index in (3, 4, 5, 8, 9)]
    assert (tmp_path / "calls").read_text() == "3 6;8 10;"


@pytest.mark.parametrize(
    ("settings", "table"), [({"in_order": True}, ",n\\n0,1\\n1,2\\n"), ({"match": "id"}, ",id,n\\n0,b,2\\n1,a,1\\n")]
)
def test_rows_of_a_stretch_may_be_matched_and_have_the_index_that_pandas_writes(tmp_path, monkeypatch, settings, table):
    code = f"import sys; open(sys.argv[3], 'w').write('{table}')"
    run = [sys.executable, "-S", "-c", code, "{start}", "{end}", "{out:csv}"]
    command = loaded(tmp_path, monkeypatch, run=run, **settings)
    assert command([Item(3, {"id": "a"}), Item(4, {"id": "b"})]) == [{"n": 1}, {"n": 2}]


# A stream


def test_a_stream_answers_in_any_order_and_is_started_once(served, tmp_path):
    body = (
        "open('pid', 'a').write(f'{os.getpid()} ')\n"
        "held = globals().setdefault('held', [])\n"
        "held.append(answer)\n"
        "if len(held) == 3:\n"
        "    for each in held[::-1]: print(json.dumps(each))\n"
        "    held.clear()"
    )
    command = served(body)
    for _ in range(2):
        assert command(items("a", "bb", "ccc")) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert len(set((tmp_path / "pid").read_text().split())) == 1


ANSWER = "print(json.dumps(answer), flush=True)"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('no more')", "exited with code 1: no more"),
        ("os._exit(0)", "exited with code 0"),
        ("os.kill(os.getpid(), 11)", "died by SIGSEGV"),
        ("print('Loading', flush=True)", "failed: a line of stdout is 'Loading'; expected a JSON object"),
        ("print(json.dumps({**answer, 'index': 9}), flush=True)", "has the index 9, but this call"),
        ("print('{\"index\": 0, ', end='', flush=True); os._exit(0)", "exited with code 0"),
        ("os.close(1); time.sleep(1000)", "closed its stdout and went on"),
    ],
)
def test_a_stream_that_fails_is_started_again_for_the_next_call(served, monkeypatch, body, said):
    monkeypatch.setattr("slurmgpu.workloads.command.stream.GRACE_S", 0.2)
    command = served(f"if item['data']['text'] != 'bad':\n    {ANSWER}\nelse:\n    {body}")
    asked = items("bad", "b")
    assert said in failing(command, asked)
    assert command(asked[1:]) == [{"n": 1}]
    assert said in failing(command, asked[:1])


@pytest.mark.parametrize("pause_s", [0, 0.3])
def test_a_stream_that_answers_twice_fails_its_call_and_no_later_one(served, pause_s):
    command = served(f"{ANSWER}\nif item['index'] == 0:\n    time.sleep({pause_s}); {ANSWER}")
    first, second = items("a", "bb")
    assert "is a second row for item 0" in failing(command, [first, second])
    assert command([first]) == [{"n": 1}]
    assert command([second]) == [{"n": 2}]


def test_what_a_stream_prints_with_its_last_answer_fails_no_later_call(served):
    command = served("sys.stdout.write(json.dumps(answer) + '\\nbye\\n'); sys.stdout.flush()")
    assert command(items("a")) == [{"n": 1}]
    assert command(items("bb")) == [{"n": 2}]


def test_a_stream_that_ends_with_its_last_answer_has_given_it(served):
    command = served(f"{ANSWER}\nif item['index'] == 1: os._exit(3)")
    assert command(items("a", "bb")) == [{"n": 1}, {"n": 2}]
    assert "exited with code 3" in failing(command, items("a", "bb", "ccc"))
    assert command(items("a")) == [{"n": 1}]


def test_a_stream_that_has_ended_before_its_answer_is_read_has_given_it(served, monkeypatch):
    send = Child.send

    def send_and_wait(self, data):
        send(self, data)
        while not self.has_ended():
            self._write() if self._unsent else time.sleep(0.01)

    monkeypatch.setattr(Child, "send", send_and_wait)
    assert served(f"{ANSWER}\nos._exit(3)")(items("a")) == [{"n": 1}]


def test_a_stream_that_hangs_is_killed_and_started_again(served):
    command = served(f"if item['data']['text'] == 'bad': time.sleep(1000)\n{ANSWER}", timeout_s=5.0)
    assert "did not answer within timeout_s = 5" in failing(command, items("a", "bad"))
    assert command(items("a")) == [{"n": 1}]


def test_a_stream_that_died_between_calls_is_started_again(served, tmp_path):
    command = served(f"open('pid', 'w').write(str(os.getpid()))\n{ANSWER}")
    command(items("a"))
    os.kill(pid := int((tmp_path / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: has_ended(pid), "its end")
    assert command(items("a")) == [{"n": 1}]


def test_a_stream_that_does_not_get_ready_again_is_no_items_error(served, tmp_path):
    head = "import os, sys\nif os.path.exists('gone'): sys.exit('no model')\n" + SERVE
    command = served("sys.exit('no more')", head=head)
    (tmp_path / "gone").touch()
    assert "no more" in failing(command, items("a"))
    with pytest.raises(NodeError, match="no model"):
        command(items("a"))


def test_a_batch_by_which_a_stream_dies_that_has_served_others_is_sent_once_more(served):
    command = served(f"n = globals().get('n', 0) + 1\nif n == 2: sys.exit('leaked')\n{ANSWER}")
    assert command(items("a")) == [{"n": 1}]
    assert command(items("bb")) == [{"n": 2}]


def test_a_stream_ends_by_itself(served, tmp_path):
    head = (
        "import atexit, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "atexit.register(lambda: (time.sleep(0.1), open('ended', 'w')))\n" + SERVE
    )
    command = served(ANSWER, head=head)
    command(items("a"))
    command._stream.close()
    assert (tmp_path / "ended").exists()


def test_a_stream_that_is_not_ready_is_told(served, monkeypatch, caplog):
    monkeypatch.setattr("slurmgpu.workloads.command.stream.TOLD_AFTER_S", 0.0)
    caplog.set_level("INFO")
    served(ANSWER)
    assert 'waiting for {"ready": true} on the stdout of' in caplog.text


def test_a_stream_that_is_not_ready_is_told_by_status(tmp_path, monkeypatch):
    monkeypatch.setattr("slurmgpu.workloads.command.stream.TOLD_AFTER_S", 0.0)
    monkeypatch.chdir(tmp_path)
    told = []
    run = [sys.executable, "-S", "-c", "input()"]
    command = Command(run=run, columns={"n": "int32"}, stream=True)

    def tell(text):
        told.append(text)
        raise KeyboardInterrupt  # it would wait for ever

    with pytest.raises(KeyboardInterrupt):
        command.load(TaskContext("cpu", 0, tmp_path, tell=tell))
    assert told == [f'waiting for {{"ready": true}} on the stdout of {Path(sys.executable).name}']


def test_what_serve_answers_by_reads_no_requests(tmp_path, monkeypatch):
    (tmp_path / "serve.py").write_text(
        "import subprocess, slurmgpu\n"
        "slurmgpu.serve(lambda data: {'n': len(subprocess.run(['cat'], stdout=subprocess.PIPE).stdout)})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "serve.py"], stream=True, timeout_s=100.0)
    assert command(items("a", "b")) == [{"n": 0}] * 2
    command._stream.close()


def test_neither_a_megabyte_on_stderr_nor_one_of_requests_blocks_a_stream(served):
    body = f"sys.stderr.write('x' * (1 << 20) + '\\n')\nanswer['n'] = len(line)\n{ANSWER}"
    asked = items(*(["y" * (1 << 20)] * 4))
    assert all(row["n"] > 1 << 20 for row in served(body, timeout_s=60.0)(asked))


def test_a_line_of_a_stream_without_end_is_bounded(served, monkeypatch):
    monkeypatch.setattr(sinks, "MAX_BYTES", 1 << 20)
    command = served("while True: sys.stdout.write('x' * (1 << 16))")
    assert "a line of stdout has more than 1 MiB" in failing(command, items("a"))


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("import sys; sys.exit('no model')", "exited with code 1: no model"),
        ("print('Loading', flush=True)", 'expected {"ready": true}, which slurmgpu.serve writes. Print everything'),
        ("print('{\"ready\": false}', flush=True)", "the first line of stdout is '{\"ready\": false}'; expected"),
        ("pass", "exited with code 0"),
    ],
)
def test_a_stream_that_does_not_begin_is_an_error_of_loading(served, head, said):
    with pytest.raises(SlurmGPUError) as caught:
        served("", head=f"{head}\nif 0:\n    pass\n")
    assert said in str(caught.value)


def test_of_an_error_stderr_is_that_of_its_call(served):
    command = served(
        "print('about', item['data']['text'], file=sys.stderr)\n"
        f"if item['data']['text'] == 'bad': sys.exit(1)\n{ANSWER}"
    )
    command(items("a"))
    assert str(failing(command, items("bad"))).endswith("exited with code 1: about bad")


def test_serve_answers_by_a_function(tmp_path, monkeypatch, capfd):
    (tmp_path / "serve.py").write_text(
        "import sys, numpy as np, slurmgpu\n"
        "def score(data, seed):\n"
        "    print('scoring', data['text'])\n"
        "    if data['text'] == 'bad':\n"
        "        raise ValueError('too bad')\n"
        "    if data['text'] == 'twice':\n"
        "        return {'n': {1: 1, '1': 2}}\n"
        "    return {'n': len(data['text']), 'seed': seed % 1000, 'v': np.float32([1, 2])}\n"
        "slurmgpu.serve(score)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    columns = {"n": "int32", "seed": "int32", "v": "float32[2]"}
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "serve.py"], stream=True, columns=columns)
    asked = items("a", "bad", "ccc", "twice")
    first, second, third, fourth = command(asked)
    assert first == {"n": 1, "seed": asked[0].seed % 1000, "v": [1, 2]}
    assert str(second) == "ValueError: too bad"
    assert third["n"] == 3
    assert str(fourth) == "ValueError: the keys 1 and '1' of a dict are the same key in JSON; make them differ"
    said = capfd.readouterr().err
    assert "items 0..3 | scoring ccc\n" in said
    assert "items 0..3 | Traceback" in said
    command._stream.close()


def test_a_function_that_has_lost_the_gpu_ends_its_process_and_one_that_lacks_memory_answers(tmp_path, monkeypatch):
    (tmp_path / "serve.py").write_text(
        "import os, slurmgpu\n"
        "def score(data):\n"
        "    if data['text'] != 'a':\n"
        "        raise RuntimeError(data['text'])\n"
        "    return {'n': os.getpid()}\n"
        "slurmgpu.serve(score)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = loaded(tmp_path, monkeypatch, run=[sys.executable, "serve.py"], stream=True)
    [before], [full], [after] = (command(items(text)) for text in ("a", "CUDA error: out of memory", "a"))
    assert (str(full), after) == ("RuntimeError: CUDA error: out of memory", before)
    lost = failing(command, items("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert "exited with code 1: RuntimeError: Triton Error [CUDA]: an illegal memory access" in lost
    [other] = command(items("a"))
    assert other != before
    command._stream.close()


def test_json_that_is_written_is_ascii():
    from slurmgpu.workloads.command.placeholders import as_json

    assert json.loads(as_json({"a": "ä\ud800"})) == {"a": "ä\ud800"}
    assert as_json("ä").isascii()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "fits/{text}"), "fits, which --out names, has files already, such as fits/a: "),
        (("--save-dir=fits/{text}/last",), "fits, which --save-dir names, "),
        (("--output_dir", "fits", "{text}"), "fits, which --output_dir names, "),
        (("--images", "fits/{text}"), None),  # it may read them
        (("--out", "new", "fits/{text}"), None),
        (("--out", "new/{text}"), None),
        (("--out", "fits/{text}-{n}"), None),  # of other configurations
        (("--out", "empty/{text}"), None),
        (("--out", "{text}"), None),
        (("--quiet", "--out", "{out}", "{in}"), None),
    ],
)
def test_a_folder_for_outputs_that_has_files_already_is_told_of_at_planning(tmp_path, monkeypatch, arguments, said):
    (tmp_path / "fits").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    command = Command(run=["true", *arguments], columns={"n": "int32"})
    assert command.check_input([], 1) == []
    (tmp_path / "fits" / "a").touch()
    for _ in range(2):  # also of another run of the same process
        assert [note.startswith(str(said)) for note in command.check_input([], 1)] == [True] * (said is not None)
