"""The probe: which items it takes, what is foretold from its records, and what is queued after it."""

import gzip
import json
import re
import signal
from dataclasses import replace

import pytest

import slurmgpu as package
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.resubmission import first_submission
from slurmgpu.inputs import InputSpec, Reader, scan
from slurmgpu.operations import probe
from slurmgpu.operations.probe import draft_probe, spread
from slurmgpu.plan.planner import draft_run
from slurmgpu.report.forecast import Observed, forecast, mean_within, observe
from slurmgpu.run.submissions import Submission
from slurmgpu.util.amounts import about, time_words
from tests.support.pretend_runs import Pretended
from tests.support.runs import check_rows, records, start
from tests.support.terminals import Terminal

LOCAL = ("submit", "--executor", "local", "--gpus", "0")
DEBUG = ("submit", "--executor", "debug", "--gpus", "0")


@pytest.mark.parametrize(
    ("n_items", "batch_size", "n_wanted", "expected"),
    [
        (100, 4, 8, [(24, 28), (72, 76)]),
        (100, 4, 5, [(24, 28), (72, 76)]),
        (100, 4, 1, [(48, 52)]),
        (12, 4, 12, [(0, 12)]),
        (10, 4, 9, [(0, 10)]),
        (3, 4, 1, [(0, 3)]),
        (20, 4, 16, [(0, 8), (8, 16)]),
    ],
)
def test_a_probe_takes_whole_batches_that_are_evenly_spread(n_items, batch_size, n_wanted, expected):
    found = spread(n_items, batch_size, n_wanted)
    if n_wanted == 16:
        assert sum(stop - start for start, stop in found) == 16
        assert all(start % 4 == 0 for start, _ in found)
    else:
        assert found == expected


def files(folder, suffix):
    """Two files of 25 items each, of any format that planning reads."""
    rows = [{"x": str(number)} for number in range(50)]
    for name, part in (("a", rows[:25]), ("b", rows[25:])):
        path = folder / f"{name}.{suffix}"
        if suffix == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"x": [row["x"] for row in part]}), path, row_group_size=10)
        else:
            lines = {"jsonl": map(json.dumps, part), "csv": ["x", *(row["x"] for row in part)]}
            path.write_text("".join(f"{line}\n" for line in lines.get(suffix, [row["x"] for row in part])))
        yield path


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt", "parquet"])
def test_ranges_of_an_input_are_read_as_one_in_every_format(tmp_path, suffix):
    spec = scan(list(files(tmp_path, suffix)), tmp_path / "input.idx", stride=4)
    taken = InputSpec.from_json(json.loads(json.dumps(spec.taking([(0, 4), (20, 28), (48, 50)]).to_json())))
    assert taken.n_items == 14
    with Reader(taken, tmp_path / "input.idx") as reader:
        found = [int(next(iter(item.values()))) for item in reader.read(0, 14)]
        assert found == [*range(4), *range(20, 28), 48, 49]
        assert [int(next(iter(item.values()))) for item in reader.read(3, 13)] == found[3:13]
        with pytest.raises(ValueError, match="input of 14"):
            reader.read(0, 15)


# What is foretold


def observed(batch_s=(10.0, 10.0, 10.0), **others):
    values = {"n_items": 48, "n_batches": 4, "n_errors": 0, "start_s": 60.0, "load_s": 50.0, "first_s": 0.0}
    unknown = dict.fromkeys(Observed.__annotations__)
    return Observed(**{**unknown, **values, "batch_s": list(batch_s), "between_s": 0.0, **others})


def foretold(seen, n_tasks=10, n_concurrent=10, n_shards=100, resumes=False, time=None, parts=1, **slurm):
    """Of a run of `n_shards` shards of 16 items, each one batch."""
    plan = replace(Pretended(n_tasks=n_tasks, n_shards=n_shards).plan(), parts=parts)
    options = slurm if time is None else {"time": time, **slurm}
    asked = Submission(1, "slurm", "auto", n_tasks, n_concurrent, 2, slurm=options)
    return forecast(plan, asked, seen, resumes=resumes)


def test_a_steady_run_takes_its_start_and_its_share_of_the_shards():
    found = foretold(observed())
    assert found["run_s"] == {"low": 45.0 + 95, "expected": 160.0, "high": 120.0 + 105}
    assert found["gpu_hours"]["expected"] == pytest.approx(2 * (100 * 10 + 10 * 60) / 3600, abs=1e-4)
    assert found["starting_share"] == pytest.approx(600 / 1600)
    assert found["notes"] == []


