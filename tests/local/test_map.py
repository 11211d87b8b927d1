"""`slurmgpu.map` by the local executor: what a user writes in a script or a notebook, and what outlives it."""

import asyncio
import importlib
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import slurmgpu
from slurmgpu import ItemError, SlurmGPUError, progress
from slurmgpu.cli.views.report import show_report
from slurmgpu.errors import WorkloadError
from slurmgpu.report import state_words
from slurmgpu.report.report_file import last_report
from tests.support.runs import wait_until

HERE = {"executor": "local", "gpus": 0, "overrides": {"html": False, "lease_s": 4.0}}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


IN_PROCESS = {**HERE, "executor": "debug"}


def values(run):
    return [(row.index, row.error, row.values) for row in run.rows()]


OF_OPTIONS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--times", type=int, default=2)
args = parser.parse_args()

def scaled(n):
    return n * args.times
"""
MAPS_IT = """
import slurmgpu
from options_of_a_lab import scaled

def twice(n):
    return scaled(n)

if __name__ == "__main__":
    run = slurmgpu.map(twice, [1, 2], columns="int32", executor="local", gpus=0, overrides={"html": False})
    print(run["result"][:].tolist())
"""


@pytest.mark.parametrize(("given", "found"), [([], [2, 4]), (["--times", "3"], [3, 6])])
def test_a_module_with_options_finds_those_of_the_script_which_tasks_do_not_read(given, found):
    Path("options_of_a_lab.py").write_text(OF_OPTIONS)
    Path("maps_it.py").write_text(MAPS_IT)
    done = subprocess.run([sys.executable, "maps_it.py", *given], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [str(found)], done.stderr
    assert "Tasks read these files" not in done.stderr


def test_threads_of_a_worker_take_turns_often():
    run = slurmgpu.map(lambda _: {"seconds": sys.getswitchinterval()}, [1], **HERE)
    assert run["seconds"][:].tolist() == [pytest.approx(0.0005)]


def test_a_closure_is_mapped_and_its_columns_are_learnt_from_the_first_item(caplog):
    scale = 3

    def triple(item, words):
        if item["n"] == 3:
            raise ValueError("three is not wanted")
        if item["n"] == 4:
            return {"n": "four", "text": "x"}
        if item["n"] == 5:
            return ItemError("five is said to fail")
        return {"n": item["n"] * scale, "text": words[item["n"] % 2]}

    run = slurmgpu.map(triple, [{"n": n} for n in range(20)], load=lambda: ["even", "odd"], **HERE)
    assert run.folder.name == "triple"
    found = values(run)
    assert [index for index, _, _ in found] == list(range(20))
    assert [(e, v) for _, e, v in found if e is None] == [
        (None, {"n": n * 3, "text": "odd" if n % 2 else "even"}) for n in range(20) if n not in (3, 4, 5)
    ]
    assert "three is not wanted (test_map.py, line" in found[3][1]
    assert found[4][1].endswith(
        "column 'n': found text, expected int64. If it is right, submit with columns={'n': 'json', 'text': 'text'}."
    )
    assert found[5][1] == "item_error: five is said to fail"
    assert run["n"][:3].tolist() == [0, 3, 6]
    assert "triple: 20 items>: 3 items failed; their values are blank." in caplog.text
    assert run["n"].dtype == "int64"
    assert run["text"][:2] == ["even", "odd"]
    assert caplog.text.count("are blank") == 1
    with pytest.raises(
        TypeError, match=r"0 is not a column's name; .* rows\(\) for rows, .* results\(\).row\(number\)"
    ):
        run[0]
    again = slurmgpu.open_run(run.folder)
    assert again["text"][:2] == ["even", "odd"]
    assert (run.folder / "function.pkl").stat().st_mode & 0o777 == 0o600
    assert "def triple(item, words):" in (run.folder / "function.py").read_text()
    assert not (run.folder.parent / "triple-probe").exists()
    # Of the same name, the next run has a directory of its own, which is said.
    assert slurmgpu.map(triple, [{"n": 1}], load=lambda: "ab", **IN_PROCESS).folder.name == "triple-2"
    assert f"{run.folder} has another function, other items or other columns." in caplog.text


def test_batches_of_a_functions_lists_are_annotated_and_kept_apart_by_failures():
    def lengths(texts) -> list[int]:
        if "bad" in texts:
            raise ValueError("a batch with a bad text")
        return [len(text) for text in texts]

    run = slurmgpu.map(lengths, ["a", "bb", "bad", "cccc", "d"], batch_size=2, **IN_PROCESS)
    assert [(error is None, v["result"]) for _, error, v in values(run)] == [
        (True, 1),
        (True, 2),
        (False, None),
        (True, 4),
        (True, 1),
    ]
    assert not (run.folder.parent / "lengths-probe").exists()  # the annotation said the columns


@pytest.mark.parametrize(
    "made",
    [dict, pd.DataFrame, lambda columns: {name: np.array(values) for name, values in columns.items()}, pa.table],
    ids=["mapping", "frame", "arrays", "arrow"],
)
def test_a_function_of_batches_may_return_columns(made):
    def lengths(texts):
        if "bad" in texts:
            raise ValueError("a batch with a bad text")
        return made({"n": [len(text) for text in texts], "shout": [text.upper() for text in texts]})

    run = slurmgpu.map(lengths, ["a", "bb", "bad", "cccc", "d"], batch_size=2, **IN_PROCESS)
    found = [(v["n"], v["shout"]) if error is None else error.partition(":")[0] for _, error, v in values(run)]
    assert found == [(1, "A"), (2, "BB"), "item_error", (4, "CCCC"), (1, "D")]


def test_what_is_missing_in_a_returned_frame_is_none():
    def told(numbers):
        text = pd.Series([None if n == 2 else f"{n}" for n in numbers], dtype="string")
        return pd.DataFrame({"text": text, "n": pd.Series([n if n < 3 else None for n in numbers], dtype="Int64")})

    run = slurmgpu.map(told, [1, 2, 3], batch_size=3, columns={"text": "json", "n": "json"}, **IN_PROCESS)
    assert [(v["text"], v["n"]) for _, _, v in values(run)] == [("1", 1), (None, 2), ("3", None)]


def test_arrays_of_pandas_own_types_are_columns_and_lack_nan_among_floats():
    def told(numbers):
        size = pd.cut(np.array(numbers), [0, 1, 3], labels=["small", "large"])
        half = pd.array([n / 2 if n < 3 else None for n in numbers], dtype="Float64")
        return {"size": size, "half": half, "n": pd.Series(half, dtype="Float64")}

    run = slurmgpu.map(told, [1, 2, 3], batch_size=3, **IN_PROCESS)
    assert list(run["size"]) == ["small", "large", "large"]
    for name in ("half", "n"):
        np.testing.assert_array_equal(run[name][:], [0.5, 1, np.nan])


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (set, "a set has no order; expected a list with a result for each item"),
        (lambda rows: {"n": rows[:1]}, "returned 1 row for 2 items"),
        (lambda rows: {"n": rows, "sum": [sum(rows)]}, "returned 1 row for 2 items"),
        (lambda rows: {"n": "ab"}, "column 'n' is a str; expected a list, or an array, with a value for each item"),
        (lambda rows: {}, "no column was returned"),
        (lambda rows: {"n": np.array(3.0)}, "column 'n' is a ndarray; expected a list, or an array"),
        # The names of its columns would be the values of two items.
        (
            lambda rows: pd.DataFrame([[n, n] for n in rows], columns=["n", "n"]),
            "column 'n' is a DataFrame, as where two col",
        ),
    ],
    ids=["set", "short", "unequal", "text", "empty", "0-d", "twice"],
)
def test_what_has_no_row_for_each_item_is_not_taken_for_rows(made, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        slurmgpu.map(lambda texts: made([len(text) for text in texts]), ["a", "bb"], batch_size=2, **IN_PROCESS)


def test_a_first_item_that_fails_ends_the_call_with_its_error(tmp_path):
    def fails(item):
        raise RuntimeError("not with this item")

    with pytest.raises(
        SlurmGPUError, match=r"Item 0 .*failed, so .* nothing was submitted: .*not with this item .*\. Its log"
    ):
        slurmgpu.map(fails, [1, 2, 3], **IN_PROCESS)
    with pytest.raises(SlurmGPUError, match=r"value in the column 'a' .* columns=\{'a': 'json', 'b': 'int64'\}"):
        slurmgpu.map(lambda item: {"a": None, "b": item}, [1, 2, 3], name="none", **IN_PROCESS)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["fails-probe", "none-probe"]


SCRIPT = """
import os, sys, time
import slurmgpu

