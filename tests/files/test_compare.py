"""`slurmgpu compare`: which rows of two runs differ, by index or by a key, also while they are at work."""

import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest

import slurmgpu as package
from slurmgpu.cli.views.comparison import texts_apart
from slurmgpu.errors import SlurmGPUError
from slurmgpu.merge.differences import distance_of, is_same
from slurmgpu.merge.merge import merge
from slurmgpu.merge.paired_tests import PairedTest, sign_test
from slurmgpu.shards.columns import Array, Json, Ragged, Text
from tests.support.published_runs import publish, published_run

COLUMNS = {"id": Text(), "score": Array("float64"), "parts": Ragged("float32"), "told": Json()}
N_ITEMS = 23


def row(number, **changes):
    if number % 10 == 7:
        return changes.get("error", f"item {number} is too dark")
    plain = {"id": f"q{number}", "score": number / 4 if number % 5 else math.nan, "parts": [0.5] * (number % 3)}
    return {**plain, "told": {"n": [number, None]}, **changes}


def made(folder, rows, shards=None, order=None, **values):
    """A run of these rows in this order, with an input that has their keys; shard 0 is merged."""
    order = range(len(rows)) if order is None else order
    folder.mkdir()
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{number}"}) + "\n" for number in order))
    run = published_run(folder / "run", COLUMNS, [rows[number] for number in order], [0], input_file=path, **values)
    merge(run)
    for shard in range(1, run.plan.n_shards) if shards is None else shards:
        publish(run, shard, [rows[number] for number in order][slice(*run.plan.bounds(shard))])
    return run.folder


@pytest.fixture
def one(tmp_path):
    return made(tmp_path / "one", [row(number) for number in range(N_ITEMS)])


def test_equal_runs_are_equal_however_their_shards_lie(slurmgpu, tmp_path, one):
    other = made(tmp_path / "other", [row(number) for number in range(N_ITEMS)], shard_items=4)
    done = slurmgpu("compare", one, other, expect=0)
    assert "No row of 23 in both differs." in done.stdout
    assert package.compare(one, other).equal


def test_of_runs_without_a_common_row_none_is_said_to_be_equal(slurmgpu, tmp_path, one):
    other = made(tmp_path / "other", [row(number) for number in range(N_ITEMS)])
    for path in (other / "merged.h5", *(other / "shards").glob("*.h5")):
        path.unlink()
    done = slurmgpu("compare", one, other, expect=1)
    assert "No row is in both." in done.stdout


def test_rows_that_differ_are_named_with_both_values(slurmgpu, tmp_path, one):
    changed = {
        3: row(3, score=0.75 + 1e-7),
        4: row(4, score=1.5, parts=[0.5]),
        7: row(7, error="item 7 fell over"),
        8: row(8, told={"n": [8.0, None]}),
        11: row(11, parts=[0.5, 0.25]),
        12: "it failed here",
    }
    other = made(tmp_path / "other", [changed.get(number) or row(number) for number in range(N_ITEMS)])
    found = json.loads(slurmgpu("compare", one, other, "--json", expect=1).stdout)
    assert (found["n_common"], found["n_different"], found["equal"]) == (23, 5, False)
    assert [each["a_index"] for each in found["differences"]] == [3, 4, 7, 11, 12]
    assert found["columns"]["score"] == {"n_rows": 3, "largest": 0.5}
    assert found["columns"]["parts"] == {"n_rows": 2, "largest": 0.25}
    assert found["differences"][2]["columns"] == {"error": ["item 7 is too dark", "item 7 fell over"]}
    assert found["differences"][4]["columns"]["id"] == ["q12", None]
    assert (found["a"]["n_failed"], found["b"]["n_failed"]) == (2, 3)
    assert [each.a_index for each in package.compare(one, other, n_examples=2).differences] == [3, 4]
    near = package.compare(one, other, tolerance=1e-6, columns=["score"])
    assert [each.a_index for each in near.differences] == [4, 12]
    text = slurmgpu("compare", one, other, "-n", "1", expect=1).stdout
    assert "5 of 23 rows in both differ." in text
    assert "item 3\n  score  A  0.75\n         B  0.7500001\n" in text


