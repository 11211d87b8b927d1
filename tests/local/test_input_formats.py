"""Input formats of a user's own: a class each, and no line of slurmgpu's, from the run file's `input` to the rows."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import slurmgpu
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs.formats import FORMATS
from slurmgpu.inputs.lines import Csv, Lines
from slurmgpu.inputs.tables import Tables
from tests.support.packages import install

WORKLOAD = """
from slurmgpu import Array, ItemError, Json


class Told:
    columns = {"told": Json()}
    batch_size = 2

    def load(self, task):
        pass

    def __call__(self, items):
        return [{"told": dict(item.data)} for item in items]
"""


class Pairs(Lines, format="pairs"):
    """Names and values on each line: `x=1 y=2`."""

    def parse(self, record, columns):
        found = [pair.partition(b"=") for pair in record.split()]
        if not all(equals for _, equals, _ in found):
            raise ItemError("expected NAME=VALUE")
        return {name.decode(): value.decode() for name, _, value in found}


class Sqlite(Tables, format="sqlite"):
    """The rows of the table `items`, in the order of their ids."""

    def table(self, path, *, verify=False):
        return SqliteRows(path)


class SqliteRows:
    def __init__(self, path):
        self.database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self.columns = tuple(name for _, name, *_ in self.database.execute("PRAGMA table_info(items)"))

    def __len__(self):
        return self.database.execute("SELECT count(*) FROM items").fetchone()[0]

    def read(self, start, stop):
        rows = self.database.execute("SELECT * FROM items ORDER BY id LIMIT ? OFFSET ?", (stop - start, start))
        return [dict(zip(self.columns, row, strict=True)) for row in rows]

    def close(self):
        self.database.close()


@pytest.fixture
def told(tmp_path):
    """What a run by the executor `debug` says of the items of files that match a pattern."""
    (tmp_path / "told.py").write_text(WORKLOAD)

    def run(pattern):
        run_file = f'input = "{pattern}"\nshard_items = 4\nhtml = false\n[workload]\nuse = "told.py:Told"\n'
        (tmp_path / "slurmgpu.toml").write_text(f"{run_file}[resources]\ngpus = 0\n")
        handle = slurmgpu.submit(tmp_path / "slurmgpu.toml", executor="debug")
        with slurmgpu.open(handle.folder / "merged.h5") as merged:
            return merged["told"][:], merged.errors

    return run


def test_a_format_of_lines_is_how_one_is_parsed(tmp_path, told):
    (tmp_path / "a.pairs").write_text("".join(f"x={i} y=a\n" for i in range(200)))
    lines = [f"x={i} y=b\n" for i in range(200, 501)]
    lines[150] = "oh\n"  # behind what planning looks at
    (tmp_path / "b.pairs").write_text("".join(lines))
    found, errors = told("*.pairs")
    expected = [{"x": str(i), "y": "a" if i < 200 else "b"} for i in range(501)]
    expected[350] = None
    assert found == expected
    assert errors == {350: f"input_error: {tmp_path}/b.pairs, line 151: expected NAME=VALUE"}


def test_what_is_not_the_format_is_refused_in_planning(tmp_path, told):
    (tmp_path / "a.pairs").write_text("x=1\noh\n")
    with pytest.raises(SlurmGPUError, match=r"a.pairs, line 2: expected NAME=VALUE\. Correct it and plan again"):
        told("a.pairs")
    (tmp_path / "b.csv").write_text("x\n1\n")
    with pytest.raises(SlurmGPUError, match=r"mixes formats, pairs \(.*a.pairs\) and csv \(.*b.csv\)"):
        told("[ab].*")


def test_a_format_of_tables_is_how_its_rows_are_read(tmp_path, told):
    with closing(sqlite3.connect(tmp_path / "a.sqlite")) as database:
        database.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        database.executemany("INSERT INTO items VALUES (?, ?)", [(i, f"no {i}") for i in range(10)])
        database.commit()
    assert told("a.sqlite") == ([{"id": i, "name": f"no {i}"} for i in range(10)], {})


def test_a_format_has_its_name_alone():
    with pytest.raises(SlurmGPUError, match="Csv is the input format 'csv'; choose another name"):
        type("Mine", (Csv,), {}, format="csv")
    assert FORMATS.find("csv") is Csv


def test_a_format_of_an_installed_package_is_read_in_every_process(tmp_path, project, slurmgpu):
    """By its entry point: here the worker is a process of its own."""
    source = (
        "from slurmgpu.inputs.lines import Lines\n"
        "class Shout(Lines, format='shout'):\n"
        "    def parse(self, record, columns):\n"
        "        return {'text': record.decode().upper(), 'x': len(record)}\n"
    )
    package = install(tmp_path / "package", "shouts", source, "slurmgpu.inputs", "shout = shouts:Shout\n")
    folder = project(8, input="items.shout")
    (folder / "items.shout").write_text("".join(f"item {i}\n" for i in range(8)))
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    slurmgpu("submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0, PYTHONPATH=path)
    plan = json.loads((Path(folder) / "run" / "run.json").read_text())
    assert (plan["input"]["format"], plan["input"]["n_items"]) == ("shout", 8)
    shown = slurmgpu("export", "run", "--format", "jsonl", "-o", "-", cwd=folder, expect=0).stdout.splitlines()
    assert [json.loads(line)["error"] for line in shown] == [None] * 8


def test_a_broken_package_of_a_format_ends_in_a_sentence(tmp_path, project, slurmgpu):
    folder = project(1, input="items.shout")
    (folder / "items.shout").write_text("item\n")
    package = install(tmp_path / "package", "shouts", "import nowhere\n", "slurmgpu.inputs", "shout = shouts:Shout\n")
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    said = slurmgpu("plan", cwd=folder, expect=2, PYTHONPATH=path).stderr
    assert "The input format 'shout' cannot be loaded from shouts:Shout: ModuleNotFoundError" in " ".join(said.split())
    assert "Traceback" not in said
