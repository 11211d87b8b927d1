"""What [sweep] stands for, and that a run over it is a run like any other."""

import datetime
import itertools
import json
import math
import os
import random
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slurmgpu
from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.sweeps import describe, expand, headline, place_of, write
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.directory import Run

GRID = {"lr": [0.1, 0.01], "width": [16, 32, 64], "name": "a"}

texts = st.text("abcd", min_size=1, max_size=4).filter(lambda key: key != "random")
values = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text())
lists = st.lists(values, min_size=1, max_size=4, unique_by=lambda value: json.dumps(value))
tables = st.dictionaries(texts, lists, min_size=1, max_size=4)
seeds = st.integers(0, 2**40)
UNHURRIED = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])


def names(configurations):
    return [json.dumps(each) for each in configurations]


# What a table stands for


def test_lists_expand_to_a_grid_whose_last_key_varies_fastest():
    found = expand(GRID, seed=0)
    assert found == [{"lr": lr, "width": width, "name": "a"} for lr in (0.1, 0.01) for width in (16, 32, 64)]
    assert all(list(each) == ["lr", "width", "name"] for each in found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([[0.9, 0.99], [0.9, 0.999]], [[0.9, 0.99], [0.9, 0.999]]),
        ([[0.9, 0.99]], [[0.9, 0.99]]),
        (True, [True]),
        ("cosine", ["cosine"]),
        ([1, 1.0, True, "1"], [1, 1.0, True, "1"]),
        ([{"name": "sgd"}, {"name": "adam"}], [{"name": "sgd"}, {"name": "adam"}]),
    ],
)
def test_a_value_stands_for_itself_and_a_list_for_each_of_its_own(value, expected):
    assert names(expand({"x": value}, 0)) == names({"x": each} for each in expected)


@UNHURRIED
@given(tables, seeds)
def test_a_grid_has_every_combination_once_in_the_order_of_the_lists(table, seed):
    found = expand(table, seed)
    assert names(found) == names(dict(zip(table, each, strict=True)) for each in itertools.product(*table.values()))
    assert len(set(names(found))) == math.prod(map(len, table.values()))


def test_keys_of_a_zip_vary_together_where_the_first_of_them_stands():
    table = {"zip": [["warmup", "lr"]], "lr": [3, 2, 1], "width": [16, 32], "warmup": [5, 5, 6], "name": "a"}
    pairs = [(3, 5), (2, 5), (1, 6)]
    grid = [{"lr": lr, "width": width, "warmup": warmup, "name": "a"} for lr, warmup in pairs for width in (16, 32)]
    assert expand(table, 0) == grid
    assert headline(table, 6) == "6 configurations: (lr, warmup) × width"
    drawn = expand({**table, "random": 5}, seed=1)
    assert len(set(names(drawn))) == 5
    assert all(each in grid for each in drawn)
    mixed = expand({**table, "random": 50, "width": {"uniform": [0, 1]}}, seed=1)
    assert {(each["lr"], each["warmup"]) for each in mixed} == set(pairs)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"zip": [["a", "b"]], "a": [1, 2], "b": [1]},
            "zip: a has 2 values, b has 1 value; expected lists of the same length",
        ),
        ({"zip": [["a", "b"]], "a": [1], "b": {"int": [1, 2]}, "random": 2}, "b has a distribution"),
        (
            {"zip": [["a", "lrr"]], "a": [1], "lr": [2]},
            "zip names 'lrr', which [sweep] does not vary. Did you mean 'lr'?",
        ),
        ({"zip": [["a", "b"], ["b"]], "a": [1], "b": [2]}, "zip names 'b' twice"),
        ({"zip": [["a", "b"]], "a": [1, 1, 1], "b": [2, 3, 2]}, "a, b have the values 1, 2 twice; expected each once."),
        ({"zip": ["a", "b"], "a": [1, 2], "b": [3, 4]}, 'expected a list of groups of keys: write zip = [["a", "b"]]'),
    ],
)
def test_keys_that_cannot_vary_together_are_refused(table, said):
    with pytest.raises(SlurmGPUError) as caught:
        expand(table, 0)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", ["gzip", ["gzip", "bzip2"], [["a"], ["b"]], [[1, 2]], True])
