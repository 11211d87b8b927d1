"""What [sweep] with keys of the run file stands for: runs, their names, and the values that each has."""

from types import SimpleNamespace

import pytest

from slurmgpu import inputs
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.items import Scans
from slurmgpu.plan.overrides import Overrides
from slurmgpu.plan.planner import draft_run
from slurmgpu.plan.site_file import GivenRunFile, read_run_file
from slurmgpu.plan.variant_names import RunName, names_beside, names_of, respelled
from slurmgpu.plan.variants import variants_of


def found(tmp_path, sweep, *texts, **tables):
    """The runs of a [sweep], as (name, its run file)."""
    overrides = Overrides()
    for text in texts:
        overrides.assign_text(text)
    source = GivenRunFile({"workload": {"use": "embed"}, "sweep": sweep, **tables}, tmp_path)
    variants = variants_of(source, overrides)
    return variants and [(each.name, read_run_file(source, each.overrides)) for each in variants.runs]


def test_with_an_input_its_keys_are_those_of_the_run_file(tmp_path):
    sweep = {"model": ["org/small", "org/large"], "input": ["a.jsonl", "b.jsonl"]}
    runs = found(tmp_path, sweep, input="unused.jsonl", settings={"field": "text", "model": "none"})
    assert [name for name, _ in runs] == ["small_a", "small_b", "large_a", "large_b"]
    assert [(c.settings["model"], c.input) for _, c in runs][1] == ("org/small", "b.jsonl")
    assert all(c.settings["field"] == "text" and c.sweep is None for _, c in runs)


def test_a_key_within_a_setting_that_is_a_table_is_named_by_its_dots(tmp_path):
    runs = found(tmp_path, {"values": {"least": [2, 3]}}, "sweep.settings.values.most=[8]", input="a.txt")
    assert [(name, c.settings["values"]) for name, c in runs] == [
        ("least=2", {"least": 2, "most": 8}),
        ("least=3", {"least": 3, "most": 8}),
    ]


def test_keys_that_are_zipped_vary_as_one(tmp_path):
    sweep = {"zip": [["input", "settings.lang"]], "input": ["a.txt", "b.txt"], "settings": {"lang": ["en", "de"]}}
    runs = found(tmp_path, {**sweep, "resources": {"gpus": [1, 2]}})
    assert [(name, c.input, c.settings["lang"], c.resources.gpus) for name, c in runs] == [
        ("a_gpus=1", "a.txt", "en", 1),
        ("a_gpus=2", "a.txt", "en", 2),
        ("b_gpus=1", "b.txt", "de", 1),
        ("b_gpus=2", "b.txt", "de", 2),
    ]