@pytest.mark.parametrize("part", [2000, 1], ids=["each by itself", "with rows between"])
def test_a_key_finds_the_partner_wherever_it_stands(tmp_path, one, monkeypatch, part):
    monkeypatch.setattr("slurmgpu.merge.compare._PART", part)
    order = random.Random(0).sample(range(N_ITEMS), N_ITEMS)
    rows = [row(number, score=9.0) if number == 6 else row(number) for number in range(N_ITEMS)]
    other = made(tmp_path / "other", rows, order=order, shard_items=4)
    found = package.compare(one, other, key="id")
    assert (found.n_common, found.n_different, found.a.n_only, found.b.n_only) == (N_ITEMS, 1, 0, 0)
    assert found.a.n_without_key == 0  # failed items have theirs from the input
    [different] = found.differences
    assert (different.a_index, different.b_index, different.key) == (6, order.index(6), "q6")
    assert different.columns == {"score": (1.5, 9.0)}
    # A copied file has no input, and so no keys of failed items.
    (tmp_path / "two.h5").write_bytes((other / "merged.h5").read_bytes())
    alone = package.compare(one, tmp_path / "two.h5", key="id")
    failed = [number for number in order[:4] if number % 10 == 7]
    assert (alone.n_common, alone.b.n_without_key) == (4 - len(failed), len(failed))


def test_rows_that_one_side_lacks_are_counted_and_named(slurmgpu, tmp_path, one):
    other = made(tmp_path / "other", [row(number) for number in range(N_ITEMS)], shards=[3])
    for key in (None, "id"):
        found = package.compare(one, other, key=key)
        assert (found.a.n_only, found.b.n_only, found.b.n_missing, found.n_common) == (13, 0, 13, 10)
        assert found.a.only == list(range(5, 15))
        assert package.compare(other, one, key=key).b.only == list(range(5, 15))
    done = slurmgpu("compare", one, other, expect=1)
    assert "13 rows only in A, without a partner in B: items 5, 6," in done.stdout


def test_runs_without_a_common_column_are_not_said_to_agree_without_a_word(slurmgpu, tmp_path, one):
    other = published_run(tmp_path / "other", {"n": Array("int64")}, [{"n": 1}], [0])
    said = "No column is in both: only errors were compared."
    assert said in slurmgpu("compare", one, other.folder, expect=1).stdout
    assert said not in slurmgpu("compare", one, one, expect=0).stdout


def test_columns_that_one_side_lacks_make_no_difference_where_others_are_asked_for(tmp_path, one):
    rows = [each if isinstance(each, str) else {"id": each["id"]} for each in map(row, range(N_ITEMS))]
    other = published_run(tmp_path / "other", {"id": Text()}, rows)
    assert package.compare(one, other.folder, columns=["id"]).equal
    for sides in ((one, other.folder), (other.folder, one)):
        found = package.compare(*sides)
        assert not found.equal
        assert {*map(tuple, (found.a.only_columns, found.b.only_columns))} == {("score", "parts", "told"), ()}


def test_damaged_shards_of_each_side_are_named(tmp_path, one):
    other = made(tmp_path / "other", [row(number) for number in range(N_ITEMS)])
    path = other / "shards" / "00002.h5"
    path.write_bytes(path.read_bytes()[:-1])
    found = package.compare(one, other)
    assert (found.a.damaged, [said[:8] for said in found.b.damaged]) == ([], ["00002.h5"])