def test_a_last_batch_that_is_smaller_may_take_as_long_as_the_others():
    plan = replace(Pretended(n_shards=10).plan(), n_items=200, shard_items=20, batch_size=16)
    asked = Submission(1, "slurm", "auto", 1, 1, 1)
    found = forecast(plan, asked, observed(start_s=0.0, first_s=0.0, between_s=0.0), resumes=False)
    assert found["shard_s"] == {"low": 1.25 * 9.5, "expected": 1.25 * 10, "high": 2 * 10.5}
    assert found["run_s"] == {"low": 1.25 * 95, "expected": 125.0, "high": 2 * 105.0}
    assert found["gpu_hours"]["high"] == pytest.approx(210 / 3600, abs=1e-4)


def test_the_last_batch_of_a_shard_with_fewer_items_may_take_as_long_as_the_others():
    plan = replace(Pretended(n_shards=2).plan(), n_items=110, shard_items=100, batch_size=40)
    asked = Submission(1, "slurm", "auto", 1, 1, 1)
    found = forecast(plan, asked, observed(start_s=0.0, first_s=0.0, between_s=0.0), resumes=False)
    assert found["run_s"] == {"low": 3 * 9.5, "expected": 30.0, "high": 4 * 10.5}
    assert found["gpu_hours"]["high"] == pytest.approx(42 / 3600, abs=1e-4)


def test_a_forecast_says_that_tasks_share_gpus_which_count_whole():
    said = "tasks share GPUs, and each counts as if it had one of its own"
    assert [said in foretold(observed(), gres=gres)["assumptions"] for gres in ("shard:2", "gpu:2")] == [True, False]


def test_parts_of_an_item_are_computed_at_once():
    found = foretold(observed(), n_tasks=8, n_concurrent=8, n_shards=2, parts=4)
    assert found["run_s"]["expected"] == 60.0 + 10 / 4
    assert found["gpu_hours"]["expected"] == pytest.approx(2 * (2 * 10 + 8 * 60) / 3600, abs=1e-4)
    assert foretold(observed(), n_tasks=2, n_concurrent=2, n_shards=2, parts=4)["run_s"]["expected"] == 60.0 + 10


def test_the_range_covers_the_mean_as_often_as_it_says():
    import random

    draw = random.Random(3)
    covered = 0
    for _ in range(1000):
        low, _, high = mean_within([draw.gauss(10.0, 2.0) for _ in range(6)])
        covered += low <= 10.0 <= high
    assert 930 <= covered <= 975


@pytest.mark.parametrize(
    ("batch_s", "low", "high"),
    [
        ([10.0], 5.0, 15.0),
        ([9.0, 11.0], 7.0, 13.0),
        ([2.0, 18.0], 2.0, 18.0),
        ([10.0] * 50, 9.5, 10.5),
        ([4.0, 10.0, 10.0, 16.0], 4.0, 10 + 3.18 * 24**0.5 / 2),
        ([8.0, 12.0] * 9, 10 - 2.11 * 2 / 17**0.5, 10 + 2.11 * 2 / 17**0.5),
        ([8.0, 12.0] * 10, 10 - 2.09158 * 2 / 19**0.5, 10 + 2.09158 * 2 / 19**0.5),
    ],
)
def test_the_fewer_the_batches_the_wider_the_range_and_even_of_many_alike_it_is_one(batch_s, low, high):
    assert mean_within(batch_s) == pytest.approx((low, 10.0, high))


def test_the_end_of_a_run_may_wait_for_a_shard_of_the_slowest_batches():
    assert foretold(observed(batch_s=[8.0, 10.0, 12.0] * 20))["run_s"]["high"] == pytest.approx(120 + 105 + 2)


@pytest.mark.parametrize(("n_batches", "said"), [(1, "1 batch says"), (2, "2 batches say")])
def test_of_few_batches_it_is_said_how_many_would_do(n_batches, said):
    found = foretold(observed(batch_s=[10.0] * n_batches, n_batches=n_batches))
    assert found["notes"] == [f"{said} little of the spread: probe 128 items for a range that can be relied on."]
    small = foretold(observed(batch_s=[10.0] * n_batches, n_batches=n_batches, n_items=16), n_shards=3)
    assert ": probe 20 items" in small["notes"][-1]  # a half of the run


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "0.012 s"), (7.04, "7 s"), (74.2, "74 s"), (1914, "32 min"), (8e4, "22 h"), (0, "0 s")],
)
def test_what_is_estimated_has_two_digits(seconds, words):
    assert about(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(1200, "20 min"), (5400, "1 h 30 min"), (172800, "2 d"), (90, "1 min 30 s"), (0, "0 s")]
)
def test_what_was_set_is_said_exactly(seconds, words):
    assert time_words(seconds) == words