def test_without_an_input_keys_of_tables_vary_the_run_and_all_others_its_items(tmp_path):
    assert found(tmp_path, {"lr": [0.1, 0.2]}) is None
    runs = found(tmp_path, {"settings": {"model": ["a", "b"]}, "lr": [0.1, 0.2], "random": 1})
    assert [(name, c.settings["model"], c.sweep) for name, c in runs] == [
        ("a", "a", {"lr": [0.1, 0.2], "random": 1}),
        ("b", "b", {"lr": [0.1, 0.2], "random": 1}),
    ]
    drawn = found(tmp_path, {"settings": {"lr": {"uniform": [0, 1]}}, "random": 3})
    assert len({c.settings["lr"] for _, c in drawn}) == 3
    with pytest.raises(SlurmGPUError, match=r"zip: lr, settings\.model mix keys of the run with keys of its items"):
        found(tmp_path, {"zip": [["lr", "settings.model"]], "settings": {"model": ["a", "b"]}, "lr": [1, 2]})


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"input": ["x/data.jsonl.gz", "y/data.jsonl.gz"]}, ["x-data", "y-data"]),
        ({"input": ["imgs/*.png", "scans/*.png"]}, ["imgs", "scans"]),
        ({"input": [["a", "b"], ["c"]]}, ["input-0", "input-1"]),
        ({"model": ["o/x/b", "o/y/b"]}, ["x-b", "y-b"]),
        ({"model": ["o/x/b/c", "o/y/b/c"]}, ["x-b-c", "y-b-c"]),
        ({"model": ["a", 1]}, ["model-0", "model-1"]),
        ({"model": [1, [1]]}, ["model-0", "model-1"]),
        ({"model": ["!", "a"]}, ["model-0", "model-1"]),
        ({"settings.t": [0.5, -1, True]}, ["t=0.5", "t=-1", "t=true"]),
        ({"slurm.time": ["04:00:00", "1-00"]}, ["time=04-00-00", "time=1-00"]),
        ({"prompt": ["say: {text}" * 9, "why?"]}, ["prompt-0", "prompt-1"]),
        ({"a": ["x_y", "x"], "b": ["z", "y_z"]}, ["0", "1"]),
        ({"a": ["x" * 40, "x"], "b": ["y" * 40, "y"], "c": ["z" * 40, "z"]}, ["0", "1"]),
        ({"model": ["org/a", "org/a"]}, ["0", "1"]),
        ({"prompt": ["Say password=abcdef", "why?"]}, ["prompt-0", "prompt-1"]),
        ({"settings.api_key": ["abc", "def"]}, ["api_key-0", "api_key-1"]),
        ({"a": ["one"], "b": ["two"]}, ["one_two"]),
    ],
)
def test_names_tell_the_values_that_vary(values, names):
    rows = [dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True)]
    assert names_of(rows) == names


def test_runs_whose_values_were_drawn_twice_have_a_name_each():
    found = names_beside([{"n": 1}, {"n": 1}], (), {"b": {"n": 1}, "a": {"n": 1}})
    assert [each.name for each in found] == ["b", "a"]


def test_no_name_is_empty_beside_runs_of_more_keys():
    assert names_of([{"lr": 1, "batch_size": 2}, {"lr": 1}]) == ["0", "1"]


@pytest.mark.parametrize(
    ("listed", "values", "names"),
    [
        # Values that are there keep their names, whatever the others are.
        (
            {"small": "org/small", "large": "org/large"},
            ["other/small", "org/large", "org/small"],
            ["other-small", "large", "small"],
        ),
        ({"cot": "cot", "plain": "plain"}, ["cot", "plain", "why? " * 12], ["cot", "plain", "model-2"]),
        ({"model-0": "why? " * 9, "model-1": "how? " * 9}, ["where? " * 9, "how? " * 9], ["model-2", "model-1"]),
        ({"small": "org/small"}, ["org/large"], ["large"]),  # the value `small` is left out
        # Others get names that none has.
        ({"small": "org/small"}, ["other/small"], ["other-small"]),
        ({"a": "x/a", "x-a": "y/a", "a-2": "z/a"}, ["a"], ["a-3"]),
        ({"a": "why? " * 12}, ["model-2", "a"], ["model-2", "model-2-2"]),
        ({}, ["sweep.json"], ["sweep.json-2"]),
        # Two runs of the same values: that which today's list names, or the first.
        ({"small": "org/small", "org-small": "org/small"}, ["org/small"], ["small"]),
        ({"small": "org/small", "org-small": "org/small"}, ["org/small", "other/small"], ["org-small", "other-small"]),
        ({"b": 0.5, "a": 0.5}, [0.5, 0.7], ["b", "model=0.7"]),
        ({"b": {"u": 1, "v": 2}}, [{"v": 2, "u": 1}, 1], ["b", "model-1"]),
        ({"model=1": 1}, [1.0], ["model=1.0"]),
    ],
)
def test_runs_are_known_by_their_values_and_new_ones_get_names_that_none_has(listed, values, names):
    configurations = [{"model": value} for value in values]
    found = names_beside(configurations, (), {name: {"model": value} for name, value in listed.items()})
    assert [each.name for each in found] == names
    # Once they are listed, they are known in any order, and under any name of the key.
    all_listed = {name: {"model": value} for name, value in listed.items()} | dict(
        zip(names, configurations, strict=True)
    )
    again = [{"settings.model": value} for value in values[::-1]]
    assert names_beside(again, (), respelled(all_listed, ["settings.model"])) == [RunName(name) for name in names[::-1]]


