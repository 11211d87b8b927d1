"""What a submission writes before and after something is queued, and what a merge does next."""

import contextlib
import errno
import io
import logging
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slurmgpu.errors import MayBeQueuedError, NoAnswerError, SlurmGPUError
from slurmgpu.executors import manual_jobs, resubmission, run_merge, submission
from slurmgpu.executors.interface import Started
from slurmgpu.inputs import promise
from slurmgpu.operations import resubmit
from slurmgpu.operations.submit import remove_unused
from slurmgpu.run.crash_history import history_path
from slurmgpu.run.directory import Run
from slurmgpu.run.recompute import Again, Recompute, read_recompute, write_recompute
from slurmgpu.run.submissions import Submission
from tests.support.failing import Failing
from tests.support.pretend_runs import pretend_run
from tests.support.runs import planned_run

NEXT = Submission(2, "spool", "cpu", n_tasks=1, n_concurrent=1, gpus_per_task=0)


@pytest.fixture
def run(tmp_path):
    """A run whose only submission has ended."""
    run = pretend_run(tmp_path / "run", 10_000, n_tasks=1)
    run.record_submission({"submission": 1, "state": "ended"})
    return run


def submit(run, monkeypatch, *, start=lambda: None, queues=True, tell=None):
    """Submit a run whose executor does this to start; what is written when it starts."""
    seen = []

    def start_seen(run, its):
        seen.append(run.last_submission())
        start()
        return Started({"state": "queued", "spool_job": 3})

    fits = {"fit": lambda its, container: (its, ["fitted"]), "place": lambda run, its: {"spool": "/var/spool"}}
    spool = SimpleNamespace(queues=queues, start=start_seen, **fits)
    monkeypatch.setattr(submission, "executor_named", lambda name: spool)
    return submission.start(run, lambda lock: (NEXT, ["prepared"]), tell=tell), seen


@pytest.mark.parametrize("tells", [True, False])
def test_a_submission_is_recorded_and_told_before_anything_is_queued(run, monkeypatch, tells):
    told = []
    start = lambda: told.append("starts")  # noqa: E731
    outcome, [seen] = submit(run, monkeypatch, start=start, tell=told.append if tells else None)
    assert (seen["submission"], seen["state"], seen["spool"]) == (2, "submitting", "/var/spool")
    assert run.last_submission() == {**seen, "state": "queued", "spool_job": 3}
    assert outcome.jobs == {"spool_job": 3}
    assert told == (["prepared", "fitted", "starts"] if tells else ["starts"])
    assert outcome.notes == (() if tells else ("prepared", "fitted"))


