"""The example of train: it sweeps, ranks, and reads digits; also with two processes for each training."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import slurmgpu
from tests.support.nightly import by_night

EXAMPLE = Path(__file__).parents[2] / "docs/examples/digits"
TABLE = re.compile(r"^  ranking  val accuracy +lr  width  at step  wall s\n((?:  \d .*\n){4})", re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example") / "digits"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    return folder


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("epochs", "least"), [(5, 0.95), by_night(12, 0.97)])
def test_the_example_reads_digits_that_it_has_not_seen(folder, epochs, least):
    # By day not the 12 epochs that the page shows; and a second task would be another process that imports PyTorch.
    printed = run(folder, "demo.py", "--set", f"epochs={epochs}", "--tasks", "1")
    assert "digits  complete  4 of 4 rows, 0 of them failed" in printed
    assert len(TABLE.findall(printed)) == 1
    found = re.search(r"^width 32, lr 0\.01: (\d+) of 360 digits of the test split$", printed, re.M)
    assert int(found[1]) / 360 >= least
    with slurmgpu.open(folder / "runs/digits/merged.h5") as merged:
        assert merged["final"][3]["test_accuracy"] >= least


@pytest.mark.nightly
def test_two_processes_train_the_example_as_well(folder):
    (folder / "one.toml").write_text(re.sub(r"\[sweep\].*?\n\n", "", (folder / "train.toml").read_text(), flags=re.S))
    options = ["--executor", "local", "--gpus", "2", "--device", "cpu", "--run-dir", "runs/two", "--set", "lr=0.01"]
    printed = run(folder, "-m", "slurmgpu", "submit", "one.toml", *options)
    assert "two  complete  1 of 1 row, 0 of them failed" in printed
    with slurmgpu.open(folder / "runs/two/merged.h5") as merged:
        assert merged["world_size"][0] == 2
        assert merged["final"][0]["test_accuracy"] >= 0.97


def test_the_examples_page_shows_the_ranking_as_it_is_printed():
    assert len(TABLE.findall((EXAMPLE / "README.md").read_text())) == 1
