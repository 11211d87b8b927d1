"""Faults on demand: each takes the way of the real one, and what came of it is told as it is."""

import json

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.faults import KINDS, parse_faults
from slurmgpu.faults.verdicts import judge
from slurmgpu.run.directory import Run
from slurmgpu.shards.shard_file import read_directory
from tests.local.test_long_items import LONG, check_counts
from tests.support.runs import (
    check_rows,
    datasets,
    let_go,
    make_project,
    records,
    report,
    start,
    submissions,
    wait_until,
)

LOCAL = ("submit", "--executor", "local", "--gpus", "0")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, slurmgpu):
    """The datasets of a run of 100 items in which nothing fails."""
    folder = make_project(tmp_path_factory.mktemp("undisturbed") / "project", 100)
    done = slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0)
    assert not (folder / "run" / "injected").exists()
    assert "every other item" not in done.stderr
    return datasets(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty. Name one or more faults"),
        ("crash@3,", "The faults are kill@17, preempt@17, timeout, "),
        ("crsh@3", "there is no fault 'crsh'. Did you mean 'crash'?"),
        ("crash", "crash needs the number of one item, counted from 0, such as crash@17."),
        ("damage@last", "damage needs the number of one shard, counted from 0, such as damage@2."),
        ("timeout@3", "timeout takes no number. Write timeout alone."),
    ],
)
def test_a_fault_that_is_not_understood_gets_a_sentence(text, said):
    with pytest.raises(SlurmGPUError, match=r"^--inject ") as refused:
        parse_faults([text])
    assert said in str(refused.value)


def test_faults_are_kept_once_and_in_the_order_in_which_they_strike():
    faults = parse_faults(["crash@17, timeout", "kill@60,crash@17"])
    assert list(map(str, faults)) == ["kill@60", "timeout", "crash@17"]


@pytest.mark.parametrize(
    ("argv", "faults", "said"),
    [
        ((), "crash@100", "this run has no item 100. Its items are 0 to 99."),
        ((), "damage@13", "this run has no shard 13. Its shards are 0 to 12."),
        ((), "oom@3,error@3", "an item can have only one fault."),
        (("--set", "item_s=0"), "oom@99", None),
        (("--executor", "debug"), "kill@3", "which with the executor debug is your own"),
        (("--executor", "slurm"), "error@3", "Inject the same faults on this machine: --executor local."),
    ],
)
def test_a_fault_that_could_not_happen_is_refused_before_anything_is_written(project, slurmgpu, argv, faults, said):
    folder = project(100)
    done = slurmgpu(*LOCAL, *argv, "--inject", faults, "--dry-run", cwd=folder, expect=2 if said else 0)
    assert (said or "") in done.stderr
    assert said or f"{faults}: a rehearsal with injected faults" in done.stdout
    assert not (folder / "run").exists()


def test_a_batch_that_is_too_large_needs_a_batch(project, slurmgpu):
    folder = project(8, batch_size=1)
    said = slurmgpu(*LOCAL, "--inject", "oom@3", cwd=folder, expect=2).stderr
    assert "For an item that never fits into memory, use cuda_oom@3." in said


