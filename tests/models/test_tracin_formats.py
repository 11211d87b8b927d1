"""Exports and summary of tracin: what they say that they wrote, and what is said where something is amiss."""

import json
from contextlib import contextmanager

import pytest

from tests.support.runs import report
from tests.support.tracin_projects import ENTITIES, make_project, write_triples

ALONE = ("CHEBI:18", "predicate:0", "CHEBI:19")
N_TESTS, TOP_K = 3, 5


@pytest.fixture(scope="module")
def ran(tmp_path_factory, slurmgpu):
    """A run with a filter: of three test triples one has no training triple near it, and one item is none."""
    folder = make_project(
        tmp_path_factory.mktemp("formats"), n_hops=1, names="node_name_dict.txt", edge_map="edge_map.json"
    )
    train = [(ENTITIES[n % 10], f"predicate:{n % 3}", ENTITIES[(n * n + 1) % 10]) for n in range(40)]
    write_triples(folder / "train.txt", train)
    write_triples(folder / "test.txt", [train[0], train[1], ALONE, ("CHEBI:1", "predicate:0", "nobody")])
    slurmgpu("submit", "tracin.toml", "--executor", "debug", cwd=folder, expect=0, OMP_NUM_THREADS="1")
    return folder


def test_an_export_says_how_many_tests_and_lines_it_has(ran, slurmgpu):
    said = slurmgpu("export", "run", "-o", "o.csv", cwd=ran, expect=0).stdout
    n_lines = len((ran / "o.csv").read_text().splitlines()) - 1
    assert 0 < n_lines <= 2 * TOP_K
    assert said == f"o.csv: {N_TESTS} test triples, {n_lines} lines below the header\n"
    assert slurmgpu("export", "run", "-o", "o.json", cwd=ran, expect=0).stdout == (
        f"o.json: {N_TESTS} test triples, {n_lines} influences\n"
    )
    assert slurmgpu("export", "run", "-o", "o.jsonl", cwd=ran, expect=0).stdout == f"o.jsonl: {N_TESTS + 1} rows\n"


@contextmanager
def other(path, content):
    """For a while a file has other content, or, for None, is not there."""
    former = path.read_bytes()
    path.unlink() if content is None else path.write_text(content)
    yield
    path.write_bytes(former)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("train.txt", "CHEBI:1\tpredicate:0\tCHEBI:2\n", "train.txt changed since this run was planned."),
        ("train.txt", "CHEBI:1\n", "train.txt, line 1: expected head, relation and tail"),
        ("node_dict.txt", None, "Cannot read node_dict.txt: No such file or directory."),
        ("node_name_dict.txt", "nobody\n", "node_name_dict.txt, line 1: expected a label"),
        ("edge_map.json", "[", "found no JSON"),
    ],
)
def test_an_export_with_other_files_says_what_to_put_back(ran, slurmgpu, name, content, found):
    with other(ran / name, content):
        said = slurmgpu("export", "run", "--format", "json", "-o", "-", cwd=ran, expect=2).stderr
    assert found in said
    assert said.endswith(" Restore the former file, and export again.\n")
    assert "plan again" not in said
    assert "resubmit" not in said


def test_a_filter_that_leaves_a_test_nothing_is_in_the_summary(ran, slurmgpu):
    summary = report(ran)["summary"]
    assert summary["n_none_counted"] == 1
    assert summary["least_counted"] == 0
    assert summary["median_counted"] > 0
    assert "leaves no training triple for 1 of 3 test triples: their lists are empty" in summary["hint"]
    assert "\n  none counted           1\n" in slurmgpu("report", "run", cwd=ran, expect=0).stdout


def test_training_triples_are_counted_from_0_in_the_summary_too(ran):
    train = (ran / "train.txt").read_text().splitlines()
    listed = report(ran)["summary"]["listed_most_often"]
    assert listed
    for name in listed:
        line, _, triple = name.removeprefix("train[").partition("]: ")
        assert triple == train[int(line)].replace("\t", " ")


def test_self_influences_are_counted_as_triples(tmp_path, slurmgpu):
    folder = make_project(tmp_path, top_k=0)
    slurmgpu("submit", "tracin.toml", "--executor", "debug", cwd=folder, expect=0, OMP_NUM_THREADS="1")
    assert slurmgpu("export", "run", "-o", "o.json", cwd=folder, expect=0).stdout == "o.json: 12 triples\n"
    assert not {"least_counted", "hint"} & report(folder)["summary"].keys()
    assert len(json.loads((folder / "o.json").read_text())) == 12