def test_a_key_of_the_name_zip_is_varied_as_before(value):
    values = value if isinstance(value, list) else [value]
    assert expand({"zip": value, "x": 1}, 0) == [{"zip": each, "x": 1} for each in values]


@UNHURRIED
@given(tables, seeds, st.integers(1, 300))
def test_what_is_drawn_of_lists_is_of_the_grid_and_never_comes_twice(table, seed, n):
    grid, found = names(expand(table, 0)), names(expand({**table, "random": n}, seed))
    assert len(found) == len(set(found)) == min(n, len(grid))
    assert set(found) <= set(grid)


@pytest.mark.parametrize("n", [1, 49, 50, 51, 98])
def test_a_larger_number_begins_with_what_a_smaller_one_draws(n):
    table = {"a": list(range(10)), "b": list(range(10))}
    assert expand({**table, "random": 99}, 7)[:n] == expand({**table, "random": n}, 7)


def test_nearly_all_of_a_grid_is_drawn_without_drawing_much_twice(monkeypatch):
    """Drawn until each of 10,000 has come, it took 90,000 draws of two numbers: 42 s for a million."""
    n_drawn = 0

    class Counting(random.Random):
        def random(self):
            nonlocal n_drawn
            n_drawn += 1
            return super().random()

    monkeypatch.setattr(random, "Random", Counting)
    found = expand({"a": list(range(100)), "b": list(range(100)), "random": 9_999}, 1)
    assert len({(each["a"], each["b"]) for each in found}) == 9_999
    assert n_drawn < 3 * 10_000


bounds = st.tuples(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12)).map(sorted)
whole_bounds = st.tuples(st.integers(1, 2**53), st.integers(1, 2**53)).map(sorted)


@UNHURRIED
@given(bounds, whole_bounds, seeds, st.integers(1, 40))
def test_what_is_drawn_of_distributions_lies_within_them_and_reads_back_equal(of, whole, seed, n):
    kinds = {"uniform": of, "loguniform": of, "int": whole, "logint": whole}
    table = {kind: {kind: list(ends)} for kind, ends in kinds.items()}
    found = expand({"random": n, "x": 1, **table}, seed)
    assert len(found) == n
    assert json.loads(json.dumps(found)) == found
    for each in found:
        assert all(ends[0] <= each[kind] <= ends[1] for kind, ends in kinds.items())
        assert [type(each[kind]) for kind in kinds] == [float, float, int, int]


@UNHURRIED
@given(tables, seeds, st.integers(1, 40))
def test_more_of_the_same_seed_begin_with_the_same_configurations(table, seed, n):
    table = {**table, "x": {"uniform": [0, 1]}}
    few, many = (expand({**table, "random": count}, seed) for count in (n, n + 20))
    assert many[:n] == few
    assert expand({**table, "random": n}, seed + 1) != few


def test_what_a_seed_draws_never_changes():
    table = {"random": 3, "lr": {"loguniform": [1e-4, 0.1]}, "width": {"int": [8, 64]}, "drop": {"uniform": [0, 0.5]}}
    drawn = expand({"heads": 4, **table, "depth": {"logint": [1, 32]}, "act": ["relu", "gelu"]}, 7)
    assert drawn == [{"heads": 4, **each} for each in EVER]  # a single value draws nothing


EVER = [
    {"lr": 0.000936479542276, "width": 16, "drop": 0.3254672365199269, "depth": 1, "act": "gelu"},
    {"lr": 0.00125045120887, "width": 11, "drop": 0.25371786659471013, "depth": 1, "act": "relu"},
    {"lr": 0.000162019120647, "width": 13, "drop": 0.21225959457125698, "depth": 18, "act": "relu"},
]


def test_ends_of_whole_numbers_are_drawn_too():
    for kind in ("int", "logint"):
        assert {each["x"] for each in expand({"random": 200, "x": {kind: [3, 6]}}, 0)} == {3, 4, 5, 6}