def test_what_a_run_survives_changes_no_byte_and_what_fails_costs_its_item_alone(project, undisturbed):
    folder = project(100, held_from=64)
    process = start(*LOCAL, "--tasks", "3", "--inject", "kill@60,oom@41,preempt@30,timeout", cwd=folder)
    # Two tasks end of it. Only then the third may: else it might see the others at work, and leave them the rest.
    wait_until(lambda: [r["state"] for r in records(folder)].count("ended") == 2, "the ends of two tasks")
    let_go(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert datasets(folder) == undisturbed
    found = report(folder)
    assert found["failures"] == {"preempted": 1, "timeout": 1}
    assert found["worker_deaths"] == {"crash": 1}
    assert found["submissions"][0]["inject"] == ["kill@60", "preempt@30", "timeout", "oom@41"]
    [ended] = [record for record in records(folder) if record["failure"] == "timeout"]
    assert len(ended["published"]) == 1
    assert ended["started"] < ended["end_time"]
    assert read_directory(folder / "run" / "shards" / "00005.h5").notes["oom_batch"] == 1
    of_kill = "a worker was killed with item 60 in flight; another worker continued, and item 60 has its row"
    assert f"\nkill@60: {of_kill}\n" in output
    of_end = f"the walltime of {ended['attempt']} ended early (timeout); it published 1 shard and claimed no more"
    assert f"\ntimeout: {of_end}\n" in output
    assert "; shard 5 continued with batches of at most 1, and item 41 has its row\n" in output
    assert "\nevery other item has its row.\n" in output


def test_items_that_cannot_be_computed_fail_alone_in_the_class_of_their_fault(project, slurmgpu):
    folder = project(100, settings={"faults": {"30": "item_error"}})
    done = slurmgpu(*LOCAL, "--inject", "crash@17", "--inject", "cuda_oom@40,error@77", cwd=folder, expect=0)
    check_rows(folder, 100, errors={17, 30, 40, 77})
    classes = {item["index"]: (item["class"], item["message"]) for item in report(folder)["errors"]}
    assert classes[17] == ("crash", "the worker died by SIGSEGV")
    assert classes[40] == ("cuda_oom", "out of memory with a batch of 1")
    assert classes[77][0] == "item_error"
    assert classes[77][1].startswith("RuntimeError: error@77 was injected (")
    [record] = records(folder)
    assert [death["items"] for death in record["deaths"]] == [[16, 19], [17]]
    said = "item 17 killed 2 workers; it is quarantined, and its row says crash: the worker died by SIGSEGV"
    assert f"crash@17: {said}\n" in done.stderr
    assert "rehearsal: faults were injected: cuda_oom@40, error@77, crash@17" in done.stdout
    assert done.stderr.endswith("1 more failed without an injected fault; every other item has its row.\n")
    # A report lists the first failed items only.
    found = report(folder)
    verdicts = judge(Run.open(folder / "run"), {**found, "errors": found["errors"][:2], "n_errors": 100})
    assert all(verdict.kept for verdict in verdicts)
    assert "; item 77 comes after the last failed item that the report lists" in verdicts[1].text
    assert verdicts[-1].text.startswith("99 more failed without an injected fault")


def test_what_a_fault_leaves_is_computed_by_the_next_submission_which_goes_on_with_the_faults(
    project, slurmgpu, undisturbed
):
    folder = project(100)
    faults = ("--inject", "timeout,damage@0,preempt@70,kill@90")
    done = slurmgpu(*LOCAL, *faults, cwd=folder, expect=3)
    assert [hole["shard"] for hole in report(folder)["missing"]] == list(range(13))
    assert (
        "damage@0: a byte of shard 0 was flipped on disk; the merge found the damage and set the shard aside"
        in done.stderr
    )
    assert "kill@90: it has not happened so far" in done.stderr
    assert "without a row so far: 100 items. To compute the rest: slurmgpu resubmit " in done.stderr
    done = slurmgpu("resubmit", "run", cwd=folder, expect=3)
    assert "local2_0.0 got SIGTERM with item 70 in flight (preempted) and released shard 8" in done.stderr
    done = slurmgpu("resubmit", "run", cwd=folder, expect=0)
    assert datasets(folder) == undisturbed
    assert "the merge found the damage, and local2_0.0 recomputed the shard" in done.stderr
    assert "(preempted); local3_0.0 computed shard 8, and item 70 has its row" in done.stderr
    assert [death["class"] for death in records(folder)[-1]["deaths"]] == ["crash"]
    assert [len((folder / "run" / "injected" / name).read_text().splitlines()) for name in ("timeout", "kill@90")] == [
        1,
        1,
    ]


def test_a_walltime_that_ends_early_with_the_last_shard_leaves_nothing(project, slurmgpu):
    folder = project(8)
    done = slurmgpu(*LOCAL, "--inject", "timeout", cwd=folder, expect=0)
    assert (
        "timeout: the walltime of local1_0.0 ended early; it published 1 shard, and no other was left\n" in done.stderr
    )
    assert report(folder)["failures"] == {}


def test_a_preemption_at_the_end_of_the_last_item_leaves_nothing(project, slurmgpu):
    folder = project(2, settings={"n": 1}, **LONG)
    done = slurmgpu(*LOCAL, "--inject", "preempt@1", cwd=folder, expect=0)
    said = "local1_0.0 got SIGTERM with item 1 in flight and published the last shard; item 1 has its row"
    assert f"preempt@1: {said}\n" in done.stderr
    assert report(folder)["failures"] == {}


def test_a_fault_of_a_look_is_lifted_by_the_number_of_its_item(project, slurmgpu):
    folder = project(40)
    look = ("submit", "--items", "30:38", "--executor", "debug", "--gpus", "0")
    slurmgpu(*look, "--inject", "error@33", cwd=folder, expect=0)
    done = slurmgpu("resubmit", "run-look", "--failed", cwd=folder, expect=0)
    assert "error@33: the workload raised for item 33; item 33 has its row from debug2_0.0, which ran" in done.stderr
    assert "not as promised" not in done.stderr


def test_resubmissions_of_the_merge_go_on_with_the_faults_and_failed_items_computed_anew_are_spared(project, slurmgpu):
    folder = project(40, auto_resubmit=1)
    done = slurmgpu(
        "submit", "--executor", "debug", "--gpus", "0", "--inject", "timeout,error@30", cwd=folder, expect=0
    )
    check_rows(folder, 40, errors={30})
    assert [line["inject"] for line in submissions(folder)] == [["timeout", "error@30"]] * 2
    assert "error@30: the workload raised for item 30; its row says item_error: RuntimeError" in done.stderr
    done = slurmgpu("resubmit", "run", "--failed", cwd=folder, expect=0)
    check_rows(folder, 40)
    assert "item 30 has its row from debug3_0.0, which ran without this fault" in done.stderr


@pytest.mark.nightly
def test_several_processes_meet_faults_as_one_does(project, slurmgpu):
    pytest.importorskip("torch")
    folder = project(24, "Ranks", resources={"processes": "per-gpu"})
    argv = ("submit", "--executor", "local", "--device", "cpu", "--gpus", "2")
    slurmgpu(*argv, "--inject", "oom@3,preempt@10", cwd=folder, expect=3)
    done = slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_rows(folder, 24)
    assert report(folder)["failures"] == {"preempted": 1}
    assert (
        "oom@3: out of memory with 4 items in the batch, including 3; shard 0 continued with batches of at most 1"
        in done.stderr
    )
    assert "local2_0.0 computed shard 1, and item 10 has its row" in done.stderr


def test_an_item_whose_progress_is_kept_goes_on_from_there(project, slurmgpu):
    folder = project(4, settings={"n": 6}, **LONG)
    slurmgpu(*LOCAL, "--inject", "kill@0,preempt@1", cwd=folder, expect=3)
    assert records(folder)[0]["deaths"][0]["shard"] == 0
    done = slurmgpu("resubmit", "run", cwd=folder, expect=0)
    check_counts(folder, 4, 6)
    assert (
        "kill@0: a worker was killed with item 0 in flight; another worker continued, and item 0 has its row"
        in done.stderr
    )
    assert "local2_0.0 computed shard 1, and item 1 has its row" in done.stderr


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory, slurmgpu):
    """A run in which every fault has happened, and its report."""
    folder = make_project(tmp_path_factory.mktemp("rehearsed") / "project", 64)
    faults = "crash@1,cuda_oom@9,error@17,oom@25,kill@33,preempt@41,timeout,damage@6"
    slurmgpu(*LOCAL, "--tasks", "3", "--inject", faults, cwd=folder, expect=3)
    slurmgpu("resubmit", "run", cwd=folder, expect=0)
    return folder


