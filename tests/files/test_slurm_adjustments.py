"""What the next Slurm jobs ask for after the last ones."""

import pytest

from slurmgpu.executors import slurm_adjustments, submission
from slurmgpu.report.outcomes import Accounted
from slurmgpu.report.report_file import retriable
from slurmgpu.run.submissions import Submission
from slurmgpu.slurm import facts
from slurmgpu.slurm.facts import Facts, Node
from tests.files.test_status import change, report_of, submit_again
from tests.support.pretend_runs import BEGIN, pretend_run


def learn(run, last, options, given, n_tasks, **resources):
    """What is learnt for a submission that asks for the same tasks as the last one, `n_tasks` of them at once."""
    gpus, kind, n_nodes = (last[name] for name in ("gpus_per_task", "gpu_type", "nodes_per_task"))
    asked = Submission(2, "slurm", "auto", n_tasks, n_tasks, gpus, kind, n_nodes, resources=resources)
    return slurm_adjustments.learn(run, last, options, given, asked)


@pytest.fixture(autouse=True)
def unknown_nodes(monkeypatch):
    """Nothing is known of nodes and accounting, also while a cluster of other tests runs."""
    monkeypatch.setattr(facts, "read_nodes", lambda: Facts(config={}))
    monkeypatch.setattr(slurm_adjustments, "accounting_of", lambda run: {})


@pytest.fixture
def ran_out(tmp_path):
    """A run in which an item lacked host memory."""
    run = pretend_run(tmp_path / "run", 10_000)
    change(run, run.attempts()[0]["attempt"], failed=[[2, {"host_oom": 1}]])
    return run


@pytest.mark.parametrize(
    ("failed", "memory"),
    [([], None), ([[2, {"cuda_oom": 1}]], None), ([[2, {"item_error": 1, "host_oom": 1}]], "96000M")],
)
def test_an_item_that_lacked_host_memory_gets_half_as_much_again(tmp_path, failed, memory):
    run = pretend_run(tmp_path / "run", 10_000)
    change(run, run.attempts()[0]["attempt"], failed=failed)
    options, _, notes = learn(run, run.last_submission(), {}, {}, 1)
    assert options.get("mem") == memory
    assert bool(notes) is (memory is not None)
    submit_again(run)
    assert learn(run, run.last_submission(), {}, {}, 1) == ({}, [], [])  # nothing has failed since


def test_a_task_that_had_all_memory_of_its_node_is_not_given_half_as_much_again(ran_out):
    options, _, notes = learn(ran_out, ran_out.last_submission(), {"mem": 0}, {}, 1)
    assert options == {"mem": 0}
    assert notes == ["Memory ran out, and mem = 0 is all memory of a node: ask for larger nodes."]


@pytest.mark.parametrize(
    ("mem", "more"),
    [(800, "1200M"), ("800M", "1200M"), ("1G", "1536M"), ("3gb", "4608M"), ("2T", "3145728M"), ("1048576K", "1536M")],
)
def test_memory_in_any_of_slurms_units_is_raised_by_half(ran_out, mem, more):
    options, _, notes = learn(ran_out, ran_out.last_submission(), {"mem": mem}, {}, 1)
    assert options == {"mem": more}
    assert notes == [f"Memory ran out: mem is {more} instead of {mem}."]


@pytest.mark.parametrize(
    ("options", "has_mb", "asks", "said"),
    [
        ({"mem": "4G"}, 6144, "6144M", "mem is 6144M instead of 4G."),
        ({"mem": "4G"}, 5000, "5000M", "mem is 5000M instead of 4G, as much as the largest node gives."),
        ({"mem": "4G"}, 4096, "4G", "mem = 4G is all that the largest node gives: ask for larger nodes, as by --slurm"),
        ({"mem_per_cpu": "1G", "cpus_per_task": 4}, 5000, "1250M", "mem_per_cpu is 1250M instead of 1G, as much as"),
        ({"mem": "4G", "partition": "other"}, 5000, "6144M", "mem is 6144M instead of 4G."),  # its nodes are not known
    ],
)
def test_no_more_memory_is_asked_for_than_the_largest_node_has(ran_out, monkeypatch, options, has_mb, asks, said):
    """sbatch would refuse the job, and a merge job that resubmits would be the first to know."""
    sizes = [Node({"a100": 8}, 64, 2000), Node({"a100": 8}, 64, has_mb), Node({}, 64, 90_000)]
    known = Facts(partitions={"gpu": {"PartitionName": "gpu", "Default": "YES"}}, nodes={"gpu": sizes})
    monkeypatch.setattr(facts, "read_nodes", lambda: known)
    found, _, [note] = learn(ran_out, ran_out.last_submission(), options, {}, 1)
    assert found[next(iter(options))] == asks
    assert said in note