def test_each_further_walltime_of_a_slot_pays_for_another_start():
    found = foretold(observed(), n_tasks=20, n_concurrent=5, time="00:04:00")
    # 240 s - 60 s of margin - 60 s to start, and a tenth of a shard: 11 shards; 20 for each of 5 slots.
    assert (found["shards_per_task"], found["n_tasks_needed"]) == (11, 10)
    assert found["run_s"]["expected"] == 2 * 60 + 20 * 10
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("seen", "asked", "said"),
    [
        (observed(), {"time": "00:03:00", "n_tasks": 10}, "--tasks 20"),
        (
            observed(batch_s=[80.0, 80.0, 80.0]),
            {"time": "00:03:00"},
            "the walltime of 3 min: set a longer time under [slurm].",
        ),
        (observed(batch_s=[7.0, 10.0, 13.0]), {"time": "00:03:50", "n_tasks": 10}, "may be too short"),
        (observed(n_errors=3), {}, "3 of 48 items of the probe failed"),
        (observed(gpu_peak_bytes=79 * 10**9, gpu_total_bytes=85 * 10**9), {}, "GPU memory is nearly full: 79 GB"),
        (observed(host_peak_bytes=95 * 10**8, host_total_bytes=10**10), {}, 'mem = "14G"'),
        (
            observed(host_peak_bytes=15 << 30, host_total_bytes=16 << 30),
            {},
            "is nearly full: 15G of 16G. mem",
        ),  # as asked
        (observed(host_peak_bytes=990 << 20, host_total_bytes=1023 << 20), {}, "is nearly full: 990M of 1023M. mem"),
        (observed(host_peak_bytes=10**9, host_total_bytes=10**10), {"mem": "10G"}, 'mem = "2G"'),
    ],
)
def test_what_will_not_work_is_noted(seen, asked, said):
    assert any(said in note for note in foretold(seen, **asked)["notes"])


@pytest.mark.parametrize(
    "seen", [{"gpu_peak_bytes": 7 * 10**10, "gpu_total_bytes": 8 * 10**10}, {"host_total_bytes": 10**10}]
)
def test_memory_with_room_and_memory_that_is_not_known_are_not_noted(seen):
    assert foretold(observed(**seen))["notes"] == []


@pytest.mark.parametrize(
    ("mem", "advised"),
    [("500M", False), ("500", False), ("1G", False), ("1025M", True), ("2g", True), ("1048577K", True), ("0", False)],
)
def test_less_memory_is_advised_only_if_it_is_less_than_was_asked_for(mem, advised):
    # A node may give more than was asked for.
    notes = foretold(observed(host_peak_bytes=10**7, host_total_bytes=10**10), mem=mem)["notes"]
    assert any("hardly used" in note and 'mem = "1G"' in note for note in notes) == advised


def test_an_item_that_goes_on_in_another_task_need_not_fit_the_walltime():
    seen = observed(batch_s=[500.0, 500.0, 500.0])
    found = foretold(seen, n_tasks=10, n_concurrent=1, n_shards=2, time="00:04:00", resumes=True)
    assert (found["shards_per_task"], found["n_tasks_needed"]) == (None, 9)
    assert found["notes"] == []


def test_the_first_batch_is_set_apart_and_what_lies_between_shards_is_counted():
    record = {"started": 100.0, "load_s": 40.0, "n_items": 64, "n_errors": 0, "end_time": 3700.2, "memory_mb": 1000}
    record |= {
        "usage": {},
        "published": [[0, 150.0, 30.0], [1, 181.0, 10.0, True], [2, 192.0, 10.0, True], [3, 203.0, 10.0, True]],
    }
    seen = observe([{"published": []}, record])
    assert (seen["start_s"], seen["first_s"], seen["between_s"]) == (50.0, 20.0, 1.0)
    assert (seen["batch_s"], seen["walltime_s"], seen["host_total_bytes"]) == ([10.0] * 3, 3600.0, 1000 * 1024**2)
    assert observe([{"published": []}]) is None


# On this machine


