"""Column kinds of a user's own: a class each, and no line of slurmgpu's, from the worker's rows to every export."""

import csv
import datetime
import json
import os
import subprocess
import sys

import pytest

import slurmgpu
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.export import export
from slurmgpu.run.directory import Run
from slurmgpu.shards.columns import Array, columns_from_json, columns_to_json
from tests.support.packages import install

KINDS = '''
import datetime

import numpy as np

from slurmgpu import Array, Text


class Moment(Array, kind="moment"):
    """A time of day and a date, to the microsecond, as the number of those since 1970."""

    arrow = "timestamp[us]"
    is_tensor = False

    def __init__(self):
        super().__init__("int64")

    def arguments(self):
        return {}

    def convert(self, value):
        if not isinstance(value, datetime.datetime):
            raise ValueError(f"found {type(value).__name__}, expected a datetime")
        return np.datetime64(value, "us").astype(np.int64)

    def read(self, stored):
        return stored.view("M8[us]")

    def plain(self, stored):
        return [moment.isoformat() for moment in self.read(stored).tolist()]


class Tags(Text, kind="tags"):
    """Words without blanks, each once."""

    def __init__(self, known):
        super().__init__()
        object.__setattr__(self, "known", tuple(known))

    def arguments(self):
        return {"known": list(self.known)}

    def convert(self, value):
        if unknown := [tag for tag in value if tag not in self.known]:
            raise ValueError(f"found {unknown[0]!r}, which is not known")
        return super().convert(" ".join(value))

    def read(self, stored):
        return [text.split() for text in super().read(stored)]

    def cells(self, stored):
        return super().read(stored)

    @property
    def pandas(self):
        return "object"


class Dated:
    batch_size = 2
    columns = {"at": Moment(), "tags": Tags(["even", "third", "ß"])}

    def load(self, task):
        pass

    def __call__(self, items):
        return [row(item.index) for item in items]


def row(index):
    tags = ["even"] * (index % 2 == 0) + ["third"] * (index % 3 == 0) + ["ß"]
    if index == 5:
        tags = ["odd"]
    return {"at": datetime.datetime(2024, 2, 29, 12) + datetime.timedelta(microseconds=index), "tags": tags}
'''

N_ITEMS = 7
FAILED = 5
AT = [datetime.datetime(2024, 2, 29, 12, microsecond=index) for index in range(N_ITEMS)]
TAGS = [["even", "third", "ß"], ["ß"], ["even", "ß"], ["third", "ß"], ["even", "ß"], [], ["even", "third", "ß"]]


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dated")
    (folder / "dated.py").write_text(KINDS, "utf-8")
    (folder / "items.txt").write_text("item\n" * N_ITEMS)
    lines = 'input = "items.txt"\nshard_items = 2\nhtml = false\n[workload]\nuse = "dated.py:Dated"\n'
    (folder / "slurmgpu.toml").write_text(f"{lines}[resources]\ngpus = 0\n")
    run = slurmgpu.submit(folder / "slurmgpu.toml", executor="debug")
    assert run.report()["complete"]
    return run.folder / "merged.h5"


def test_values_come_back_as_the_kind_reads_them(merged):
    with slurmgpu.open(merged) as found:
        assert list(found.errors) == [FAILED]
        assert "column 'tags': found 'odd', which is not known" in found.errors[FAILED]
        good = [index for index in range(N_ITEMS) if index != FAILED]
        assert found["at"][good].tolist() == [AT[index] for index in good]
        assert found["at"][3:4].dtype == "M8[us]"
        assert found["tags"][:] == TAGS
        assert found["tags"][[0, 2]] == [TAGS[0], TAGS[2]]
        assert found.rows(3, 4) == [{"index": 3, "at": AT[3], "tags": TAGS[3]}]
        frame = found.to_pandas()
        assert frame["at"][3] == AT[3]
        assert frame["tags"].tolist() == [None if index == FAILED else tags for index, tags in enumerate(TAGS)]
    assert columns_to_json(found.columns) == Run.open(merged.parent).plan.columns


def test_every_export_has_them(merged, tmp_path):
    for name in ("jsonl", "csv", "parquet", "pt"):
        export(merged, name, tmp_path / f"a.{name}")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text("utf-8").splitlines()]
    assert lines[3] == {"index": 3, "at": AT[3].isoformat(), "tags": TAGS[3], "error": None}
    assert (lines[FAILED]["at"], lines[FAILED]["tags"]) == (None, None)
    with open(tmp_path / "a.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[3]["at"], rows[3]["tags"]) == (AT[3].isoformat(), "third ß")
    assert (rows[FAILED]["at"], rows[FAILED]["tags"]) == ("", "")
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "a.parquet")
    assert table["at"].to_pylist() == [None if index == FAILED else at for index, at in enumerate(AT)]
    assert table["tags"].to_pylist()[3] == "third ß"
    told = pytest.importorskip("torch").load(tmp_path / "a.pt", weights_only=False)
    assert (told["at"][3], told["tags"][3]) == (AT[3], TAGS[3])


def test_where_the_kind_is_not_known_its_values_are_read_and_merged_as_they_are_stored(merged):
    """As by a merge on a node, which imports no workload."""
    code = (
        "from pathlib import Path\n"
        "import slurmgpu, slurmgpu.merge.merge as merging\n"
        "from slurmgpu.run.directory import Run\n"
        f"run = Run.open(Path({str(merged.parent)!r}))\n"
        "merging.merge(run)\n"
        "with slurmgpu.open(run.merged) as found:\n"
        "    print(found['at'][3], bytes(found['tags'][3]).decode())\n"
    )
    before = merged.read_bytes()
    merged.unlink()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    micros = (AT[3] - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)
    assert done.stdout.splitlines()[-1] == f"{micros} third ß"
    assert merged.read_bytes() == before


def test_a_kind_has_its_name_alone():
    with pytest.raises(SlurmGPUError, match="Array is the column kind 'array'; choose another name"):
        type("Mine", (Array,), {}, kind="array")


def test_a_kind_of_an_installed_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    source = "from slurmgpu import Array\nclass Half(Array, kind='half'): pass\n"
    monkeypatch.syspath_prepend(
        install(tmp_path / "site", "halves", source, "slurmgpu.columns", "half = halves:Half\n")
    )
    described = {"x": {"kind": "half", "dtype": "<f2", "shape": [2], "stored": {"dtype": "<f2", "shape": [2]}}}
    found = columns_from_json(described)
    assert type(found["x"]).__name__ == "Half"
    assert columns_to_json(found) == described


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0\n", "column kind 'moment' cannot be loaded from moments:Moment: ZeroDivisionError"),
        ("class Moment: pass\n", "moments:Moment is no column kind"),
    ],
)
def test_a_broken_package_of_a_kind_ends_in_a_sentence(merged, tmp_path, slurmgpu, source, reason):
    site = install(tmp_path / "site", "moments", source, "slurmgpu.columns", "moment = moments:Moment\n")
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    argv = ("export", merged.parent, "--format", "jsonl", "-o", "-")
    said = slurmgpu(*argv, cwd=tmp_path, expect=2, PYTHONPATH=path).stderr
    assert reason in " ".join(said.split())
    assert "Traceback" not in said