@pytest.mark.parametrize(
    ("error", "queues", "state"),
    [
        (SlurmGPUError("No such partition."), True, "refused"),
        (NoAnswerError("Slurm takes no jobs.", is_silent=True), True, "refused"),
        (MayBeQueuedError("Slurm did not answer."), True, "submitting"),  # a job may be there
        (KeyboardInterrupt(), True, "submitting"),
        (SlurmGPUError("This machine has no GPU."), False, "submitting"),
    ],
)
def test_only_a_submission_of_which_nothing_is_queued_is_recorded_as_refused(run, monkeypatch, error, queues, state):
    def fail():
        raise error

    with pytest.raises(type(error)):
        submit(run, monkeypatch, start=fail, queues=queues)
    last = run.last_submission()
    assert (last["submission"], last["state"]) == (2, state)
    assert last.get("message") == (str(error) if state == "refused" else None)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves; the pauses."""
    pauses, begin = [], time.monotonic()
    clock = SimpleNamespace(sleep=pauses.append, monotonic=lambda: begin + sum(pauses))
    monkeypatch.setattr(submission, "time", clock)  # `time` itself is also that of the process's other threads
    return pauses


@pytest.mark.parametrize(
    ("error", "n_times"),
    [
        (NoAnswerError("Slurm is being restarted.", is_silent=True), 2),
        (NoAnswerError("There is no Slurm.", is_absent=True), 1),
        (MayBeQueuedError("Slurm did not answer.", is_silent=True), 1),  # a second job would compute the same
        (SlurmGPUError("No such partition."), 1),
    ],
)
def test_only_what_was_certainly_not_done_is_asked_of_slurm_again(clock, error, n_times):
    asked = []

    def ask():
        asked.append(1)
        if len(asked) < 2:
            raise error
        return "done"

    with pytest.raises(type(error)) if n_times == 1 else contextlib.nullcontext():
        assert submission._once_answered(ask) == "done"
    assert len(asked) == n_times


def test_a_slurm_that_stays_silent_is_asked_for_ten_minutes(clock):
    def ask():
        raise NoAnswerError("Slurm is being restarted.", is_silent=True)

    with pytest.raises(NoAnswerError):
        submission._once_answered(ask)
    assert clock[:6] == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]
    assert submission.SILENCE_S < sum(clock) <= submission.SILENCE_S + submission.MAX_PAUSE_S


def test_later_submissions_that_a_killed_process_left_are_recorded_as_refused(run):
    first = run.submissions()[0]
    for number, state in enumerate(("submitting", "submitting", "queued"), 2):
        run.record_submission({**first, "submission": number, "state": state})
    submission._refuse_lost(run, 2)
    assert [line["state"] for line in run.submissions()] == ["ended", "submitting", "refused", "queued"]
    assert run.submissions()[2]["message"] == "the process that submitted it was killed"


@pytest.mark.parametrize(
    ("newest", "refused"),
    [
        ({"submission": 3, "state": "queued", "pids": [7]}, "Another process has resubmitted"),
        ({"submission": 3, "state": "ended", "pids": [7]}, None),
        ({"submission": 3, "state": "queued"}, None),  # of Slurm: it has GPUs of its own
        ({"submission": 2, "state": "queued", "pids": [7]}, None),
    ],
)
@pytest.mark.parametrize("alive", [None, "a task elsewhere is alive"])
def test_two_submissions_on_this_machine_share_no_gpus(run, monkeypatch, newest, refused, alive):
    monkeypatch.setattr(submission, "others_alive", lambda run, own: alive)
    monkeypatch.setattr(submission, "_next", lambda run, round_: f"round {round_}")
    run.record_submission({**run.submissions()[0], **newest})
    if refused or alive:
        with pytest.raises(SlurmGPUError, match=refused or alive):
            submission._next_here(run, NEXT)
    else:
        assert submission._next_here(run, NEXT) == "round 1"


def test_a_merge_job_by_hand_is_that_of_the_submissions_that_have_none(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NAME", "merge-judge")
    first = {key: value for key, value in run.submissions()[0].items() if key != "merge_job"}
    given = ({}, {"merge_job": "5"}, {"state": "ended"}, {"by_hand": False})
    for number, more in enumerate(given, 2):
        run.record_submission({**first, "by_hand": True, "state": "queued", "submission": number, **more})
    run_merge._record_merge_job(run, "99")
    jobs = [(line.get("merge_job"), line.get("merge_name")) for line in run.submissions()[1:]]
    assert jobs == [("99", "merge-judge"), ("5", None), (None, None), (None, None)]


def test_the_next_submission_keeps_what_the_last_one_had_unless_something_else_is_asked_for(run, monkeypatch):
    last = {**run.last_submission(), "executor": "local", "slurm": {"qos": "long", "mem": "1G"}, "exclude": ["gpu1"]}
    last |= {"merge": {"mem": "4G"}, "container": {"image": "/a.sif"}, "code": {"digest": "d"}, "inject": ["error@3"]}
    last["resources"] = {**last["resources"], "executor": "local", "gpus": 0}
    monkeypatch.setattr(Run, "last_submission", lambda run: last)

    def learn(run, last, options, given, asked):
        return options, [*last["exclude"], "gpu2"], [f"learnt with {given} for {asked.n_tasks}"]

    monkeypatch.setattr(resubmission, "executor_named", lambda name: SimpleNamespace(learn=learn, queues=False))
    found, notes = resubmission.next_submission(run, round=2)
    assert (found.slurm, found.merge, found.exclude) == (last["slurm"], last["merge"], ("gpu1", "gpu2"))
    assert (found.container, found.code, found.inject) == (last["container"], last["code"], ("error@3",))
    assert (found.submission, found.round, notes) == (2, 2, ["learnt with {} for 1"])
    found, notes = resubmission.next_submission(run, {"tasks": 2}, {"mem": "2G"}, {"time": "10"}, n_again=2)
    assert (found.slurm, found.merge) == ({"qos": "long", "mem": "2G"}, {"mem": "4G", "time": "10"})
    assert found.inject == ()  # failed items must not fail for the same reason
    assert notes == ["learnt with {'mem': '2G'} for 2"]
    assert resubmission.next_submission(run, {"executor": "debug"})[0].inject == ()


def test_a_log_beside_the_run_that_cannot_be_written_ends_no_job(run, monkeypatch, capsys):
    class Full(io.RawIOBase):
        def writable(self):
            return True

        def write(self, content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manual_jobs, "open_to_append", lambda path: io.BufferedWriter(Full()))
    with manual_jobs.log_beside(run, "7_0"):
        logging.getLogger("slurmgpu").error("a line")
    assert "No space left" in capsys.readouterr().err


def test_a_resubmission_is_checked_with_the_container_that_it_will_have(run, monkeypatch):
    def drafted(planned, last):
        submission, planning = replace(NEXT, container=last), replace(run, plan=replace(run.plan, container=planned))
        monkeypatch.setattr(resubmit.resubmission, "next_submission", lambda *_, **__: (submission, ["learnt"]))
        return resubmit._draft(planning, resubmit.Request()), checked[-2:]

    checked = []
    again = lambda container, run_file, given: ({**container, "home": "none"}, ["[container] has changed"])  # noqa: E731
    monkeypatch.setattr(resubmit.former, "code_now", lambda *_, **__: ({"digest": "now"}, ["edited"]))
    spec = SimpleNamespace(promised=[])  # the run has no input
    monkeypatch.setattr(resubmit, "InputSpec", SimpleNamespace(from_json=lambda value: spec))
    monkeypatch.setattr(resubmit, "check_input", lambda spec, index: None)
    monkeypatch.setattr(resubmit, "refuse_other_columns", lambda plan: None)  # its workload cannot be built
    monkeypatch.setattr(resubmit, "contain_again", again)
    monkeypatch.setattr(resubmit, "check_image", lambda container: checked.append(("image", container)))
    executor = SimpleNamespace(check=lambda its, container: checked.append((its.container, container)))
    executor.jobs_completing = lambda other: (f"merge of {other}", "merge of both")
    monkeypatch.setattr(resubmit, "executor_named", {"spool": executor}.__getitem__)
    planned, last = {"image": "/planned.sif"}, {"image": "/last.sif"}
    for given in ((planned, None), (planned, last)):
        found, its_checks = drafted(*given)
        now = {**(given[1] or planned), "home": "none"}
        assert (found.submission.container, found.submission.code) == (now, {"digest": "now"})
        assert its_checks == [("image", now), (now, now)]
        assert (found.changed, found.notes) == (["edited"], ["learnt", "[container] has changed"])
    assert found.submission.after == ()
    monkeypatch.setattr(resubmit, "_awaited", lambda spec: ["a", "b"])
    found, its_checks = drafted(None, None)
    assert (found.submission.after, found.awaited) == (("merge of a", "merge of both", "merge of b"), ["a", "b"])
    assert (found.submission.container, its_checks[1:], found.notes) == (None, [(None, None)], ["learnt"])
    assert (found.again, found.missing[0], found.missing[-1]) == (Recompute(2, {}), 167, run.plan.n_shards - 1)


def test_a_resubmission_waits_for_the_run_whose_rows_are_its_input(run, tmp_path, monkeypatch):
    earlier, incomplete = pretend_run(tmp_path / "earlier", 300, n_tasks=1), True
    merged = promise(earlier.merged, n_items=9, columns=["index"], fingerprint=earlier.plan.fingerprint, stride=3)
    monkeypatch.setattr(resubmit, "is_complete", lambda other: not incomplete)
    assert [other.folder for other in resubmit._awaited(merged)] == [earlier.folder]
    incomplete = False
    assert resubmit._awaited(merged) == []
    other = promise(earlier.merged, n_items=9, columns=["index"], fingerprint="f", stride=3)
    with pytest.raises(SlurmGPUError, match=r"was to be the merged file of a run of plan f, but .*earlier has plan"):
        resubmit._awaited(other)
    (earlier.folder / "run.json").unlink()
    with pytest.raises(SlurmGPUError, match="earlier is not a run directory"):
        resubmit._awaited(merged)
    earlier.merged.touch()  # it alone was kept
    assert resubmit._awaited(merged) == []


def test_while_tasks_live_a_resubmission_is_refused_and_so_is_its_dry_run(run, monkeypatch):
    def refuse(run, to_do, force):
        if not force:
            raise SlurmGPUError(f"{run.folder} is still running. Before you {to_do}, wait for its end.")

    def draft(*_, **__):
        raise SlurmGPUError("It is drafted.")

    monkeypatch.setattr(resubmit.live_tasks, "refuse_alive", refuse)
    monkeypatch.setattr(resubmit, "_draft", draft)
    monkeypatch.setattr(resubmit, "start", lambda run, prepare, on_tick, tell: prepare(None))
    for call in (resubmit.resubmit, resubmit.foresee):
        for force, said in ((False, "Before you resubmit"), (True, "It is drafted")):
            with pytest.raises(SlurmGPUError, match=said):
                call(run, resubmit.Request(), force=force)


@pytest.mark.parametrize("is_again", [True, False])
def test_a_resubmission_clears_what_would_mislead_its_tasks(run, monkeypatch, is_again):
    """What failed items are computed again is of this submission alone, and their deaths are forgotten."""
    again = Recompute(2, {3: Again(1, [(48, 50)])} if is_again else {})
    draft = resubmit.Resubmission(NEXT, [], again, ["adjusted"], ["changed"], ["computed"])
    monkeypatch.setattr(resubmit, "_draft", lambda run, asked: draft)
    monkeypatch.setattr(resubmit, "start", lambda run, prepare, on_tick, tell: prepare(lock))
    monkeypatch.setattr(resubmit.live_tasks, "refuse_alive", lambda run, to_do, force: None)
    checked, lock = [], SimpleNamespace(check=lambda: checked.append(run.claims.numbers()))
    write_recompute(run.folder, Recompute(2, {0: Again(1, [(0, 1)])}))  # its submission could not begin
    histories = [history_path(run.claims.folder, shard) for shard in (3, 4)]
    for path in (*histories, run.claims.path(3), run.claims.path(5)):
        path.touch()
    assert resubmit.resubmit(run, resubmit.Request()) == (NEXT, ["changed", "adjusted", "computed"])
    assert run.claims.numbers() == set()
    assert [path.exists() for path in histories] == [not is_again, True]
    assert (read_recompute(run.folder) == again) if is_again else (read_recompute(run.folder) is None)
    assert checked[0] == {3, 5}  # the lock is looked at before anything is removed


@pytest.mark.parametrize(
    ("complete", "later", "states", "does"),
    [
        (True, {"by_hand": True}, ["ended", "ended"], ["told"]),  # there is nothing left for it
        (False, {"by_hand": True}, ["ended", "queued"], ["told"]),  # its user merges it
        (False, {"array_job": "8", "merge_job": "9"}, ["ended", "queued"], [{"array_job": "8", "merge_job": "9"}]),
        (False, {"state": "ended"}, ["ended", "ended"], []),
        (False, {"state": "refused"}, ["ended", "refused"], ["told"]),
        (False, {"state": "submitting"}, ["ended", "refused"], ["told"]),  # its process was killed
    ],
)
def test_a_merge_job_hands_over_to_a_later_submission_and_ends_what_has_nothing_left(
    run, monkeypatch, complete, later, states, does
):
    done, report = [], {"complete": complete, "resubmit": "slurmgpu resubmit run"}
    monkeypatch.setattr(submission.merge, "merge", lambda *given: report)
    monkeypatch.setattr(submission, "in_words", lambda report: "merged")
    monkeypatch.setattr(submission, "tell_end", lambda run, report, is_told: done.append("told"))
    monkeypatch.setattr(submission, "others_alive", lambda run, own: None)
    monkeypatch.setattr(run_merge, "accounting_of", lambda run, settled: None)
    slurm = SimpleNamespace(hand_over=lambda line, jobs: done.append(jobs))
    monkeypatch.setattr(submission, "executor_named", lambda name: slurm)
    first = {key: value for key, value in run.submissions()[0].items() if not key.endswith("_job")}
    run.record_submission({"submission": 1, "state": "queued"})
    run.record_submission({**first, "submission": 2, "state": "queued", **later})
    assert submission.merge_behind(run, 1) == (0 if complete else 3)
    assert [line["state"] for line in run.submissions()] == states
    assert done == does


def test_a_run_that_cannot_be_removed_does_not_hide_why_it_was_to_be(tmp_path, monkeypatch, caplog):
    failing, run = Failing(monkeypatch), planned_run(tmp_path / "run")
    failing("unlink", errno.EACCES, of="run.json", times=9)
    remove_unused(run)
    assert f"{run.folder} cannot be removed: " in caplog.text
    caplog.clear()
    monkeypatch.undo()
    failing("unlink", errno.EIO, of="run.json")
    failing("rmdir", errno.EIO, of="run", lost=True)
    remove_unused(run)
    assert failing.n_failed == 3
    assert not run.folder.exists()
    assert not caplog.records
