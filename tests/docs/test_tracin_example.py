"""The example of tracin: it trains, traces and checks, and its page shows what it prints."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurmgpu

EXAMPLE = Path(__file__).parents[2] / "docs/examples/tracin"
FILES = ("train.txt", "test.txt")
N_TESTS = 411  # of 661: proponents.py shows the last of these, too
BLOCK = re.compile(r"[\w ]+ \| [\w -]+ \| [\w ]+, \d\.\d\d\n( +\+\d+  .*\n){3}( +-\d+  .*\n){0,3}")


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A copy of the example's folder in which its demo has run, with few epochs and tests; and what it printed."""
    folder = tmp_path_factory.mktemp("example") / "tracin"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    tests = (folder / "test.txt").read_text().splitlines(keepends=True)
    (folder / "test.txt").write_text("".join(tests[:N_TESTS]))
    return folder, run(folder, "demo.py", "--epochs", "5")


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_traces_every_test_triple_to_training_triples(traced):
    folder, printed = traced
    assert f"tracin  complete  {N_TESTS} of {N_TESTS} rows, 0 of them failed" in printed
    assert len(list((folder / "runs/model").glob("checkpoint-*.pt"))) == 5
    assert len(BLOCK.findall(printed)) == 4
    train = {line.replace("_", " ").replace("\t", " | ") for line in (folder / "train.txt").read_text().splitlines()}
    assert set(re.findall(r"^ +[+-]\d+  (.*)$", printed, re.M)) <= train


def test_proponents_of_the_example_share_more_with_their_prediction_than_others_do(traced):
    folder, _ = traced
    merged = slurmgpu.open(folder / "runs/tracin/merged.h5")
    train, test = ([line.split("\t") for line in (folder / name).read_text().splitlines()] for name in FILES)
    shared = [
        sum(one == other for one, other in zip(train[line], triple, strict=True))
        for triple, lines in zip(test, merged["proponents"][:], strict=True)
        for line in lines
        if line >= 0
    ]
    by_chance = sum(one == other for a in test for b in train[::50] for one, other in zip(a, b, strict=True))
    assert sum(shared) / len(shared) > 3 * by_chance / (len(test) * len(train[::50]))


@pytest.mark.nightly
def test_the_example_leaves_proponents_out_and_trains_again(traced):
    folder, _ = traced
    printed = run(folder, "leave_out.py", "--predictions", "2", "--draws", "1", "--epochs", "2")
    assert len(re.findall(r"^(?:0\.\d\d  |1\.00  ){4}\w.* \| ", printed, re.M)) == 2
    assert re.search(r"^random +-?\d\.\d\d  \(", printed, re.M)


def test_the_examples_page_shows_blocks_as_they_are_printed():
    page = (EXAMPLE / "README.md").read_text()
    assert len(BLOCK.findall(page)) == 4
    assert re.search(r"^proponents cost more than random triples in \d+ % of all comparisons,$", page, re.M)