def test_as_many_as_the_grid_has_are_the_grid_in_its_order():
    assert expand({**GRID, "random": 6}, 1) == expand(GRID, 1)


def test_numbers_are_spread_as_the_distribution_says():
    table = {"u": {"uniform": [100, 200]}, "l": {"loguniform": [1e-4, 1]}}
    drawn = expand({"random": 4000, **table, "i": {"int": [1, 4]}, "n": {"logint": [2, 8]}}, 1)
    assert sum(each["u"] < 125 for each in drawn) == pytest.approx(1000, abs=150)
    assert sum(each["l"] < 1e-3 for each in drawn) == pytest.approx(1000, abs=150)
    assert sum(each["i"] == 4 for each in drawn) == pytest.approx(1000, abs=150)
    assert sum(each["n"] == 8 for each in drawn) == pytest.approx(4000 * math.log(9 / 8) / math.log(9 / 2), abs=60)


# What it cannot stand for


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "[sweep] has no key to vary"),
        ({"random": 3}, "[sweep] has no key to vary"),
        ({"lr": []}, "[sweep] lr is an empty list"),
        ({"lr": "[0.1, high"}, "[sweep] lr is the text '[0.1, high'; expected a list, such as [0.1, 0.4]"),
        ({"seed": "range(100)"}, "expected a list, such as [0.1, 0.4] or ['a', 'b'], or in a shell \"sweep.seed=[$("),
        ({"lr": "np.linspace(0, 1, 5)"}, "[sweep] lr is the text 'np.linspace(0, 1, 5)'; expected a list"),
        ({"lr": "0.1,1e-3"}, "[sweep] lr is the text '0.1,1e-3'; expected a list"),
        ({"lr": [0.1, 0.1]}, "[sweep] lr has the value 0.1 twice"),
        ({"lr": math.nan}, "[sweep] lr has the value nan; expected"),
        ({"lr": [0.1, [math.inf]]}, "[sweep] lr has the value [inf]; expected"),
        ({"day": datetime.date(2024, 1, 2)}, "[sweep] day has the value 2024-01-02; expected text"),
        ({"lr": {"loguniform": [0.1, 1]}}, "[sweep] lr is a distribution, so the number of configurations"),
        (
            {"lr": [{"uniform": [0, 1]}]},
            "a distribution in a list; write it without the list: lr = {uniform = [0, 1]}.",
        ),
        ({"lr": {"loguniforn": [0.1, 1]}}, "Did you mean 'loguniform'?"),
        ({"lr": {"a": 1, "b": 2}}, "[sweep] lr is the table {a = 1, b = 2}; expected a value, a list of values, or"),
        ({"lr": {}}, "[sweep] lr is the table {}"),
        (
            {"arguments": {"width": [1, 2]}},
            "[sweep.arguments] is a table, but width belongs in [sweep] itself: write width =",
        ),
        ({"lr": {"uniform": [1, 0]}}, "[sweep] lr is {uniform = [1, 0]}; expected uniform = [a, b] with two finite"),
        ({"lr": {"uniform": [0, math.inf]}}, "with two finite numbers, the smaller first"),
        ({"lr": {"uniform": [0]}}, "with two finite numbers, the smaller first"),
        ({"lr": {"uniform": 3}}, "with two finite numbers, the smaller first"),
        ({"lr": {"loguniform": [0, 1]}}, "with two finite numbers above 0, the smaller first"),
        ({"n": {"int": [1, 2.0]}}, "with two whole numbers, the smaller first"),
        ({"n": {"int": [False, True]}}, "with two whole numbers, the smaller first"),
        ({"n": {"logint": [0, 2]}}, "with two whole numbers above 0, the smaller first"),
        ({"lr": [1, 2], "random": 0}, "[sweep] random is 0; expected the number of"),
        ({"lr": [1, 2], "random": True}, "[sweep] random is true; expected the number of"),
        ({"lr": [1, 2], "random": 2.0}, "[sweep] random is 2.0; expected the number of"),
        ({"lr": [1, 2], "random": 10**7}, "from 1 to 1,000,000"),
        (
            {key: list(range(200)) for key in "abc"},
            "[sweep] makes 8,000,000 configurations; expected at most 1,000,000",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_the_key(table, said):
    with pytest.raises(SlurmGPUError) as caught:
        expand(table, 0)
    assert said in str(caught.value)


def test_from_a_grid_of_any_size_some_are_drawn():
    assert len(expand({**{key: list(range(200)) for key in "abcdefghijkl"}, "random": 5}, 0)) == 5


# What is said of it


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (GRID, "6 configurations: lr × width"),
        ({"lr": 0.1}, "1 configuration"),
        ({**GRID, "random": 4}, "4 configurations, drawn: lr, width"),
        ({**GRID, "random": 9}, "6 configurations, which is the whole grid: lr × width"),
        ({**GRID, "x": {"int": [1, 2]}, "random": 20}, "20 configurations, drawn: lr, width, x"),
    ],
)
def test_a_headline_tells_what_varies_and_how(table, said):
    assert headline(table, len(expand(table, 0))) == said