def test_a_probe_on_this_machine_foretells_and_queues_only_when_told_to(project, slurmgpu):
    folder = project(100, settings={"faults": {"13": "exception"}})
    done = slurmgpu(*LOCAL, "--tasks", "2", "--probe", "16", cwd=folder, expect=0)
    assert "Nothing is queued. To queue it: slurmgpu submit --executor local --gpus 0 --tasks 2\n" in done.stderr
    assert "16 items in 4 batches" in done.stdout
    assert "1 of 16 items of the probe failed" in done.stdout
    assert not (folder / "run").exists()
    [record] = [json.loads(path.read_text()) for path in (folder / "run-probe" / "tasks").glob("[!.]*.json")]
    assert len(record["published"]) == 4
    plan = json.loads((folder / "run-probe" / "run.json").read_text())
    assert plan["input"]["ranges"] == [[12, 16], [36, 40], [60, 64], [84, 88]]
    argv = (*DEBUG, "--probe", "16", "--yes", "--json", "--set", "faults={}")
    found = json.loads(slurmgpu(*argv, cwd=folder, expect=0).stdout)  # the earlier probe is replaced
    assert found["failure"] is None
    assert found["submitted"]["complete"] is True
    assert found["errors"] == []
    check_rows(folder, 100)


def test_a_compressed_input_is_probed(project, slurmgpu):
    folder = project(100)
    (folder / "items.jsonl.gz").write_bytes(gzip.compress((folder / "items.jsonl").read_bytes()))
    done = slurmgpu(*DEBUG, "--probe", "8", "-s", "input=items.jsonl.gz", cwd=folder, expect=0)
    assert "8 items in 2 batches" in done.stdout


def test_items_of_a_probe_bear_the_numbers_of_the_whole_input(project):
    folder = project(100, settings={"faults": {"73": "exception"}})
    found = package.probe(folder / "slurmgpu.toml", 8, executor="debug", gpus=0)
    assert [(error["index"], error["class"]) for error in found["errors"]] == [(73, "item_error")]
    assert not (folder / "run").exists()


def test_a_probe_that_fails_queues_nothing_and_says_where_its_log_lies(project, slurmgpu):
    folder = project(100, settings={"faults": {str(index): "exception" for index in range(100)}})
    done = slurmgpu(*LOCAL, "--probe", "8", "--yes", cwd=folder, expect=3)
    assert "The probe failed: workload_error: ValueError: cannot do item" in done.stderr
    assert f"Its log: {folder}/run-probe/logs/local1_0.0.log" in done.stderr
    assert not (folder / "run").exists()


def test_what_cannot_be_probed_is_refused_before_anything_is_computed(project, slurmgpu):
    folder = project(100)
    assert "leave one of them out" in slurmgpu(*LOCAL, "--probe", "8", "--dry-run", cwd=folder, expect=2).stderr
    with pytest.raises(SlurmGPUError, match="at least 1"):
        package.probe(folder / "slurmgpu.toml", 0, executor="local", gpus=0)
    assert "add --probe N" in slurmgpu(*LOCAL, "--yes", cwd=folder, expect=2).stderr
    assert not (folder / "run-probe").exists()
    (folder / "run-probe").mkdir()
    (folder / "run-probe" / "thesis.tex").touch()
    with pytest.raises(SlurmGPUError, match="is not a probe"):
        package.probe(folder / "slurmgpu.toml", 8, executor="local", gpus=0)
    assert (folder / "run-probe" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("n_items", "batch_size", "to_do"),
    [
        (100, 4, "has only 100 items, .* Probe fewer of them, such as --probe 48, or submit without"),
        (6, 4, "has only 6 items, .* such as --probe 4, or submit without"),
        (64, 64, "has only 64 items, .* Submit without"),
        (1, 4, "has only 1 item, .* Submit without"),
    ],
)
def test_a_probe_of_the_whole_run_is_refused_with_one_that_is_less_if_there_is_one(project, n_items, batch_size, to_do):
    folder = project(n_items, batch_size=batch_size, shard_items=64)
    with draft_run(folder / "slurmgpu.toml", {}) as draft:
        with pytest.raises(SlurmGPUError, match=to_do) as refused:
            draft_probe(draft, n_items)
        if named := re.search(r"such as --probe (\d+)", str(refused.value)):
            small = draft_probe(draft, int(named[1])).plan
            assert small.n_items == int(named[1]) < n_items


