"""A failure class is a row of a table: one that a test puts there is seen, told and acted upon wherever classes are."""

import pytest

import slurmgpu
from slurmgpu.cli import completion
from slurmgpu.errors import SlurmGPUError
from slurmgpu.page.facts import classes_of
from slurmgpu.report.report_file import bad_nodes, retriable
from slurmgpu.report.state_words import failure_words
from slurmgpu.run.directory import Run
from slurmgpu.run.failures import ITEM, LOADING, POLICIES, Policy, class_of_job
from slurmgpu.search.classes import events_of_class

WORKLOAD = """
from slurmgpu import Array


class Licensed:
    columns = {"x": Array("int64")}
    batch_size = 2

    def __init__(self, n_licences=0):
        self.n_licences = n_licences

    def load(self, task):
        if not self.n_licences:
            raise RuntimeError("no licence is left on this node")

    def __call__(self, items):
        if any(item.index >= self.n_licences for item in items):
            raise RuntimeError("no licence is left for the item")
        return [{"x": item.index} for item in items]
"""


def lacks_licence(error):
    return "no licence" in str(error)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run by the executor `debug` with so many licences, where there is a failure class of them."""

    def compute(n_licences, node_at_fault=True):
        policy = Policy(
            "the licence server had none left", True, node_at_fault=node_at_fault, seen=seen, states=("UNLICENSED",)
        )
        monkeypatch.setitem(POLICIES, "licence", policy)
        return slurmgpu.submit(
            tmp_path / "slurmgpu.toml", executor="debug", settings={"n_licences": n_licences}, run_dir=tmp_path / "run"
        )

    seen = {LOADING: lacks_licence, ITEM: lacks_licence}
    (tmp_path / "licensed.py").write_text(WORKLOAD)
    (tmp_path / "items.txt").write_text("item\n" * 6)
    run_file = 'input = "items.txt"\nshard_items = 2\nhtml = false\n[workload]\nuse = "licensed.py:Licensed"\n'
    (tmp_path / "slurmgpu.toml").write_text(f"{run_file}[resources]\ngpus = 0\n")
    return compute


def test_an_attempt_fails_with_the_class_and_its_policy_is_kept(run):
    found = run(0)
    report, status = found.report(), found.status()
    assert report["failures"] == status["failures"] == {"licence": 1}
    [attempt] = report["attempts"]
    assert attempt["message"] == "RuntimeError: no licence is left on this node"
    assert failure_words(status) == "tasks: 1 licence"
    assert retriable(report)
    assert bad_nodes(report["attempts"]) == [attempt["node"]]
    [shown] = classes_of(report)
    assert (shown["name"], shown["meaning"]) == ("licence", "the licence server had none left")
    assert shown["policy"] == "another submission may compute it; it excludes the node"
    [event] = events_of_class(Run.open(found.folder), "licence")
    assert (event.what, event.message) == (f"attempt {attempt['attempt']}", attempt["message"])


def test_items_fail_with_the_class(run):
    found = run(5, node_at_fault=False)
    assert found.report()["complete"]
    assert found.report()["errors_by_class"] == found.status()["errors_by_class"] == {"licence": 1}
    assert failure_words(found.status()) == "items: 1 licence"
    with slurmgpu.open(found.folder / "merged.h5") as merged:
        assert merged.errors[5].startswith("licence: RuntimeError: no licence is left for the item")
    [event] = events_of_class(Run.open(found.folder), "licence")
    assert (event.what, event.item) == ("item 5", 5)


def test_an_item_of_which_the_node_is_at_fault_ends_the_attempt_and_has_no_row(run):
    found = run(5)
    report = found.report()
    assert (report["failures"], report["errors_by_class"]) == ({"licence": 1}, {})
    assert not report["complete"]
    assert report["attempts"][0]["message"].startswith("item 4: RuntimeError: no licence is left for the item")


def test_it_is_offered_and_known(run):
    run(1)
    assert completion.complete_class("lic") == ["licence"]
    assert class_of_job("UNLICENSED") == "licence"
    assert class_of_job("FAILED", "74:0") == "file_system"
    assert class_of_job("FAILED", "1:0") == "crash"
    assert class_of_job("COMPLETED", "0:0") is None
    with pytest.raises(SlurmGPUError, match="Did you mean 'licence'"):
        events_of_class(None, "licences")