def slow(item):
    while item >= 8 and os.path.exists("held"):
        time.sleep(0.01)
    return item * item

if __name__ == "__main__":
    run = slurmgpu.map(slow, range(16), columns="int64", executor="local", gpus=0, tasks=1,
                       overrides={"html": False, "lease_s": 4.0})
    print(run.folder, flush=True)
    if sys.argv[1:] == ["wait"]:
        run.wait()
"""


def test_a_run_outlives_the_script_that_mapped_and_an_interrupt_of_it(tmp_path):
    (tmp_path / "held").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    script = subprocess.Popen([sys.executable, "script.py", "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert script.stdout.readline() == f"{tmp_path}/runs/slow\n".encode()
    os.kill(script.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in script.communicate(timeout=280)[1]
    assert script.returncode != 0
    run = slurmgpu.open_run("runs/slow")
    rows = run.rows()
    assert [next(rows)["result"] for _ in range(8)] == [n * n for n in range(8)]  # while the run works
    assert run.status()["state"] == "running"
    (tmp_path / "held").unlink()
    assert [row["result"] for row in rows] == [n * n for n in range(8, 16)]
    assert run["result"][:].tolist() == [n * n for n in range(16)]


def test_rows_that_are_missing_are_named_with_the_failure_of_their_task():
    def load():
        raise OSError("no such model")

    run = slurmgpu.map(lambda item, model: item, [1, 2], columns={"n": "int64"}, load=load, **HERE)
    with pytest.raises(SlurmGPUError, match=r"lacks 2 rows .*failed with workload_error: OSError: no such model"):
        list(run.rows())


def test_a_run_that_was_cancelled_says_what_is_missing_and_goes_on_with_the_same_function(tmp_path):
    (tmp_path / "held").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py"], check=True, stdout=subprocess.PIPE)
    run = slurmgpu.open_run("runs/slow")
    rows = run.rows()
    assert next(rows)["result"] == 0
    run.cancel()
    (tmp_path / "script.py").write_text(f"# A line more.\n{SCRIPT}")
    (tmp_path / "held").unlink()
    again = subprocess.run([sys.executable, "script.py", "wait"], check=True, capture_output=True, text=True)
    goes_on = f"slurmgpu.open_run('{tmp_path}/runs/slow').resubmit() would compute only what it lacks"
    assert f"{tmp_path}/runs/slow has the same function and items, and is incomplete: {goes_on}" in again.stderr
    assert again.stdout == f"{tmp_path}/runs/slow-2\n"
    with pytest.raises(SlurmGPUError, match=r"lacks \d+ rows of its 16\. To compute them: `slurmgpu resubmit"):
        list(rows)
    with pytest.raises(SlurmGPUError, match="lacks rows of its 16"):
        _ = run["result"]
    (tmp_path / "script.py").write_text("def slow(item):\n    return -1\n")  # the pickle is frozen
    run.resubmit()
    assert [row["result"] for row in run.rows()] == [n * n for n in range(16)]
    with h5py.File(run.folder / "merged.h5") as file:
        assert file["result"][:].tolist() == [n * n for n in range(16)]


@pytest.mark.parametrize("name", ["prompt.txt", "data/prompts/prompt.txt"])
def test_a_file_that_a_function_by_value_reads_is_told_and_part_of_its_code(tmp_path, caplog, name):
    folder = Path(name).parent
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompt.txt").write_text("1")

    def load():
        return float((folder / "prompt.txt").read_text())

    def times(item, factor):
        return item * factor

    run = slurmgpu.map(times, [1, 2], load=load, columns="float64", **IN_PROCESS).run
    assert f"not as they are now: {name}." in caplog.text
    (run.folder / "merged.h5").unlink()
    for path in (run.folder / "shards").glob("*.h5"):
        path.unlink()
    (folder / "prompt.txt").write_text("2")
    slurmgpu.open_run(run.folder).resubmit()
    former, now = [line["code"]["digest"] for line in run.submissions()]
    assert former != now
    with slurmgpu.open(run.merged) as merged:
        assert (merged["result"][:].tolist(), merged.code.tolist()) == ([2.0, 4.0], [now, now])


def test_a_device_that_was_chosen_where_there_is_no_gpu_is_told(caplog, monkeypatch):
    device, name, other = "cpu", "cpu", "cpus"

    def load():
        return {device: 1}

    class Scaled:
        place = name

        def of(self, item, loaded):
            return float(item * loaded[self.place]), other

    asked = {"load": load, "columns": "float64", "overrides": {"html": False}}
    monkeypatch.setenv("PATH", "")  # there is no sbatch
    for options, is_told in (
        ({"executor": "slurm"}, True),
        ({"executor": "slurm", "device": "cpu"}, False),
        ({"executor": "slurm", "gpus": 0}, False),
    ):
        caplog.clear()
        with pytest.raises(SlurmGPUError, match="sbatch"):
            slurmgpu.map(Scaled().of, [1, 2], **options, **asked)
        assert ("place, device: 'cpu' was chosen on this machine" in caplog.text) == is_told


def test_a_bad_item_of_the_first_batch_keeps_no_column_from_being_learnt():
    def lengths(items):
        return [len(item) / bool(item) for item in items]

    run = slurmgpu.map(lengths, ["", "ab", "c"], batch_size=3, **IN_PROCESS)
    assert [(error and error.partition(": ")[0], found) for _, error, found in values(run)] == [
        ("item_error", {"result": None}) if index == 0 else (None, {"result": 3.0 - index}) for index in range(3)
    ]
    with pytest.raises(SlurmGPUError, match=r"Item 0 .*ZeroDivisionError.* declare the columns: columns=\{"):
        slurmgpu.map(lengths, ["", "", "c"], batch_size=2, **IN_PROCESS)


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ([np.int64(1), np.int64(2), np.int64(3), None], [1, 2, 3, None]),
        ([None, np.bool_(True), np.bool_(False)], [None, True, False]),
    ],
)
def test_numbers_of_numpy_among_none_are_kept(found, kept):
    run = slurmgpu.map(lambda items: [found[item] for item in items], [*range(len(found))], batch_size=4, **IN_PROCESS)
    assert [(error, row["result"]) for _, error, row in values(run)] == [(None, value) for value in kept]


def test_none_among_complex_numbers_is_nan():
    found = [1 + 2j, None, 2j]
    run = slurmgpu.map(lambda items: [found[item] for item in items], [0, 1, 2], batch_size=3, **IN_PROCESS)
    with slurmgpu.open(run.run.merged) as merged:
        assert (merged["result"].dtype, merged.errors) == (np.complex128, {})
        np.testing.assert_equal(merged["result"][:], np.array([1 + 2j, np.nan, 2j]))


def test_a_run_whose_stored_function_is_gone_or_another_is_refused_before_it_is_queued():
    def half(item):
        return 10 / item

    run = slurmgpu.map(half, [2, 0], columns="float64", **IN_PROCESS)
    stored = run.folder / "function.pkl"
    stored.write_bytes(stored.read_bytes() + b" ")
    with pytest.raises(SlurmGPUError, match="is not the function that the run was submitted with"):
        run.resubmit(failed=True)
    stored.unlink()
    with pytest.raises(SlurmGPUError, match=r"function\.pkl, the function of this run, is gone\. Restore the file, or"):
        run.resubmit(failed=True)
    assert {line["submission"] for line in run.run.submissions()} == {1}
    run.resubmit(failed=True, function=lambda item: 10 / (item or 1))
    assert [row["result"] for row in run.rows()] == [5, 10]


def test_failed_items_are_computed_by_a_corrected_function(capsys, caplog):
    def half(item, known):
        return known["ten"] / item

    def same(item, known):
        return known["ten"] / (item or 1)

    run = slurmgpu.map(half, [2, 0, 5, 0], columns="float64", load=lambda: {"ten": 10.0}, **IN_PROCESS)
    assert "division by zero (test_map.py, line" in values(run)[1][1]
    line = f"slurmgpu.open_run({str(run.folder)!r}).resubmit(failed=True, function=half)"
    assert run.report()["resubmit_failed"] == line
    show_report(last_report(run.run))
    assert f"in Python, with the edited function, by: {line}\n" in capsys.readouterr().out
    caplog.clear()
    kept = run.resubmit(failed=True)  # the same function fails again, which is said
    assert "computed with the function that is stored" in caplog.text
    assert line in caplog.text
    assert kept.report()["n_errors"] == 2
    caplog.clear()
    corrected = run.resubmit(failed=True, function=same)
    assert "computed with the function that is stored" not in caplog.text
    assert "`function` is another function. New rows are computed by" in caplog.text
    assert [row["result"] for row in run.rows()] == [5, 10, 2, 10]
    former, now = corrected.report()["code"]
    assert (former["items"], now["items"]) == (2, 2)
    assert corrected.report()["resubmit_failed"] is None
    # The last function is that of later submissions, unless they are told otherwise.
    run.resubmit(other_code=True)
    assert [each["digest"] for each in run.report()["code"]] == [now["digest"]]
    run.resubmit(other_code=True, load=lambda: {"ten": 20.0})
    assert [row["result"] for row in run.rows()] == [10, 20, 4, 20]
    with h5py.File(run.run.merged) as file:
        assert file["result"][:].tolist() == [10, 20, 4, 20]
    with pytest.raises(SlurmGPUError, match="leave out either"):
        run.resubmit(code="former", function=same)
    with pytest.raises(SlurmGPUError, match=r"half cannot be called as function\(item, loaded\)"):
        run.resubmit(failed=True, function=by_name("half", lambda item: item))


def by_name(name, function):
    function.__name__ = name
    return function


def test_a_function_that_another_python_pickled_is_refused_before_anything_is_submitted(monkeypatch):
    def half(item, loaded):
        if item == 3:
            raise ItemError("three")
        return item / loaded

    run = slurmgpu.map(half, [2, 3, 4], load=lambda: 2, columns="float32", **IN_PROCESS)
    monkeypatch.setattr("slurmgpu.code.functions.platform.python_version_tuple", lambda: ("3", "99", "0"))
    said = rf"`function` of {run.folder} is stored as Python 3\.\d+ pickled it, and this is Python 3\.99, which cannot"
    with pytest.raises(SlurmGPUError, match=said) as raised:
        run.resubmit(failed=True)
    assert str(raised.value).endswith(".resubmit(function=function, load=load)")
    assert len(run.run.submissions()) == 1
    with pytest.raises(SlurmGPUError, match="`load` of"):
        run.resubmit(failed=True, function=lambda item, loaded: 7)


def test_an_importable_function_is_imported_from_the_snapshot_of_its_module(tmp_path, monkeypatch):
    (tmp_path / "mapped_module.py").write_text("FACTOR = 2\n\ndef double(item) -> int:\n    return item * FACTOR\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import mapped_module

    run = slurmgpu.map(mapped_module.double, range(4), **HERE)
    assert run["result"][:].tolist() == [0, 2, 4, 6]
    assert run.run.plan.settings["function"] == "mapped_module:double"
    assert not (run.folder / "function.pkl").exists()
    [kept] = (run.folder / "code").rglob("mapped_module.py")
    assert "FACTOR = 2" in kept.read_text()


def test_a_module_is_refused_that_tasks_would_import_from_another_file_or_not_at_all(tmp_path, monkeypatch):
    """As after sys.path.insert(0, "src"), beside another module of the name, or after %cd in a notebook."""
    for folder, factor in (("src", 2), ("elsewhere", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_there.py").write_text(f"def times(item):\n    return item * {factor}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    twice_there = importlib.import_module("twice_there")

    def fails(item):
        raise ValueError("it does")

    def late(item):
        import twice_there

        return twice_there.times(item)

    monkeypatch.chdir(tmp_path / "elsewhere")
    run = slurmgpu.map(fails, [1], columns="int64", name="run", wait=True, **HERE)
    other = f"imported twice_there from {tmp_path}/src/twice_there.py, but tasks will import {tmp_path}/elsewhere/"
    for function in (twice_there.times, lambda item: twice_there.times(item), late):
        with pytest.raises(SlurmGPUError, match=other):
            slurmgpu.map(function, [1], columns="int64", **IN_PROCESS)
    with pytest.raises(SlurmGPUError, match=other):
        run.resubmit(failed=True, function=late)
    (tmp_path / "elsewhere" / "statistics.py").write_text("def mean(item):\n    return 0.0\n")
    for function in (statistics.mean, lambda item: statistics.mean(item)):
        with pytest.raises(SlurmGPUError, match=f"but tasks will import {tmp_path}/elsewhere/statistics.py"):
            slurmgpu.map(function, [[1, 2]], columns="float64", **IN_PROCESS)
    monkeypatch.chdir(tmp_path)
    assert slurmgpu.map(twice_there.times, [1], columns="int64", **HERE)["result"][:].tolist() == [2]
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path / "src")])
    for function in (twice_there.times, late):
        with pytest.raises(
            SlurmGPUError, match=f"they search {tmp_path} and sys.path, and {tmp_path}/src is in neither"
        ):
            slurmgpu.map(function, [1], columns="int64", **IN_PROCESS)


def test_arrays_of_different_shapes_are_told_before_a_run_or_as_the_items_error(tmp_path):
    def tokens(n):
        return {"tokens": np.zeros((n, 4), "float32")}

    with pytest.raises(
        SlurmGPUError,
        match=r"'tokens', in the first batch and the last item: .*reshape\(-1\), .* Nothing was submitted\.",
    ):
        slurmgpu.map(lambda numbers: [tokens(n) for n in numbers], [2, 3], batch_size=2, **IN_PROCESS)
    with pytest.raises(
        SlurmGPUError, match=r"'tokens', in the first batch and the last item: .* Nothing was submitted\."
    ):
        slurmgpu.map(tokens, [2, 2, 3], **IN_PROCESS)
    run = slurmgpu.map(tokens, [2, 3, 2], **IN_PROCESS)
    assert "found shape (3, 4), expected (2, 4). For other shapes" in run.results().errors[1]


def test_an_array_whose_length_differs_in_the_last_item_may_have_any_length():
    def weights(n):
        return {"weights": np.arange(n, dtype="float64"), "n": n}

    run = slurmgpu.map(weights, [4, 6, 8], **IN_PROCESS)
    assert run.results().errors == {}
    rows = [dict(row) for row in run.rows()]
    assert [(row["n"], row["weights"].tolist()) for row in rows] == [(n, list(range(n))) for n in (4, 6, 8)]


@pytest.mark.parametrize(
    "odd", [{"n": 1.0, "note": "late"}, {"other": 1}, {"n": "n/a"}, ItemError("bad"), WorkloadError("bad")]
)
def test_a_last_item_that_is_odd_changes_no_type_of_the_others(odd):
    def odd_at_the_end(n):
        if n < 9:
            return {"n": np.float32(n)}
        if isinstance(odd, Exception):
            raise odd
        return odd

    run = slurmgpu.map(odd_at_the_end, range(6, 10), **IN_PROCESS)
    with slurmgpu.open(run.folder / "merged.h5") as merged:
        assert merged["n"].dtype == np.float32
        assert merged["n"][:][:3].tolist() == [6, 7, 8]
        assert not merged.failed[:3].any()


def test_a_text_that_is_none_in_the_first_item_may_be_none():
    run = slurmgpu.map(lambda n: {"note": None if n < 3 else "large"}, [1, 2, 3], **IN_PROCESS)
    assert run["note"][:] == [None, None, "large"]


def test_a_number_that_is_none_is_nan_among_floats_and_stays_none_among_others():
    def found(n):
        is_late = n > 2
        return {"score": None if is_late else n / 2, "count": None if n == 1 else n, "right": n == 3 or None}

    run = slurmgpu.map(found, [1, 2, 3], **IN_PROCESS)
    assert [error for _, error, _ in values(run)] == [None] * 3
    np.testing.assert_array_equal(run["score"][:], [0.5, 1.0, np.nan])
    assert run["count"][:] == [None, 2, 3]
    assert run["right"][:] == [None, None, True]
    declared = slurmgpu.map(lambda n: None if n == 2 else n, [1, 2], columns="float32", **IN_PROCESS)
    np.testing.assert_array_equal(declared["result"][:], np.float32([1, np.nan]))


def test_a_row_of_a_table_is_an_item():
    frame = pd.DataFrame({"n": [1, 2, 3], "text": ["a", None, "c"]}, index=[5, 6, 7])
    here = {**IN_PROCESS, "overrides": {**HERE["overrides"], "keep": ["text"]}}

    def add(row):
        return {"n": row["n"] + 1, "all": row}

    run = slurmgpu.map(add, frame, **here)
    assert run["text"][:] == ["a", None, "c"]
    with pytest.raises(SlurmGPUError, match="keep has 'text', which is a column that the run computes"):
        slurmgpu.map(lambda row: {"text": "x"}, frame, **here)
    assert run["all"][:] == [{"n": 1, "text": "a"}, {"n": 2, "text": None}, {"n": 3, "text": "c"}]
    assert run["n"][:].tolist() == [2, 3, 4]


def test_a_coroutine_is_awaited_in_the_one_event_loop_of_its_worker():
    async def load():
        return asyncio.get_running_loop()

    async def once(n, loop):
        if n == 3:
            raise ValueError("three")
        await asyncio.sleep(0)
        return {"twice": 2 * n, "same": asyncio.get_running_loop() is loop}

    async def at_once(numbers, loop):
        return await asyncio.gather(*[once(n, loop) for n in numbers], return_exceptions=True)

    async def until_one_raises(numbers, loop):
        return await asyncio.gather(*[once(n, loop) for n in numbers])

    for function, size in ((once, None), (at_once, 2), (until_one_raises, 2)):
        run = slurmgpu.map(function, range(5), load=load, batch_size=size, **IN_PROCESS)
        assert run["twice"][:].tolist() == [0, 2, 4, 0, 8], function
        assert run["same"][:].tolist() == [True, True, True, False, True], function
        assert [error.split(" (")[0] for error in run.results().errors.values()] == ["item_error: ValueError: three"]


def test_the_index_of_a_frame_that_has_a_name_is_told_to_be_left_out(caplog):
    frame = pd.DataFrame({"n": [1, 2]})
    slurmgpu.map(lambda row: len(row), frame, **IN_PROCESS)
    slurmgpu.map(lambda row: len(row), frame.set_index("n", drop=False), **IN_PROCESS)
    assert "the frame's index" not in caplog.text
    frame.index = pd.MultiIndex.from_tuples([("nyt", 1), ("faz", 2)], names=["source", "day"])
    run = slurmgpu.map(lambda row: len(row), frame, **IN_PROCESS)
    assert "the frame's index, source, day: pass frame.reset_index()" in caplog.text
    assert run["result"][:].tolist() == [1, 1]


def test_an_item_that_fails_ends_no_task_that_was_begun_before_its_call(tmp_path):
    cancelled = tmp_path / "cancelled"

    class Client:
        def __init__(self):
            self.asked = asyncio.Queue()
            self.answers = asyncio.create_task(self.answer())

        async def answer(self):
            while True:
                n, answer = await self.asked.get()
                answer.set_result(2 * n)

        async def ask(self, n):
            answer = asyncio.get_running_loop().create_future()
            await self.asked.put((n, answer))
            done, _ = await asyncio.wait({answer, self.answers}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer in done else "the connection was lost"

    async def load():
        return Client()

    async def leave_over():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.touch()

    async def refuse():
        await asyncio.sleep(0)
        raise ValueError("zero")

    async def twice(n, client):
        if n == 0:
            await asyncio.gather(leave_over(), refuse())
        return {"twice": await client.ask(n)}

    run = slurmgpu.map(twice, range(3), load=load, columns={"twice": "int64"}, **IN_PROCESS)
    assert run["twice"][:].tolist() == [0, 2, 4]
    assert list(run.results().errors) == [0]
    assert cancelled.exists()


def test_a_coroutine_is_awaited_in_a_notebook_too():
    async def twice(n):
        await asyncio.sleep(0)
        return {"twice": 2 * n}

    async def cell():  # of a notebook, which runs in its event loop
        return slurmgpu.map(twice, [1, 2], **IN_PROCESS)

    assert asyncio.run(cell())["twice"][:].tolist() == [2, 4]


def test_what_is_refused_leaves_nothing_behind(tmp_path):
    one = {"function": len, "items": ["a"], "columns": "int64"}
    held = [
        ({"function": "text", "items": [1]}, "function is 'text'; expected a function that takes an item"),
        ({"function": None, "items": [1]}, "function is None; expected a function that takes an item"),
        ({**one, "load": 3}, "load is 3; expected a function without arguments"),
        ({**one, "executor": "slrum"}, r"^the arguments of slurmgpu.map: \[resources\] executor: should be 'slurm', "),
        ({**one, "batch_size": 0}, r"^the arguments of slurmgpu.map: \[workload\] batch_size: should be greater"),
        ({"function": len, "items": [1], "load": dict}, r"len cannot .*: too many .* Its second argument is what load"),
        ({**one, "items": [pd.Series({"a": 1})]}, "has a value of type Series; .* Pass the data frame itself"),
        ({"function": len, "items": {"a": 1}}, r"items has the type dict; expected a list.* such as items\['a'\]\."),
        ({"function": len, "items": "none.jsonl"}, "none.jsonl does not exist"),
        ({"function": len, "items": b"items.jsonl"}, "items has the type bytes; expected a list"),
        ({"function": len, "items": np.array(3)}, "items has the type ndarray; expected a list"),
        ({"function": len, "items": ["a"], "columns": {"n": "int7"}}, "has the type 'int7': 'int7' is not a NumPy"),
        (
            {"function": len, "items": ["a"], "columns": "int64", "processes": "per-gpu"},
            "To call the function on each GPU",
        ),
        ({"function": len, "items": ["a"], "columns": {}}, "columns is empty"),
        ({"function": len, "items": ["a"], "columns": int}, "'result' has the type <class 'int'>; expected text"),
        ({"function": len, "items": ["a"], "colums": "int64"}, "map has no argument 'colums'. Did you mean 'columns'"),
        (
            {"function": len, "items": ["a"], "columns": "int64", "gpu": 1},
            "map has no argument 'gpu'. Did you mean 'gpus'",
        ),
        ({**one, "overrides": {"input": "x.jsonl"}}, "overrides, 'input', and the argument `items` set the same key"),
        ({**one, "overrides": {"run_dir": "x"}}, "'run_dir', and the arguments `run_dir` and `name` set the same key"),
        ({**one, "overrides": {"workload.batch_size": 2}}, "and the argument `batch_size` set the same key"),
        ({**one, "overrides": {"sweep": {"seed": [1, 2]}}}, r"overrides has \[sweep\], but slurmgpu.map makes one run"),
        (
            {**one, "overrides": {"batched": True}},
            "overrides has the setting 'batched', but a function has no settings",
        ),
        (
            {**one, "overrides": {"device": "cpu"}},
            r"overrides has 'device', a key of \[resources\]. Write it as an argument",
        ),
        (
            {**one, "items": pd.DataFrame({"id": [1, "a7", None]})},
            r"The column 'id' has values of several types, int, str; expected one. Write df\['id'\] =",
        ),
        ({**one, "items": pd.DataFrame({"id": [[1, "a"]]})}, "The column 'id' has values of the type list that Arrow"),
        (
            {**one, "items": pd.DataFrame({"t": pd.period_range("2020", periods=2)})},
            "The column 't' has periods, which",
        ),
        ({**one, "items": pd.DataFrame({"id": [2**70]})}, "cannot be converted to Arrow: .*df.to_dict"),
    ]
    for given, sentence in held:
        with pytest.raises(SlurmGPUError, match=sentence):
            slurmgpu.map(**{**HERE, **given})
    assert not (tmp_path / "runs").exists()


def test_other_resources_have_the_same_plan_and_the_same_bytes():
    def square(item) -> int:
        return item * item

    few = slurmgpu.map(square, range(100), wait=True, **{**HERE, "tasks": 2})
    many = slurmgpu.map(square, range(100), wait=True, **{**HERE, "tasks": 7, "executor": "debug"})
    assert few.run.plan.fingerprint == many.run.plan.fingerprint
    with h5py.File(few.run.merged) as here, h5py.File(many.run.merged) as there:
        assert here["result"][:].tobytes() == there["result"][:].tobytes()


def test_the_last_status_of_a_run_that_is_waited_for_is_that_of_its_end():
    seen, gate = [], Path("gate").absolute()

    def pass_through(item) -> int:
        while not gate.exists():
            time.sleep(0.02)
        return item

    def see(status):
        seen.append(status)
        gate.touch()
        wait_until(lambda: run.status()["at_work"] is False and run.status()["complete"], "the merge")

    run = slurmgpu.map(pass_through, [1, 2], **HERE)
    run.wait(see)
    assert (seen[-1]["state"], seen[-1]["n_items_done"]) == ("complete", 2)


def test_a_call_of_the_debug_executor_that_takes_long_tells_how_far_it_is(monkeypatch, capfd):
    for module, name in ((state_words, "LINE_S"), (progress, "UPDATE_S")):
        monkeypatch.setattr(module, name, 0.0)
    slurmgpu.map(len, ["ab", "c", "def", "gh"], columns="int32", **{**HERE, "executor": "debug"})
    assert re.search(r"^\S+ len running; \d of 4 items", capfd.readouterr().err, re.MULTILINE)


def test_the_debug_executor_calls_the_function_in_this_process():
    def remember(item) -> int:
        return os.getpid()

    run = slurmgpu.map(remember, [1, 2], **IN_PROCESS)
    assert run["result"][:].tolist() == [os.getpid()] * 2


@pytest.mark.parametrize(("sync_s", "synced"), [(0.0, [1, 2, 3, 4]), (1e9, [1, 4])])
def test_names_of_quick_shards_are_synced_together_and_none_is_left_out(monkeypatch, sync_s, synced):
    seen = []
    monkeypatch.setattr("slurmgpu.worker.publisher.SYNC_S", sync_s)
    monkeypatch.setattr(
        "slurmgpu.worker.publisher.sync_names", lambda folder: seen.append(len(list(folder.glob("*.h5"))))
    )
    slurmgpu.map(len, ["a", "b", "c", "d"], columns="int64", **IN_PROCESS)
    assert seen == synced


def test_no_zombie_is_left_of_a_run_in_the_background():
    run = slurmgpu.map(len, ["a"], columns="int64", **HERE)
    run.wait()
    [line] = run.run.submissions()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in line["pids"]), "the end of the processes")


SUBMITS = """
import os
import slurmgpu