def test_ctrl_c_at_the_question_queues_nothing_and_says_so(project):
    folder = project(6)
    with Terminal(*DEBUG, "--probe", "5", cwd=folder, size=(200, 60)) as terminal:
        terminal.see(lambda seen: "queue it? [y/N]" in seen.text)
        assert "probing 6 items of 6" in terminal.text
        assert "(the whole run: a batch has 4 items); the run computes them again" in terminal.text
        terminal.send(b"\x03")
        assert terminal.end() == 130
        assert "interrupted; the probe is over, and nothing of the run is queued." in terminal.text
        assert "Abort" not in terminal.text
    assert not (folder / "run").exists()


def test_a_probe_is_one_task_and_tells_nobody_of_its_end(project):
    mail, tells = {"mail-type": "END", "mem": "1G"}, {"on_end": "true", "auto_resubmit": 2, "html": True}
    resources = {"executor": "slurm", "gpus": 8, "array": True, "gpus_per_task": 2, "tasks_per_node": 4}
    folder = project(100, **tells, slurm=mail, merge=mail, track={"to": ["mlflow:runs"]}, resources=resources)
    with draft_run(folder / "slurmgpu.toml", {}) as draft:
        whole = replace(draft.plan, summarizes=True)
        small = draft_probe(replace(draft, plan=whole), 8)
    plan = small.plan
    assert (plan.auto_resubmit, plan.on_end, plan.html, plan.track, plan.summarizes) == (0, None, False, (), False)
    assert (whole.auto_resubmit, whole.on_end, whole.html, whole.track) == (2, "true", True, ["mlflow:runs"])
    assert dict(plan.slurm) == dict(plan.merge) == {"mem": "1G"}
    assert (small.resources.gpus, small.resources.array, small.resources.tasks) == (2, False, 1)
    assert {key: plan.resources[key] for key in ("gpus", "array", "tasks")} == {"gpus": 2, "array": False, "tasks": 1}
    assert (first := first_submission(plan.resources, plan.n_shards)).n_tasks == first.tasks_per_node == 1


# On Slurm


@pytest.mark.slurm
def test_a_probe_on_slurm_is_one_task_and_the_array_follows_it(project, slurmgpu, cluster):
    folder = project(40, slurm={"time": "00:05:00", "mem": "400M"})
    argv = ("submit", "--array", "--gpus", "2", "--device", "cpu", "--probe", "12", "--yes", "--wait", "--json")
    found = json.loads(slurmgpu(*argv, cwd=folder, expect=0).stdout)
    assert (found["n_tasks"], found["gpus_per_task"], found["walltime_s"]) == (2, 1, 300.0)
    assert found["probe"]["host_total_bytes"] == 400 * 1024**2
    assert found["probe"]["walltime_s"] == 300.0
    assert found["submitted"]["complete"] is True
    [probe] = [json.loads(path.read_text()) for path in (folder / "run-probe" / "tasks").glob("[!.]*.json")]
    assert (probe["executor"], probe["n_gpus"], len(probe["published"])) == ("slurm", 1, 3)
    assert len(records(folder)) == 2
    check_rows(folder, 40)
    argv = ("submit", "--gpus", "1", "--run-dir", "other", "--slurm", "partition=nope", "--probe", "8", "--yes")
    said = slurmgpu(*argv, cwd=folder, expect=2).stderr
    assert said.count("invalid partition specified") == 1
    assert "refuses the array job: error: invalid partition specified: nope; error: Batch job submission failed" in said


@pytest.mark.slurm
def test_ctrl_c_before_the_jobs_are_told_cancels_them_as_well(project, cluster, monkeypatch):
    folder = project(80, held_from=0)
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "the end of other tests' jobs")
    submit_draft = probe.submit_draft

    def queue_and_be_interrupted(*args, **options):
        submit_draft(*args, **options)
        assert cluster.run("squeue", "-h")
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "submit_draft", queue_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        package.probe(folder / "slurmgpu.toml", 8, gpus=2, array=True, device="cpu")
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "an empty queue")


@pytest.mark.slurm
def test_ctrl_c_cancels_a_probe_on_slurm_and_nothing_is_queued(project, cluster):
    folder = project(80, held_from=0)
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "the end of other tests' jobs")
    process = start("submit", "--array", "--gpus", "2", "--device", "cpu", "--probe", "8", "--yes", cwd=folder)
    assert any("; 0 of 8 items (0.0%)" in line for line in process.stdout)  # it is queued, and waited for
    cluster.wait_until(lambda: "R" in cluster.run("squeue", "-h", "-o", "%t").split(), "the probe ran")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 130, output
    assert "the probe is cancelled, and nothing of the run is queued" in output
    cluster.wait_until(lambda: not cluster.run("squeue", "-h"), "an empty queue")
    assert not (folder / "run").exists()