@pytest.mark.parametrize(
    ("n_tasks", "tasks_per_node", "mem"), [(1, 4, "2000M"), (8, 4, "750M"), (8, 8, "500M"), (8, None, "750M")]
)
def test_the_memory_of_a_node_is_divided_among_the_tasks_that_will_share_a_job(
    ran_out, monkeypatch, n_tasks, tasks_per_node, mem
):
    nodes = {"gpu": [Node({"a100": 8}, 64, 4000)]}
    known = Facts(partitions={"gpu": {"PartitionName": "gpu", "Default": "YES"}}, nodes=nodes)
    monkeypatch.setattr(facts, "read_nodes", lambda: known)
    last = {**ran_out.last_submission(), "tasks_per_node": 4, "resources": {"tasks_per_node": 4}}
    found, *_ = learn(ran_out, last, {"mem": "500M"}, {}, n_tasks, tasks_per_node=tasks_per_node)
    assert found == {"mem": mem}


@pytest.mark.parametrize(("n_tasks", "mem"), [(8, "750M"), (3, "750M"), (2, "1000M"), (1, "2000M")])
def test_a_task_that_shared_a_job_is_not_given_less_than_the_job_had(ran_out, n_tasks, mem):
    last = {**ran_out.last_submission(), "tasks_per_node": 4}
    assert learn(ran_out, last, {"mem": "500M"}, {}, n_tasks)[0] == {"mem": mem}


def test_half_as_much_again_is_reckoned_from_the_largest_of_different_nodes(tmp_path):
    run = pretend_run(tmp_path / "run", 60, n_tasks=3)
    for task, memory_mb in enumerate((32_000, 64_000, None)):
        change(run, f"4711_{task}.0", failed=[[2, {"host_oom": 1}]], memory_mb=memory_mb)
    assert learn(run, run.last_submission(), {}, {}, 1)[0] == {"mem": "96000M"}


@pytest.mark.parametrize("given", [{"mem": "1G"}, {"mem_per_cpu": "1G"}])
def test_the_memory_that_a_user_asks_for_now_is_not_raised(ran_out, given):
    assert learn(ran_out, ran_out.last_submission(), given, given, 1) == (given, [], [])


def test_memory_that_cannot_be_raised_is_told(ran_out):
    def learnt(options):
        same, _, notes = learn(ran_out, ran_out.last_submission(), options, {}, 1)
        assert same == options
        return notes

    said = "Memory ran out, but mem = '1.5G' cannot be parsed; raise it with --slurm mem=…"
    assert learnt({"mem": "1.5G"}) == [said]
    for record in ran_out.attempts():
        change(ran_out, record["attempt"], memory_mb=None)
    assert learnt({}) == ["Memory ran out, but the amount is unknown: set mem in [slurm], or --slurm mem=…"]


def test_a_user_who_names_nodes_has_the_last_word(tmp_path):
    run = pretend_run(tmp_path / "run", 60, n_tasks=1)
    change(run, "4711_0.0", state="ended", ended=BEGIN + 60, failure="gpu_fault", bad_node="gpu7")
    last = {**run.last_submission(), "exclude": ["gpu1"]}
    assert learn(run, last, {}, {}, 1)[1:] == (
        ["gpu1", "gpu7"],
        ["Excluded nodes: gpu7, because the node or a GPU failed."],
    )
    assert learn(run, last, {"exclude": ""}, {"exclude": ""}, 1)[1:] == ([], [])


