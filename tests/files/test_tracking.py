"""What `task.log` writes, and how it is replayed to trackers."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from slurmgpu.cli.commands import track
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import live_tasks
from slurmgpu.merge.merge import merge
from slurmgpu.plan.run_file import TrackTable, parse_table
from slurmgpu.plan.trackers import TRACKERS, Destination, parse_destination
from slurmgpu.report.report_file import report_path
from slurmgpu.run.metric_log import MetricReader, MetricWriter
from slurmgpu.run.records import Attempt, new_record
from slurmgpu.shards.columns import Array
from slurmgpu.trackers.interface import Tracker
from slurmgpu.trackers.mlflow import MLflow, key_of
from slurmgpu.trackers.replay import Replay
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.worker.logged_values import BURST, RATE, LoggedValues
from tests.support.clocks import Clock
from tests.support.pretend_runs import pretend_run
from tests.support.published_runs import published_run


@pytest.fixture
def collected():
    """A worker's `LoggedValues`, the events that the task gets, and a clock."""
    events, clock = [], Clock(1000.0)
    return LoggedValues(events.append, clock), events, clock


def steps(events):
    return [step for event in events if event["event"] == "log" for _, _, step, _ in event["points"]]


def test_numbers_of_all_kinds_are_logged_and_nothing_else(collected):
    logged, events, _ = collected
    logged.log(np.int64(3), a=1, b=np.float32(0.5), c=np.array(2.0), d=True, e=math.nan, f=-math.inf)
    [[_, item, step, values]] = events[0]["points"]
    assert (item, step, values) == (None, 3, {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0, "e": "nan", "f": "-inf"})
    for value, said in ((np.ones(3), "a ndarray of shape (3,)"), ("0.5", "a str, '0.5'"), (None, "a NoneType, None")):
        with pytest.raises(TypeError, match=r"task.log: loss is .*; expected one number.*mean") as caught:
            logged.log(4, loss=value)
        assert said in str(caught.value)
    for step in (0.5, "3", None):
        with pytest.raises(TypeError, match="expected a whole number"):
            logged.log(step, loss=1)
    for step in (-1, True, 2**63):
        with pytest.raises(ValueError, match="at least 0"):
            logged.log(step, loss=1)
    with pytest.raises(TypeError, match="name at least one"):
        logged.log(4)


def test_what_is_logged_comes_before_the_next_event_and_otherwise_at_most_once_a_second(collected):
    logged, events, clock = collected
    report = logged.before(events.append)
    for step in range(5):
        logged.log(step, loss=step)
    assert steps(events) == [0]
    report({"event": "published", "shard": 7})
    assert [event["event"] for event in events] == ["log", "log", "published"]
    assert steps(events) == [0, 1, 2, 3, 4]
    logged.log(5, loss=5)
    clock.now += 1.5
    logged.log(6, loss=6)
    assert steps(events[3:]) == [5, 6]