def make():
    return lambda x: square(x)

def square(x):
    return {"a": x * x}

if not os.path.isdir("runs/square-3"):  # without a refusal it ends there
    run = slurmgpu.map(square, [1, 2], columns={"a": "int64"}, **%r)
"""


def test_a_module_that_maps_when_it_is_imported_makes_one_run_and_none_of_its_tasks_makes_another(
    tmp_path, monkeypatch
):
    Path("unguarded.py").write_text(SUBMITS % HERE)
    monkeypatch.syspath_prepend(tmp_path)
    import unguarded

    unguarded.run.wait()
    refusal = (
        f"{tmp_path}/unguarded.py, line 12, calls slurmgpu.map when it is imported, but each task imports it. Put the "
        f"call under `if __name__ == '__main__':`."
    )
    (attempt,) = last_report(unguarded.run.run)["attempts"]
    assert (attempt["failure"], attempt["message"]) == ("workload_error", refusal)
    # Nor does a fresh process that reads a pickle, or a function that imports the module.
    with pytest.raises(SlurmGPUError, match=f"^{re.escape(refusal)}$"):
        slurmgpu.map(unguarded.make(), [1], columns={"a": "int64"}, **HERE)

    def late(x):
        import unguarded

        return unguarded.square(x)

    with pytest.raises(SlurmGPUError, match=r"^Item 0 .* failed, .*/unguarded.py, line 12, calls slurmgpu.map when"):
        slurmgpu.map(late, [1], **HERE)
    assert sorted(os.listdir("runs")) == ["late-probe", "square"]
    # A task that waited for its own run would do so for ever.
    Path("waits.py").write_text("import slurmgpu\n\nslurmgpu.open_run('runs/square').wait()\n")
    with pytest.raises(SlurmGPUError, match=r"waits.py, line 3, calls wait when it is imported"):
        slurmgpu.submit({"input": "waits.py", "workload": {"use": "waits.py:Workload"}}, gpus=0)


def test_a_run_file_is_not_planned_whose_workload_submits_when_it_is_imported(tmp_path):
    Path("items.txt").write_text("a\n")
    for call in ("submit", "probe", "submit_all"):
        Path(f"with_{call}.py").write_text(f"import slurmgpu\n\nslurmgpu.{call}({{}})\n")
        with pytest.raises(SlurmGPUError, match=f"with_{call}.py, line 3, calls slurmgpu.{call} when it is imported"):
            slurmgpu.submit({"input": "items.txt", "workload": {"use": f"with_{call}.py:Workload"}}, gpus=0)
    assert not Path("runs").exists()


def test_only_a_body_that_is_imported_is_refused_and_no_text_that_is_executed(tmp_path, monkeypatch):
    text = "import slurmgpu\n\nslurmgpu.submit({})\n"
    Path("script.py").write_text(text)
    Path("imported.py").write_text(text)
    Path("executes.py").write_text(f"x = 1\nexec({text!r})\n")
    monkeypatch.syspath_prepend(tmp_path)

    def outer(how):
        try:
            if how == "exec":
                exec(text, {"__name__": "cell"})
            elif how == "run_path":
                runpy.run_path("script.py")
            else:
                importlib.import_module(how)
        except SlurmGPUError as error:
            return str(error)

    ways = ["exec", "run_path", "imported", "executes"]
    *executed, imported, executes = slurmgpu.map(outer, ways, **IN_PROCESS)["result"][:]
    with pytest.raises(SlurmGPUError) as error:
        slurmgpu.submit({})
    assert executed == [str(error.value)] * 2
    assert f"{tmp_path}/imported.py, line 3, calls slurmgpu.submit when it is imported" in imported
    assert f"{tmp_path}/executes.py, line 2, calls slurmgpu.submit when it is imported" in executes


def test_a_function_that_a_task_calls_may_submit_a_run():
    def outer(x):
        inner = slurmgpu.map(lambda y: y + 1, [x], columns="int64", name=f"inner-{x}", wait=True, **HERE)
        return {"a": inner.results()["result"][0]}

    assert slurmgpu.map(outer, [4], columns={"a": "int64"}, **HERE)["a"][:].tolist() == [5]