LIES = {
    "crash@1": lambda found: found.update(errors=[e for e in found["errors"] if e["index"] != 1]),
    "cuda_oom@9": lambda found: found["errors"][1].update({"class": "crash"}),
    "error@17": lambda found: found.update(errors=found["errors"][:-1], n_errors=found["n_errors"] - 1),
    "oom@25": lambda found: found["errors"].append({"index": 25, "class": "cuda_oom", "message": "too large"}),
    "kill@33": lambda found: [attempt.update(deaths=[]) for attempt in found["attempts"]],
    "preempt@41": lambda found: [a.update(failure="lost") for a in found["attempts"] if a["failure"]],
    "timeout": lambda found: [a.update(failure=None, reason="deadline") for a in found["attempts"]],
    "damage@6": lambda found: found["missing"].append({"shard": 6, "start": 48, "stop": 56, "damaged": None}),
}


def test_every_fault_has_a_lie_that_is_found_out():
    assert {fault.kind for fault in parse_faults(LIES)} == set(KINDS)


@pytest.mark.parametrize("fault", LIES)
def test_a_promise_that_was_not_kept_is_told(rehearsed, fault):
    found = json.loads((rehearsed / "run" / "report.json").read_text())
    run = Run.open(rehearsed / "run")
    verdicts = judge(run, found)
    assert [verdict.text for verdict in verdicts if not verdict.kept] == []
    LIES[fault](found)
    broken = [verdict.text for verdict in judge(run, found) if not verdict.kept]
    assert any(text.startswith(f"{fault}: not as promised: ") for text in broken), broken


def test_a_run_that_did_not_keep_its_promise_or_met_no_fault_ends_with_code_1(project, slurmgpu):
    folder = project(13)  # the last one is left over when batches of four are cut
    done = slurmgpu("submit", "--executor", "debug", "--gpus", "0", "--inject", "oom@12", cwd=folder, expect=1)
    assert "oom@12: it did not happen: the workload was never called with this item" in done.stderr
    check_rows(folder, 13)