def test_a_loop_that_logs_too_fast_is_thinned_and_keeps_its_last_step(collected, caplog):
    logged, events, clock = collected
    n_steps = 3 * BURST
    for step in range(n_steps):
        clock.now += 0.1 / RATE
        logged.log(step, loss=step)
    logged.before(events.append)({"event": "published"})
    found = steps(events)
    assert found == sorted(set(found))
    assert found[: BURST // 2] == list(range(BURST // 2))
    assert found[-1] == n_steps - 1
    assert len(found) <= BURST + 0.1 * n_steps + 2
    assert caplog.text.count("some steps are left out") == 1


def test_a_loop_that_logs_for_days_is_thinned_ever_more(collected, monkeypatch):
    monkeypatch.setattr("slurmgpu.worker.logged_values.HALVING_BYTES", 100_000)
    logged, events, clock = collected
    kept = []
    for hour in range(4):
        before = len(events)
        for step in range(int(3600 * RATE / 20)):
            clock.now += 20 / RATE
            logged.log(hour << 20 | step, loss=0.5)
        logged.flush()
        kept.append(len(steps(events[before:])))
    assert kept == sorted(kept, reverse=True)
    assert 0 < 2 * kept[3] < kept[0]
    assert steps(events)[-1] == 3 << 20 | step


def test_a_write_that_fails_in_the_middle_of_a_line_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "telemetry").mkdir()
    writer, reader = MetricWriter(tmp_path, Attempt("7", 0, submission=2)), MetricReader(tmp_path)
    path = tmp_path / "telemetry" / "7_0.0.metrics.jsonl"
    writer.close()
    assert not path.exists()  # nothing was logged
    writer.write([(1.0, None, 1, {"loss": 0.5})])
    [first] = reader.news()
    assert (first.submission, first.attempt, first.step, first.values) == (2, "7_0.0", 1, {"loss": 0.5})

    def half(self, patience_s):
        path.write_bytes(path.read_bytes() + self._unwritten[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("slurmgpu.run.metric_log.retried", lambda append, patience_s: half(writer, patience_s))
        writer.write([(2.0, None, 2, {"loss": 0.25})])
    assert list(reader.news()) == []
    writer.write([(3.0, 4, 3, {"loss": "nan"})])
    found = list(reader.news())
    assert [(each.step, each.item) for each in found] == [(2, None), (3, 4)]
    assert math.isnan(found[1].values["loss"])


DAMAGED = (
    '{"time":1.0,"item":null,"step":Infinity,"values":{"loss":1}}',
    '{"time":1.0,"item":null,"step":99999999999999999999,"values":{"loss":1}}',
    '{"time":1.0,"item":null,"step":-1,"values":{"loss":1}}',
    '{"time":1.0,"item":-1,"step":1,"values":{"loss":1}}',
    '{"time":1.0,"item":1000000,"step":1,"values":{"loss":1}}',
    '{"time":Infinity,"item":null,"step":1,"values":{"loss":1}}',
    '{"time":1.0,"item":null,"step":1,"values":{"loss":1%s}}' % ("0" * 400),
    '{"format":"slurmgpu metrics","submission":Infinity}',
    "[" * 100_000,
)


def test_lines_that_cannot_be_what_was_logged_cost_themselves_alone(tmp_path, tracker):
    run = unstarted_run(tmp_path)
    attempt(run, "7").write([(1.0, None, 1, {"loss": 0.5})])
    [path] = (run.folder / "telemetry").glob("*.metrics.jsonl")
    path.write_text(path.read_text() + "".join(f"{line}\n" for line in DAMAGED))
    attempt(run, "8").write([(2.0, None, 2, {"loss": 0.25})])
    replay = Replay(run, [KEPT])
    replay.look(final=True)
    replay.close(finished=True)
    assert replay.failed == {}
    assert tracker.kept == {"run": [(1, {"loss": 0.5}), (2, {"loss": 0.25})]}


@pytest.fixture
def tracker(monkeypatch):
    """What a tracker that keeps all in this process has: by the name of its run, (step, values)."""
    kept, closed, about, summaries = {}, [], {}, {}

    class Kept(Tracker):
        name = "kept"
        fails = False

        def open(self, where, run):
            if Kept.fails:
                raise ConnectionError("no route")
            self.run = run
            about[run.name] = run
            return max((step for step, _ in kept.setdefault(run.name, [])), default=-1)

        def log(self, step, values, time):
            kept[self.run.name].append((step, dict(values)))

        def close(self, summary, *, finished):
            closed.append((self.run.name, finished))
            summaries[self.run.name] = summary

    monkeypatch.setitem(TRACKERS.imported, "kept", Kept)
    Kept.kept, Kept.closed, Kept.about, Kept.summaries = kept, closed, about, summaries
    return Kept


KEPT = Destination("kept", "here")


def unstarted_run(folder):
    """A run whose tasks are queued."""
    run = pretend_run(folder / "run", 0)
    for path in run.tasks.iterdir():
        path.unlink()
    return run


def attempt(run, name, submission=1):
    return MetricWriter(run.folder, Attempt(name, 0, submission=submission))


def test_the_last_attempt_wins_a_step_and_a_tracker_goes_on_at_its_last_one(tmp_path, tracker):
    run = pretend_run(tmp_path / "run", 0)
    attempt(run, "b").write([(50.0, 3, step, {"loss": 1.0}) for step in (1, 2, 3)])
    attempt(run, "a").write([(60.0, 3, step, {"loss": 2.0}) for step in (2, 3, 4)])  # resumed after step 1
    attempt(run, "c", submission=2).write([(10.0, 3, 4, {"loss": 3.0})])  # its node's clock is slow
    attempt(run, "a").write([(61.0, 3, 4, {"accuracy": 0.5})])
    replay = Replay(run, [KEPT])
    replay.look(final=True)
    [sent] = replay.close(finished=True)
    expected = [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 2.0}), (4, {"accuracy": 0.5, "loss": 3.0})]
    assert tracker.kept == {"run/00003": expected}
    assert (sent.n_runs, sent.n_steps) == (1, 4)
    first = tracker.about["run/00003"]
    attempt(run, "d", submission=3).write([(70.0, 3, step, {"loss": 4.0}) for step in (4, 5)])
    replay = Replay(run, [KEPT])
    replay.look(final=True)
    assert tracker.kept == {"run/00003": [*expected, (5, {"loss": 4.0})]}
    assert tracker.about["run/00003"].id == first.id
    assert replay.close(finished=True)[0].n_steps == 1