def test_a_configuration_is_described_by_its_values_and_its_place(tmp_path):
    data = {"lr": 0.1, "act": "relu", "bias": True}
    assert describe(data) == 'lr = 0.1, act = "relu", bias = true'
    assert describe({}) == "nothing of its own"
    assert describe({"text": "x" * 1000}).endswith("x…")
    odd = {"name": "Größe", "raw": b"abc", "on": datetime.date(2026, 1, 2)}
    assert describe(odd) == 'name = "Größe", raw = "3 bytes", on = "2026-01-02"'
    assert place_of(tmp_path / "sweep.jsonl", 3, {"lr": 0.1}) == "[sweep], configuration 3 (lr = 0.1)"
    assert place_of(tmp_path / "a.jsonl", 3, {"lr": 0.1}) == f"{tmp_path}/a.jsonl, item 3 (lr = 0.1)"


def test_the_time_of_the_file_survives_a_file_system_that_counts_seconds(tmp_path):
    write(expand(GRID, 0), tmp_path / "sweep.jsonl")
    assert (tmp_path / "sweep.jsonl").stat().st_mtime_ns % 10**9 == 0
    assert [json.loads(line) for line in (tmp_path / "sweep.jsonl").open()] == expand(GRID, 0)


# Runs over it


SWEEP = {"text": ["one", "one two", "three"], "x": [1, 2]}


@pytest.fixture
def sweeping(project):
    """A project whose run file has [sweep] in place of an input."""

    def make(sweep=SWEEP, input_line="", **tables):
        folder = project(1, sweep=sweep, **tables)
        (folder / "items.jsonl").unlink()
        path = folder / "slurmgpu.toml"
        path.write_text(path.read_text().replace('input = "items.jsonl"\n', input_line))
        return folder

    return make


def refused(folder, **overrides):
    with pytest.raises(SlurmGPUError) as caught, draft_run(folder / "slurmgpu.toml", overrides):
        pass
    return str(caught.value)


def test_a_run_over_a_sweep_has_its_rows_in_the_order_of_the_grid(sweeping, slurmgpu):
    elsewhere = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}  # the file is copied, not renamed
    folder = sweeping(shard_items=4)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, **elsewhere)
    expected = [{"text": text, "x": x} for text in SWEEP["text"] for x in SWEEP["x"]]
    assert [json.loads(line) for line in (folder / "run" / "sweep.jsonl").open()] == expected
    check_shouts(folder / "run")
    # A run directory that was moved has its items with it.
    shutil.move(folder / "run", folder / "moved")
    (folder / "moved" / "shards" / "00001.h5").unlink()
    (folder / "moved" / "merged.h5").unlink()
    slurmgpu("resubmit", "moved", "--executor", "local", cwd=folder, expect=0)
    check_shouts(folder / "moved")


def check_shouts(run):
    with slurmgpu.open(run / "merged.h5") as merged:
        assert list(merged["shout"]) == ["ONE", "ONE", "ONE TWO", "ONE TWO", "THREE", "THREE"]
        assert merged.index[:].tolist() == list(range(6))