@pytest.mark.parametrize(
    ("by_hand", "had", "asks"),
    [
        (False, 64_000, {"mem_per_gpu": "1200M"}),
        (True, 64_000, {"mem": "96000M"}),
        (True, None, {"mem_per_gpu": "1200M"}),
    ],
)
def test_after_a_script_by_hand_more_is_asked_for_than_its_job_had_if_that_is_known(tmp_path, by_hand, had, asks):
    run = pretend_run(tmp_path / "run", 10_000)
    for record in run.attempts():
        change(run, record["attempt"], failed=[[2, {"host_oom": 1}]], memory_mb=had)
    last = {**run.last_submission(), "by_hand": by_hand}
    options, _, _ = learn(run, last, {"mem_per_gpu": "800M", "qos": "long"}, {}, 1)
    assert options == {"qos": "long", **asks}


@pytest.mark.parametrize(
    ("failure", "nodes", "third", "excluded"),
    [
        ("container", "112", {"failure": None}, ["gpu1"]),
        ("container", "111", {"failure": "lost"}, ["gpu1"]),
        ("container", "123", {"failure": "lost"}, []),
        ("container", "123", {"failure": None}, ["gpu1", "gpu2"]),
        ("container", "123", {"failure": "lost", "published": [[0, BEGIN, 1.0, True]]}, ["gpu1", "gpu2"]),
        ("gpu_fault", "123", {"failure": "lost"}, ["gpu1", "gpu2"]),
    ],
)
def test_nodes_that_fail_alike_are_excluded_only_if_another_node_works(tmp_path, failure, nodes, third, excluded):
    """Two tasks failed and blame their nodes, the third one does not blame its own."""
    run = pretend_run(tmp_path / "run", 60, n_tasks=3)
    for task, node in enumerate(nodes):
        told = {"failure": failure, "bad_node": f"gpu{node}"} if task < 2 else third
        change(run, f"4711_{task}.0", state="ended", ended=BEGIN + 60, node=f"gpu{node}", **{"published": [], **told})
    _, found, notes = learn(run, run.last_submission(), {}, {}, 1)
    assert found == excluded
    assert notes[0].startswith("Excluded nodes: " if excluded else "No node is excluded: gpu1, gpu2 failed alike")


def test_what_left_no_record_counts_for_the_submission_of_its_job_alone(tmp_path, monkeypatch):
    run = pretend_run(tmp_path / "run", 10_000)
    accounting = {
        "4711_8": [Accounted("OUT_OF_MEMORY", "host_oom", True, 10, 1, "gpu8")],
        "4711_9": [Accounted("NODE_FAIL", "node_fail", True, 10, 1, "gpu9")],
    }
    monkeypatch.setattr(slurm_adjustments, "accounting_of", lambda run: accounting)

    def learnt():
        given = {"mem": "800M", "partition": "long"}
        options, exclude, _ = learn(run, {**run.last_submission(), "exclude": []}, given, {}, 1)
        assert options["partition"] == "long"
        return options["mem"], exclude

    assert learnt() == ("1200M", ["gpu9"])
    submit_again(run)
    assert learnt() == ("800M", [])
    assert not retriable(report_of(run, accounting=accounting))  # its user cancelled it before a task had started
    accounting["4800_0"] = accounting.pop("4711_8")
    assert learnt() == ("1200M", [])
    assert retriable(report_of(run, accounting=accounting))


def test_a_round_that_was_refused_is_made_again_by_a_merge_job_that_is_requeued(tmp_path):
    run = pretend_run(tmp_path / "run", 10_000)
    accounting = {"4711_8": [Accounted("NODE_FAIL", "node_fail", True, 10, 1, "gpu8")]}
    assert retriable(report_of(run, accounting=accounting))
    submit_again(run, state="refused")
    assert retriable(report_of(run, accounting=accounting))


def test_a_merge_leaves_the_rest_to_a_later_submission_only_if_slurm_took_it(tmp_path):
    run = pretend_run(tmp_path / "run", 10_000)
    first = run.last_submission()
    submit_again(run, state="refused")
    run.record_submission({**first, "submission": 3, "by_hand": True})  # its user merges it
    assert submission._later(run, first) is None
    run.record_submission({**first, "submission": 4})
    assert submission._later(run, first)["submission"] == 4