def test_a_step_to_which_a_living_task_may_add_is_held_back_while_it_is_followed(tmp_path, tracker):
    run = unstarted_run(tmp_path)
    replay, writers = Replay(run, [KEPT]), [attempt(run, "a"), attempt(run, "b")]
    assert replay.points.items() == []
    writers[0].write([(1.0, None, step, {"loss": step}) for step in (0, 1, 2)])
    writers[1].write([(1.0, None, step, {"loss": step}) for step in (10, 11)])
    replay.look(final=False)
    assert [step for step, _ in tracker.kept["run"]] == [0, 1]  # a may add to 2, and log 3
    writers[0].write([(2.0, None, step, {"loss": step}) for step in (2, 3)])
    writers[0].write([(2.0, None, 2, {"accuracy": 1.0})])
    replay.look(final=False)
    assert [step for step, _ in tracker.kept["run"]] == [0, 1]
    replay.look(final=True)
    assert [step for step, _ in tracker.kept["run"]] == [0, 1, 2, 3, 10, 11]
    assert tracker.kept["run"][2] == (2, {"accuracy": 1.0, "loss": 2.0})
    assert tracker.closed == [("run", True)]


def test_a_run_of_which_nothing_is_alive_is_followed_no_longer(tmp_path, tracker, monkeypatch, capsys):
    run = unstarted_run(tmp_path)  # its merge was killed, too, so no line says that it has ended
    attempt(run, "a").write([(1.0, None, step, {"loss": step}) for step in (0, 1)])
    for name in ("LOOK_S", "DOUBT_S"):
        monkeypatch.setattr(track, name, 0.0)
    answers = iter([True, False])
    monkeypatch.setattr(live_tasks, "may_live", lambda _: next(answers))
    track.track(run.folder, [str(KEPT)], follow=True)
    assert [step for step, _ in tracker.kept["run"]] == [0, 1]
    assert capsys.readouterr().out.endswith(": 1 run, 2 new steps\n")


def test_a_living_task_that_has_not_logged_yet_holds_all_back_and_an_ended_one_nothing(tmp_path, tracker):
    run = unstarted_run(tmp_path)
    records = [new_record(Attempt(name, 0, submission=1), "n1", 1, [], 1.0) for name in ("a", "b")]

    def write(record, ended=None):
        path = run.tasks / f"{record['attempt']}.json"
        write_bytes(path, json.dumps({**record, "ended": ended}).encode())

    for record in records:
        write(record)
    attempt(run, "a").write([(1.0, None, step, {"loss": step}) for step in (10, 11)])
    replay = Replay(run, [KEPT])
    replay.look(final=False)
    assert (tracker.kept["run"], replay.points.n_held) == ([], 2)
    attempt(run, "b").write([(1.0, None, step, {"loss": step}) for step in (0, 1)])
    write(records[1], ended=2.0)
    replay.look(final=False)
    assert [step for step, _ in tracker.kept["run"]] == [0, 1, 10]
    assert (replay.points.n_held, replay.points.n_late) == (1, 0)
    run.record_submission({"submission": 1, "state": "ended"})  # a was killed, so its record has no end
    replay.look(final=False)
    assert [step for step, _ in tracker.kept["run"]] == [0, 1, 10, 11]
    assert replay.points.n_held == 0