def test_values_that_zip_repeats_have_a_run_each():
    values = [{"model": "a", "n": 1}, {"model": "a", "n": 1}, {"model": "b", "n": 2}]
    listed = dict(zip(("0", "1"), values, strict=False))
    assert [each.name for each in names_beside(values, ["n"], listed)] == ["0", "1", "2"]


def test_a_key_that_is_new_names_the_new_runs_and_tells_of_those_that_may_be_the_same():
    values = [{"model": "a", "seed": 0}, {"model": "b", "seed": 0}]
    found = names_beside(values, (), {"a": {"model": "a"}, "c": {"model": "c"}})
    assert found == [RunName("a_seed=0", "a"), RunName("b")]


@pytest.mark.parametrize(
    ("sweep", "texts", "said"),
    [
        ({"input": ["a", "b"]}, ["input=c"], r"-s and \[sweep\] input set the same key"),
        (
            {"input": ["a", "b"], "run_dir": ["c", "d"]},
            [],
            r"\[sweep\] cannot vary run_dir: it is the folder that holds all runs",
        ),
        ({"input": "a", "settings": {"n": list(range(2000))}}, [], "makes 2,000 runs; expected at most 1,000"),
        ({"input": ["a", "b"], "resorces.gpus": [1]}, [], "a run file has no table 'resorces'"),
        (
            {"input": "a", "n": [1, 2], "settings": {"n": [3, 4]}},
            [],
            r"varies n and settings\.n, which are the same key",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, sweep, texts, said):
    with pytest.raises(SlurmGPUError, match=said):
        found(tmp_path, sweep, *texts)


CLASS = """
from slurmgpu import Text


class W:
    columns = {"a": Text()}
    batch_size = 1

    def __init__(self, seed=0):
        pass

    def __call__(self, items):
        return [{"a": "a"} for _ in items]
"""


def test_a_key_that_may_be_a_setting_as_well_is_refused_with_both_ways_to_write_it(tmp_path):
    (tmp_path / "w.py").write_text(CLASS)
    (tmp_path / "a.jsonl").write_text("{}\n")
    tables = {"workload": {"use": "w.py:W"}, "input": "a.jsonl"}
    source = GivenRunFile({**tables, "sweep": {"seed": [1, 2]}}, tmp_path)
    [first, _] = variants_of(source, Overrides()).runs
    both = r'is ambiguous\. Write "\.seed" = … for the key of the run file, or settings\.seed = … for the setting of'
    with pytest.raises(SlurmGPUError, match=both), draft_run(source, first.overrides):
        pass
    source = GivenRunFile({**tables, "sweep": {".seed": [1, 2]}}, tmp_path)
    with draft_run(source, variants_of(source, Overrides()).runs[1].overrides) as draft:
        assert draft.plan.seed == 2
    with pytest.raises(SlurmGPUError, match=r"varies \.seed, which makes a run for each"), draft_run(source):
        pass
    empty = GivenRunFile({**tables, "sweep": {}}, tmp_path)
    with pytest.raises(SlurmGPUError, match="has no key to vary"), draft_run(empty):
        pass


def test_an_input_with_a_file_that_is_gone_is_not_taken_for_another(tmp_path):
    there, gone, index = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "input.idx"
    there.write_text("one\n")
    scans, asked = Scans(tmp_path, lambda: tmp_path), SimpleNamespace(index=index, stride=1)
    scans.scan("", [there], asked, lambda: inputs.scan([there], index, stride=1))
    with pytest.raises(SlurmGPUError, match=r"b\.txt"):
        scans.scan("", [there, gone], asked, lambda: inputs.scan([there, gone], index, stride=1))