def test_summaries_stand_beside_each_other(slurmgpu, tmp_path, one):
    other = made(tmp_path / "other", [row(number) for number in range(N_ITEMS)])
    for folder, accuracy in ((one, 0.25), (other, 0.5)):
        report = json.loads((folder / "report.json").read_text())
        report["summary"] = {"accuracy": accuracy, "by_group": {"hard": {"n": 3, "accuracy": accuracy / 2}}}
        (folder / "report.json").write_text(json.dumps(report))
    lines = slurmgpu("compare", one, other, expect=0).stdout.splitlines()
    assert ["accuracy", "25.0%", "50.0%"] in [line.split() for line in lines]
    assert any("hard accuracy" in line and line.split()[-2:] == ["12.5%", "25.0%"] for line in lines)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--key", "told2"], "No row of"),
        (["--key", "half"], "has several rows with the same 'half', such as items 0 and 1."),
        (["--columns", "scoer"], "have no common column 'scoer'. Did you mean 'score'?"),
        (["--tolerance", "-1"], "The tolerance is -1.0; expected 0 or a positive number."),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(slurmgpu, tmp_path, argv, sentence):
    columns = {"half": Array("int64"), "score": Array("float64")}
    path = tmp_path / "items.jsonl"
    path.write_text('{"text": "a"}\n' * 4)
    rows = [{"half": number // 2, "score": number} for number in range(4)]
    folder = published_run(tmp_path / "run", columns, rows, input_file=path).folder
    assert sentence in slurmgpu("compare", folder, folder, *argv, expect=2).stderr


def test_a_damaged_file_is_refused_and_a_missing_one_too(tmp_path, one):
    (tmp_path / "a.h5").write_bytes(b"no file of slurmgpu")
    with pytest.raises(SlurmGPUError, match="not an intact file"):
        package.compare(one, tmp_path / "a.h5")
    with pytest.raises(SlurmGPUError, match=r"^There is no file .*/b\.h5\.$"):
        package.compare(one, tmp_path / "b.h5")
    with pytest.raises(SlurmGPUError, match=rf"neither a run nor a file .*/nope\. `slurmgpu list {tmp_path}` shows"):
        package.compare(one, tmp_path / "nope")


@pytest.mark.parametrize(
    ("x", "y", "tolerance", "same"),
    [
        (1, 1.0, 0, True),
        (True, 1, 0, False),
        (math.nan, math.nan, 0, True),
        (math.inf, -math.inf, 1, False),
        (math.inf, 1e300, 1, False),
        (1000.0, 1000.5, 1e-3, True),
        (0.0, 5e-4, 1e-3, True),
        (1e-9, 2e-9, 0, False),
        ("a", "a", 0, True),
        ("1", 1, 1, False),
        (None, None, 0, True),
        (None, 0, 1, False),
        ([1, [2.0]], [1, [2.1]], 0.1, True),
        ([1], [1, 2], 0, False),
        ([1, 2], [1, 3], 0, False),
        ([1], "1", 0, False),
        (np.array([1.0]), [1.0], 0, False),
        ({"a": 1}, {"a": 1, "b": None}, 0, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, 0, False),
        ({"a": 1}, [1], 0, False),
        (1 + 1j, 1 + 1.05j, 0.1, True),
        (np.array([1.0, math.nan]), np.array([1.0, math.nan], "f4"), 0, True),
        (np.array([1.0, 2.0]), np.array([1.0, 2.1]), 0.1, True),
        (np.array([1.0]), np.array([[1.0]]), 0, False),
        (np.array([math.inf]), np.array([1.0]), 1, False),
        (np.array([b"a"]), np.array([b"b"]), 1, False),
        (np.array([True]), np.array([False]), 1, False),
        (np.array([True]), np.array([1]), 1, False),
        (np.array([], bool), np.array([], int), 0, True),
        (2**53 + 1, 2.0**53, 0, False),
        (2**60, 2**60 + 1, 1e-20, False),
        (2**60, 2.0**60 + 256, 1e-15, True),
        (10**400, 10**400 + 1, 1e-9, True),
        (10**400, math.inf, 1, False),
        (10**400, 1.0, 1e-9, False),
        (complex(1.7e308, 1.7e308), 1 + 1j, 1e-9, False),
        (np.array([2**53 + 1]), np.array([2.0**53]), 0, False),
        (np.array([2**60]), np.array([2**60 + 1]), 1e-20, False),
        (np.array([2**64 - 1], "u8"), np.array([-1]), 0, False),
        (np.array([2**64 - 1], "u8"), np.array([2**64 - 1], "u8"), 0, True),
        (np.array([1, 2]), np.array([1.0, 2.0], "f4"), 0, True),
    ],
)
def test_values_are_the_same_within_the_tolerance(x, y, tolerance, same):
    assert is_same(x, y, tolerance) is same
    assert is_same(y, x, tolerance) is same


@pytest.mark.parametrize(
    ("x", "y", "distance"),
    [
        (2**60, 2**60 + 1, 1),
        (2**64 - 1, -(2**63), 2**64 + 2**63 - 1),  # of 65 bits
        (2**53 + 1, 2.0**53, 1),
        (3, 2.5, 0.5),
        (1.0, 1 + 1e-10, 1 + 1e-10 - 1),
        (3 + 4j, 0j, 5.0),
        (math.inf, 1, None),
        (math.nan, 1.0, None),
        (10**400, 1.5, None),
        (10**400 + 2, 10**400, 2),
        (True, 1, None),
        ("a", 1, None),
        (np.array([2**63 - 1, 0]), np.array([-(2**63), 0]), 2**64 - 1),
        (np.array([2**64 - 1, 0], "u8"), np.array([-(2**63), 0]), 2**64 + 2**63 - 1),
        (np.array([2**53 + 1, 0]), np.array([2.0**53, 0.25]), 1),
        (np.array([1, 2], "i1"), np.array([-128, 2], "i1"), 129),
        (np.array([1.0, math.inf], "f4"), np.array([0.5, 0.0]), 0.5),
        (np.array([math.nan]), np.array([1.0]), None),
        (np.array([3 + 4j, 0]), np.array([0.0, 0.0]), 5.0),
        (np.array([1, 2]), np.array([1, 2, 3]), None),
        (np.array([b"a"]), np.array([b"b"]), None),
        (np.array([], "i8"), np.array([], "i8"), None),
    ],
)
def test_the_distance_of_integers_is_exact(x, y, distance):
    for found in (distance_of(x, y), distance_of(y, x)):
        assert found == distance
        assert type(found) is type(distance)


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("x", "y", "dtype", "texts"),
    [
        (1.0, 1.0000000001, "f8", ["1.0", "1.0000000001"]),
        (float(np.float32(0.1)), float(np.float32(0.2)), "f4", ["0.1", "0.2"]),
        (float(np.float32(0.1)), float(np.nextafter(np.float32(0.1), np.float32(1))), "f4", ["0.1", "0.10000001"]),
        (2**60, 2**60 + 1, "i8", [str(2**60), str(2**60 + 1)]),
        (1 + 1j, 1 + 1.00000000001j, "c16", ['"(1+1j)"', '"(1+1.00000000001j)"']),
        ([1, 1.0], [1, 1.0000000001], None, ["[1, 1.0]", "[1, 1.0000000001]"]),
        ("1", 1, None, ['"1"', "1"]),
        (None, "null", None, ["null", '"null"']),
        ("a b", "a  b", None, ['"a b"', '"a  b"']),
        ("a\x00", "a\x01", None, ['"a\\u0000"', '"a\\u0001"']),
        ("a\u200e", "a\u200f", None, ['"a\\u200e"', '"a\\u200f"']),
        (LONG + "a", LONG + "b", None, ["…" + "x" * 60 + each for each in "ab"]),
        ("a" + LONG, "b" + LONG, None, [each + "x" * 299 + "…" for each in "ab"]),
        (np.array([1.0, 2.0]), np.array([1.0, 2.0000000001]), "f8", ["[1. 2.]", "[1. 2.0000000001]"]),
        (np.array([0.1, 1], "f4"), np.array([0.2, 1], "f4"), "f4", ["[0.1 1. ]", "[0.2 1. ]"]),
    ],
)
def test_values_that_differ_are_shown_so_that_they_can_be_told_apart(x, y, dtype, texts):
    assert texts_apart((x, y), (dtype and np.dtype(dtype),) * 2) == texts


def test_values_of_other_dtypes_and_places_are_told_apart_too():
    short = float(np.float32(0.1)), 0.1
    assert texts_apart(short, (np.dtype("f4"), np.dtype("f8"))) == ["0.10000000149011612", "0.1"]
    arrays = np.array([0.1], "f4"), np.array([0.1])
    assert texts_apart(arrays, (np.dtype("f4"), np.dtype("f8"))) == ["[0.10000000149011612]", "[0.1]"]
    long, other = np.zeros(4096, "f4"), np.zeros(4096, "f4")
    other[2000] = 0.25
    one, its = texts_apart((long, other))
    assert "0.25" in its
    assert "0.25" not in one
    assert len(its) < 310


def test_large_integers_differ_by_what_they_differ_and_are_shown_in_full(slurmgpu, tmp_path):
    columns = {"n": Array("int64"), "u": Array("uint64"), "x": Array("float64"), "parts": Ragged("int64")}
    rows = [
        {"n": 2**60 + shift, "u": 2**64 - 1 - shift, "x": 1 + shift * 1e-10, "parts": [2**60 + shift]}
        for shift in (0, 1)
    ]
    one, other = (published_run(tmp_path / name, columns, [each]).folder for name, each in zip("ab", rows, strict=True))
    found = json.loads(slurmgpu("compare", one, other, "--json", expect=1).stdout)["columns"]
    assert {name: found[name]["largest"] for name in ("n", "u", "parts")} == {"n": 1, "u": 1, "parts": 1}
    lines = [line.split() for line in slurmgpu("compare", one, other, expect=1).stdout.splitlines()]
    assert ["n", "1", "1"] in lines
    assert ["n", "A", str(2**60)] in lines
    assert ["B", str(2**60 + 1)] in lines
    assert ["x", "A", "1.0"] in lines
    assert ["B", "1.0000000001"] in lines


def test_keys_that_are_equal_numbers_are_the_same_key(tmp_path):
    def of(name, column, values):
        rows = [{"id": value, "v": number} for number, value in enumerate(values)]
        return published_run(tmp_path / name, {"id": column, "v": Array("int8")}, rows).folder

    floats = of("floats", Array("float64"), [1.0, 2.0, math.nan])
    integers = of("integers", Array("int64"), [1, 2, 3])
    found = package.compare(floats, integers, key="id")
    assert (found.n_common, found.a.n_only, found.b.n_only, found.a.n_without_key) == (2, 1, 1, 1)
    nested = of("nested", Json(), [[1.0, {"b": 2.0, "a": 1}], None])
    assert package.compare(nested, of("its", Json(), [[1, {"a": 1, "b": 2}], 7]), key="id").n_common == 1
    large = package.compare(of("p", Array("float64"), [2.0**53]), of("q", Array("int64"), [2**53 + 1]), key="id")
    assert (large.n_common, large.a.n_only, large.b.n_only) == (0, 1, 1)


# Which is right more often


def classified(folder, labels, voted=None):
    """A run of items with the true label "a" but for the last, which has none; None for one that failed."""
    folder.mkdir()
    columns = {"label": Text(), "truth": Text(), "vote_correct": Array("bool"), "is_long": Array("bool")}
    (folder / "items.jsonl").write_text("{}\n" * len(labels))
    rows = [
        {
            "label": label,
            "truth": "a" if number < len(labels) - 1 else "",
            "vote_correct": label == "b",
            "is_long": True,
        }
        if label
        else "it failed"
        for number, label in enumerate(labels)
    ]
    run = published_run(folder / "run", columns, rows, [0], input_file=folder / "items.jsonl", shard_items=len(rows))
    merge(run)
    return run.folder


def test_of_two_classifications_is_told_which_is_right_more_often(slurmgpu, tmp_path):
    one = classified(tmp_path / "one", ["a"] * 5 + ["b"] * 3 + ["a", None, "a", None, "a"])
    other = classified(tmp_path / "other", ["a"] * 3 + ["b"] * 2 + ["a"] * 2 + ["b", "", "a", None, None, "b"])
    found = json.loads(slurmgpu("compare", one, other, "--json", expect=1).stdout)
    assert found["paired"].keys() == {"label", "vote_correct"}
    # Right in the first alone: 3, 4, 8 and 10; in the second 5, 6 and 9. Of 11, which failed in both, nothing is known.
    assert found["paired"]["label"] == {"n": 11, "n_only_a": 4, "n_only_b": 3, "p_value": 1.0}
    assert {name: found["paired"]["vote_correct"][name] for name in ("n", "n_only_a", "n_only_b")} == {
        "n": 13,
        "n_only_a": 2,
        "n_only_b": 3,
    }
    told = slurmgpu("compare", one, other, expect=1).stdout
    assert "label: 4 right in A alone, 3 in B alone, of 11 items; p = 1 (exact McNemar test)" in told
    assert package.compare(one, one).paired["label"].p_value == 1.0
    assert package.compare(one, other, columns=["vote_correct"]).paired.keys() == {"vote_correct"}


def test_of_two_graded_runs_is_told_whose_answers_are_right_more_often(tmp_path):
    """By the verdicts of judge, if its rubric says which are right: a score may be an expected value, such as 0.9."""
    yes_no = {"measure": "accuracy", "values": {"yes": 1, "no": 0}}
    correctness = {"measure": "accuracy", "values": {"correct": 1, "incorrect": 0}}

    def graded(name, rubric, verdicts):
        columns = {"verdict": Text(), "score": Array("float32")}
        rows = ["it failed" if each is None else {"verdict": each, "score": 0.9} for each in verdicts]
        (tmp_path / name).mkdir()
        items = tmp_path / name / "items.jsonl"
        items.write_text("{}\n" * len(rows))
        made = published_run(
            tmp_path / name / "run", columns, rows, [0], input_file=items, shard_items=5, settings={"rubric": rubric}
        )
        merge(made)
        return made.folder

    one = graded("one", yes_no, ["yes", "yes", "no", "yes", None])
    other = graded("other", correctness, ["correct", "incorrect", "incorrect", "", "correct"])
    assert package.compare(one, other).paired == {"verdict": PairedTest(5, 2, 1)}
    assert package.compare(one, other).to_json()["paired"]["verdict"].keys() == {"n", "n_only_a", "n_only_b", "p_value"}
    assert package.compare(one, other.parent / "run" / "merged.h5").paired == {}
    rated = graded("rated", {"measure": "mean", "values": {"yes": 1, "no": 0}}, ["yes"] * 5)
    assert package.compare(one, rated).paired == {}


@pytest.mark.parametrize("column", [Array("int64", (2,)), Array("int64"), Json()])
def test_a_label_and_a_truth_that_are_no_texts_are_only_columns(tmp_path, column):
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        rows = [
            {"label": value, "truth": value} for value in ([0, 1] if column == Array("int64") else [[0, 1], [1, 0]])
        ]
        run = published_run(tmp_path / name / "run", {"label": column, "truth": column}, rows, [0], shard_items=2)
        merge(run)
        runs.append(run.folder)
    found = package.compare(*runs)
    assert (found.equal, found.paired) == (True, {})


@pytest.mark.parametrize(
    ("n_one", "n_other", "expected"),
    [(0, 0, 1), (0, 1, 1), (0, 5, 2 / 2**5), (1, 7, 2 * (1 + 8) / 2**8), (7, 1, 2 * (1 + 8) / 2**8), (4, 4, 1)],
)
def test_the_sign_test_is_that_of_the_binomial_distribution(n_one, n_other, expected):
    assert sign_test(n_one, n_other) == pytest.approx(expected, rel=1e-12)


def test_the_sign_test_of_many_is_that_of_exact_fractions():
    n, fewer = 4000, 1900
    expected = Fraction(2 * sum(math.comb(n, number) for number in range(fewer + 1)), 2**n)
    assert sign_test(fewer, n - fewer) == pytest.approx(float(expected), rel=1e-9)