def test_steps_that_come_after_later_ones_were_sent_are_counted(tmp_path, tracker):
    run = unstarted_run(tmp_path)
    writer, replay = attempt(run, "a"), Replay(run, [KEPT])
    writer.write([(1.0, None, step, {"loss": step}) for step in (1, 5, 6)])
    replay.look(final=False)
    assert [step for step, _ in tracker.kept["run"]] == [1, 5]
    # Of a task that starts late: 1 is as it was, 2 and 3 are new, 5 has another value, and 6 is not sent yet.
    values = [(1, 1.0), (2, math.nan), (2, math.nan), (3, 3.0), (5, 4.0), (6, 6.0)]
    attempt(run, "b").write([(2.0, None, step, {"loss": value}) for step, value in values])
    replay.look(final=True)
    assert replay.points.n_late == 3
    assert [step for step, _ in tracker.kept["run"]] == [1, 5, 6]


def test_a_tracker_that_fails_keeps_nothing_from_another_one(tmp_path, tracker):
    run = pretend_run(tmp_path / "run", 0)
    attempt(run, "a").write([(1.0, None, 1, {"loss": 0.5})])
    tracker.fails = True
    other = Destination("tensorboard", str(tmp_path / "tb"))
    replay = Replay(run, [KEPT, other])
    replay.look(final=True)
    assert [sent.n_steps for sent in replay.close(finished=True)] == [0, 1]
    assert replay.failed.keys() == {KEPT}
    assert "kept:here failed with ConnectionError: no route. The run keeps all logged values" in replay.failed[KEPT]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_that_made_room_for_others_gets_all_its_steps_and_its_end(tmp_path, tracker, monkeypatch, keeps):
    monkeypatch.setattr("slurmgpu.trackers.replay.MOST_OPEN", 2)
    run, names = unstarted_run(tmp_path), [f"run/{item:05d}" for item in range(4)]
    replay, writer = Replay(run, [KEPT]), attempt(run, "a")
    begin = tracker.open

    def begin_anew(self, where, about):  # as wandb does without a network
        tracker.kept.pop(about.name, None)
        return begin(self, where, about)

    if not keeps:
        monkeypatch.setattr(tracker, "open", begin_anew)
    record = {**new_record(Attempt("a", 0, submission=1), "n1", 1, [], 1.0), "ended": 2.0}  # so nothing is held back
    write_bytes(run.tasks / f"{record['attempt']}.json", json.dumps(record).encode())
    for step, items in enumerate(([0, 1], [0, 2, 3])):
        writer.write([(1.0 + step, item, step, {"loss": step}) for item in items])
        replay.look(final=False)
    assert tracker.closed == [(names[1], False), (names[0], False)]
    replay.look(final=True)
    [sent] = replay.close(finished=True)
    assert sorted(name for name, finished in tracker.closed if finished) == names
    assert {name: [step for step, _ in tracker.kept[name]] for name in names} == {
        names[0]: [0, 1],
        names[1]: [0],
        names[2]: [1],
        names[3]: [1],
    }
    assert (sent.n_runs, sent.n_steps) == (4, 5)


def test_a_run_without_news_is_finished_before_it_makes_room_for_one_that_begins_last(tmp_path, tracker, monkeypatch):
    monkeypatch.setattr("slurmgpu.trackers.replay.MOST_OPEN", 2)
    run, names = unstarted_run(tmp_path), [f"run/{item:05d}" for item in range(3)]
    replay, writer = Replay(run, [KEPT]), attempt(run, "a")
    record = {**new_record(Attempt("a", 0, submission=1), "n1", 1, [], 1.0), "ended": 2.0}  # so nothing is held back
    write_bytes(run.tasks / f"{record['attempt']}.json", json.dumps(record).encode())
    for items, final in (([0, 1], False), ([2], True)):
        writer.write([(1.0, item, 0, {"loss": 1}) for item in items])
        replay.look(final=final)
    replay.close(finished=True)
    assert tracker.closed == [(name, True) for name in names]


def test_the_numbers_of_the_reports_summary_go_to_the_run_as_a_whole(tmp_path, tracker):
    run = published_run(tmp_path / "run", {"n": Array("int64")}, [{"n": 1}, "it failed", {"n": 3}])
    summary = {"accuracy": 0.5, "is": True, "by": {"cat": {"n": 3, "as": "a"}}}
    report_path(run).write_text(json.dumps({**merge(run), "summary": summary}))
    attempt(run, "a").write([(1.0, item, 1, {"loss": 0.5}) for item in (None, 2)])
    replay = Replay(run, [KEPT])
    replay.look(final=True)
    replay.close(finished=True)
    sent = {"n_rows": 3, "n_errors": 1, "accuracy": 0.5, "by/cat/n": 3}
    assert tracker.summaries == {run.name: sent, f"{run.name}/00002": {}}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("val/top@5 (%)", "val/top_5 ___"),
        ("über.a-b:c", "über.a-b:c"),
        ("/loss", "_/loss"),  # of an empty prefix
        ("a//b/", "a/_/b/_"),
        ("../a/./...", "_../a/_./_..."),
        ("a" * 300, "a" * 250),
        (f"{'a' * 249}/b", "a" * 249),
        (f"{'a' * 247}/..b", "a" * 247),
    ],
)
def test_every_name_has_one_that_mlflow_accepts(name, key):
    assert key_of(name) == key