def test_a_dry_run_shows_what_a_sweep_stands_for(sweeping, slurmgpu):
    folder = sweeping({**SWEEP, "y": [1, 2]})
    argv = ("submit", "--executor", "local", "--gpus", "0", "--dry-run")
    text = slurmgpu(*argv, cwd=folder, expect=0).stdout
    assert "12 configurations: text × x × y" in text
    assert '0: text = "one", x = 1, y = 1\n' in "\n".join(line.strip() for line in text.splitlines())
    assert "… and 4 more; --json shows all" in text
    found = json.loads(slurmgpu(*argv, "--json", cwd=folder, expect=0).stdout)
    assert len(found["configurations"]) == found["plan"]["n_items"] == 12
    assert found["plan"]["input"]["files"][0]["path"] == "sweep.jsonl"
    assert not (folder / "run").exists()
    assert "12 items" in slurmgpu("check", cwd=folder).stdout


def test_a_sweep_is_drawn_with_the_seed_of_the_run(sweeping):
    def drawn(seed):
        with draft_run(folder / "slurmgpu.toml", {"seed": seed}) as draft:
            return draft.plan.input_digest, list(draft.items.configurations)

    folder = sweeping({"random": 5, "text": "a", "x": {"uniform": [0, 1]}})
    assert drawn(1) == drawn(1) != drawn(2)


def test_with_an_input_a_sweep_is_of_runs_and_one_run_is_refused(sweeping):
    said = refused(sweeping(input_line='input = "items.jsonl"\n'))
    assert "[sweep] varies text, x, which makes a run for each value" in said


def test_without_input_and_sweep_a_sentence_names_both(sweeping):
    folder = sweeping()
    path = folder / "slurmgpu.toml"
    path.write_text(path.read_text().partition("\n[sweep]")[0])
    assert 'input is missing. Name the files with the items, such as input = "items.jsonl", or give' in refused(folder)
    assert "in [sweep]" in refused(folder)


OWN = """
from slurmgpu import Array, SlurmGPUError


class Own:
    columns = {"x": Array("float32")}
    batch_size = 4
    default_items = [{}, {"x": 5}]

    def load(self, task):
        pass

    def __call__(self, items):
        return [{"x": item.data.get("x", 1)} for item in items]


class Choosy(Own):
    fields = ("x", "width")


class Checking(Own):
    def check_input(self, files, n_items):
        raise SlurmGPUError(f"{files[0].name}, {n_items}: {files[0].read_text()}")
"""


def test_a_workload_may_have_items_of_its_own_for_a_run_file_that_names_none(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "slurmgpu.toml").write_text('[workload]\nuse = "own.py:Own"\n[resources]\ngpus = 0\n')
    handle = slurmgpu.submit(tmp_path / "slurmgpu.toml", executor="debug")
    with slurmgpu.open(handle.folder / "merged.h5") as merged:
        assert merged["x"][:].tolist() == [1.0, 5.0]
    assert Run.open(handle.folder).input["files"][0]["path"] == str(handle.folder / "sweep.jsonl")


def test_a_workload_checks_the_configurations_before_anything_is_written(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    run_file = '[workload]\nuse = "own.py:{}"\n[sweep]\nx = [1, 2]\n'
    (tmp_path / "slurmgpu.toml").write_text(run_file.format("Checking"))
    assert refused(tmp_path) == 'sweep.jsonl, 2: {"x": 1}\n{"x": 2}\n'
    (tmp_path / "slurmgpu.toml").write_text(run_file.format("Choosy"))
    assert "takes the field 'width', which [sweep] lacks. Known: x. Add it to [sweep], or name an input" in refused(
        tmp_path
    )


def test_a_site_file_has_no_sweep(tmp_path, sweeping, monkeypatch):
    (tmp_path / "config" / "slurmgpu").mkdir(parents=True)
    (tmp_path / "config" / "slurmgpu" / "site.toml").write_text("[sweep]\nlr = 1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert "site.toml: unknown key sweep." in refused(sweeping())