def test_the_extra_of_mlflow_brings_what_a_database_needs():
    """mlflow-skinny knows no sqlite:///mlflow.db without SQLAlchemy and Alembic, and does not ask for them."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^mlflow = \["mlflow-skinny>=[\d.]+", "sqlalchemy>=.*", "alembic>=.*"\]$', project, re.MULTILINE)


def test_mlflow_gets_the_numbers_of_the_summary_unrounded(monkeypatch):
    found, tags = MLflow(), {}
    monkeypatch.setattr(found, "_waiting", [], raising=False)
    monkeypatch.setattr(found, "_id", "a", raising=False)
    monkeypatch.setattr(found, "_client", SimpleNamespace(set_tag=lambda _, *tag: tags.update([tag])), raising=False)
    found.close({"n_rows": 1_234_567, "/by": 0.123456789}, finished=False)
    assert tags == {"slurmgpu.n_rows": "1234567", "slurmgpu._/by": "0.123456789"}


def scalars(folder):
    """By the folder of a run of TensorBoard, (step, tag, value) in the order of its event files."""
    found = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                [number] = value.tensor.float_val
                found.setdefault(path.parent.relative_to(folder).as_posix(), []).append((event.step, value.tag, number))
    return found


def test_tensorboard_reads_what_was_logged_and_gets_the_rest_later(tmp_path):
    run = pretend_run(tmp_path / "run", 0)
    to = [Destination("tensorboard", str(tmp_path / "tb"))]
    attempt(run, "a").write([(1.0, None, 1, {"loss": 0.5, "val/acc": 0.25}), (2.0, 7, 5, {"loss": math.inf})])
    for points in ([], [(3.0, None, 2, {"loss": 0.125})]):
        attempt(run, "a").write(points)
        replay = Replay(run, to)
        replay.look(final=True)
        replay.close(finished=True)
        assert not replay.failed
    found = scalars(tmp_path / "tb")
    [whole, item] = sorted(found)
    assert whole.startswith("run-")
    assert item.startswith("run/00007-")
    assert found[whole] == [(1, "loss", 0.5), (1, "val/acc", 0.25), (2, "loss", 0.125)]
    assert found[item] == [(5, "loss", math.inf)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tensorbord:tb", "Did you mean 'tensorboard'"),
        ("tensorboard", "write tensorboard:DIR"),
    ],
)
def test_a_destination_that_cannot_be_used_is_a_sentence(text, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        parse_destination(text)
    for where in ("mlflow:sqlite:///a.db", "mlflow:postgresql://ada@db/x?ssl_key=/k.pem", "wandb:lab/token-loss"):
        assert str(parse_destination(where)) == where


@pytest.mark.parametrize(
    "where",
    [
        "https://ada:pw0@host/x",
        "https://pw0@host",
        "postgresql://ada:pw0@db",
        "https://host/?password=pw0",
        "https://host/?a=1&api_key=pw0",
        "https://host/?X-Auth-Token=pw0",
        "https://host?key=pw0",
        "hf_pw0aaaaaaaaaaaaaaaaaaaaa",
    ],
)
def test_a_destination_with_a_secret_is_refused_and_not_shown(where):
    for read in (
        parse_destination,
        lambda text: parse_table(TrackTable, {"to": text}, "run.toml"),
        lambda text: parse_table(TrackTable, {"to": ["tensorbord:tb", text]}, "run.toml"),
    ):
        with pytest.raises(SlurmGPUError, match="holds a password or a token") as caught:
            read(f"mlflow:{where}")
        assert "pw0" not in str(caught.value)


def test_a_package_that_is_missing_is_a_sentence_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(SlurmGPUError, match=r"pip install 'slurmgpu\[wandb\]'"):
        TRACKERS.make("wandb").open("project", None)
