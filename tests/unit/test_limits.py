"""What Slurm allows: each limit, what is asked, and that what is foretold is what Slurm then does."""

import shutil
from dataclasses import replace

import pytest

from slurmgpu.cli.views.dry_run import Shown
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors.interface import Preview
from slurmgpu.executors.slurm_preview import respect_limits
from slurmgpu.run.submissions import Submission, seconds_of
from slurmgpu.slurm import commands, facts
from slurmgpu.slurm.facts import Facts, Node, Trial
from slurmgpu.slurm.limits import limits_of
from slurmgpu.slurm.nodes import empty_partitions
from slurmgpu.slurm.survey import survey

PARTITION = {"PartitionName": "gpu", "Default": "YES", "MaxTime": "02:00:00", "DefaultTime": "NONE", "QoS": "N/A"}
USERS = {"User": "ada", "Account": "lab", "Partition": "", "DefaultQOS": "normal"}
LAB, FACULTY = {**USERS, "User": "", "ParentName": "faculty"}, {**USERS, "User": "", "Account": "faculty"}
QOS = dict.fromkeys(facts.QOS_KEYS, "")
UNLIMITED = {"DefMemPerNode": "UNLIMITED"}
NO_DEFAULT = {"SelectTypeParameters": "CR_CORE_MEMORY", **UNLIMITED, "partition": PARTITION | UNLIMITED}
"""What scontrol shows where slurm.conf sets no DefMemPerCPU, DefMemPerNode or DefMemPerGPU."""
SAFE = {"AccountingStorageEnforce": "associations,limits,qos,safe"}
TWO = "2 of its tasks run at once, the others pend (Resources): "
ALL_MEMORY = f"{TWO}each gets all memory of its node, as no mem is asked for"
WHOLE = {**PARTITION, "OverSubscribe": "EXCLUSIVE"}
WHOLE_NODES = f"{TWO}each is given whole nodes"


def submission(n_tasks=8, gpus=1, n_concurrent=None, **slurm):
    return Submission(1, "slurm", "auto", n_tasks, n_concurrent or n_tasks, gpus, slurm=slurm)


def asking(resources, **asked):
    return replace(submission(**asked), resources={"gpus": 8, "array": True, **resources})


def cluster_of(partition=PARTITION, association=USERS, qos=None, gpus=(4, 4), size=(64, 256_000, 1), **config):
    return Facts(
        user="ada",
        config=config,
        partitions={"gpu": partition},
        nodes={"gpu": [Node({"a100": count}, *size) for count in gpus]},
        default_account="lab",
        associations=[association],
        qos={"normal": {**QOS, "Name": "normal", **(qos or {})}},
    )


def what_happens(asked, known):
    limits, _ = limits_of(asked, known)
    return {limit.limit: limit.then for limit in limits}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("1-12", 129600), ("1-0:30", 88200), ("2-01:02:03", 176523)],
)
def test_a_walltime_is_read_as_sbatch_reads_it(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "NONE", "", "soon"])
def test_a_walltime_without_end_is_none(text):
    assert seconds_of(text) is None


@pytest.mark.parametrize(
    ("asked", "known", "name", "then"),
    [
        (submission(time="01:00:00"), {}, "MaxTime of partition gpu", ""),
        (submission(time="03:00:00"), {}, "MaxTime of partition gpu", "pends for ever (PartitionTimeLimit)"),
        (
            submission(time="03:00:00"),
            {"EnforcePartLimits": "ALL"},
            "MaxTime of partition gpu",
            "sbatch refuses it",
        ),
        (
            submission(n_tasks=64),
            {},
            "GPUs of partition gpu",
            "8 of its tasks run at once, the others pend (Resources)",
        ),
        (submission(gpus=8), {}, "GPUs of a node of partition gpu", "sbatch refuses it: no node has 8"),
        *[
            (submission(gres=gres), known, name, then)
            for gres, known, name, then in [
                ("gpu:8", {}, "GPUs of a node of partition gpu", "sbatch refuses it: no node has 8"),
                ("gpu:h100:1", {}, "h100 GPUs of a node of partition gpu", "sbatch refuses it: no node has 1"),
                ("lscratch:50,gpu:a100", {}, "a100 GPUs of a node of partition gpu", ""),
                ("gpu:a100:1,gpu:h100:4", {}, "GPUs of a node of partition gpu", "sbatch refuses it: no node has 5"),
                (
                    "gpu:2",
                    {"qos": {"MaxTRESPerJob": "gres/gpu=1"}},
                    "MaxTRESPerJob of QOS normal",
                    "pends for ever (QOSMaxGRESPerJob)",
                ),
                ("gpumem:20g", {}, "GPUs of a node of partition gpu", ""),
                ("shard:1", {}, "GPUs of a node of partition gpu", None),
            ]
        ],
        (submission(), {"qos": {"MaxWall": "01:00:00"}}, "MaxWall of QOS normal", ""),
        (
            submission(time="90"),
            {"qos": {"MaxWall": "01:00:00", "Flags": "DenyOnLimit"}},
            "MaxWall of QOS normal",
            "sbatch refuses it",
        ),
        (
            submission(),
            {"qos": {"MaxTRESPerUser": "cpu=99,gres/gpu=3"}},
            "MaxTRESPerUser of QOS normal",
            "3 of its tasks run at once, the others pend (QOSMaxGRESPerUser)",
        ),
        (submission(), {"qos": {"MaxTRESPerUser": "cpu=99"}}, "MaxTRESPerUser of QOS normal", None),
        (
            submission(gpus=4),
            {"qos": {"GrpTRES": "gres/gpu=3"}},
            "GrpTRES of QOS normal",
            "pends for ever (QOSGrpGRES)",
        ),
        (
            submission(),
            {"association": {**USERS, "MaxJobs": "5"}},
            "MaxJobs of ada in account lab",
            "5 of its tasks run at once, the others pend (AssocMaxJobsLimit)",
        ),
        *[
            (submission(**given), known, "nodes of partition gpu", then)
            for given, known, then in [
                ({}, NO_DEFAULT, ALL_MEMORY),
                ({"n_tasks": 2}, NO_DEFAULT, ""),
                ({"gpus": 0}, NO_DEFAULT, ALL_MEMORY),
                ({"gpus": 0}, {**NO_DEFAULT, "JobDefaults": "DefMemPerGPU=1000"}, ALL_MEMORY),
                ({"n_tasks": 3}, {**NO_DEFAULT, "gpus": (4, 4, 0)}, ALL_MEMORY),  # the third node has no GPU
                ({}, {**NO_DEFAULT, "JobDefaults": "DefMemPerGPU=1000"}, None),
                ({}, {**NO_DEFAULT, "partition": PARTITION | {"DefMemPerCPU": "500"}}, None),
                ({}, {**NO_DEFAULT, "SelectTypeParameters": "CR_CORE"}, None),
                ({"mem_per_cpu": "1G"}, NO_DEFAULT, None),
                ({}, {"partition": WHOLE}, WHOLE_NODES),
                ({"mem_per_cpu": "1G"}, {**NO_DEFAULT, "partition": WHOLE | UNLIMITED}, WHOLE_NODES),
                ({"exclusive": True}, {}, WHOLE_NODES),
                ({"exclusive": "user"}, {}, None),
                ({"n_tasks": 2, "exclusive": True}, {}, ""),
                ({"gres": "none", "gpus": 4}, {"gpus": (0, 0)}, WHOLE_NODES),
            ]
        ],
        *[
            (
                submission(n_tasks=4, gpus=2, time="30"),
                {"association": {**USERS, key: f"cpu=9,gres/gpu={most}"}, **config},
                f"{key} of ada in account lab",
                then,
            )
            for key, most, config, then in [
                ("MaxTRESMins", 60, {}, ""),
                ("MaxTRESMins", 59, {}, "pends for ever (AssocMaxGRESMinutesPerJob)"),
                ("GrpTRESRunMins", 240, {}, ""),
                ("GrpTRESRunMins", 239, {}, "3 of its tasks run at once, the others pend (AssocGrpGRESRunMinutes)"),
                ("GrpTRESRunMins", 59, {}, "pends for ever (AssocGrpGRESRunMinutes)"),
                ("GrpTRESMins", 240, SAFE, ""),
                ("GrpTRESMins", 239, SAFE, "tasks pend once it is used up (AssocGrpGRESMinutes)"),
                ("GrpTRESMins", 59, SAFE, "pends for ever (AssocGrpGRESMinutes)"),
                ("GrpTRESMins", 0, {}, "pends for ever (AssocGrpGRESMinutes)"),
                ("GrpTRESMins", 59, {}, "Slurm ends its tasks once it is used up (AssocGrpGRESMinutes)"),
            ]
        ],
        (submission(), {"qos": {"MaxSubmitJobsPerUser": "9"}}, "MaxSubmitJobsPerUser of QOS normal", ""),
        (submission(), {"qos": {"GrpSubmitJobs": "8"}}, "GrpSubmitJobs of QOS normal", "sbatch refuses it"),
        (submission(), {"MaxJobCount": "8"}, "MaxJobCount, of all users", "sbatch refuses it"),
    ],
)
def test_of_what_is_above_a_limit_it_is_said_what_will_happen(asked, known, name, then):
    assert what_happens(asked, cluster_of(**known)).get(name) == then


@pytest.mark.parametrize(
    ("asked", "known", "idle"),
    [
        (
            submission(n_tasks=1),
            {"partition": WHOLE},
            "its 4 GPUs are held, and charged for, and the job computes on 1. To use all, ask for them: --gpus 4",
        ),
        (submission(n_tasks=1), {"partition": WHOLE, "gpus": (4, 8, 0)}, "its 4 GPUs are held"),
        (
            asking({"gpus": 4, "array": True}, n_tasks=1),
            {"partition": WHOLE},
            "the job computes on 1. There are no shards for more tasks.",
        ),
        (submission(gpus=6), {"partition": WHOLE, "gpus": (4, 8)}, "its 8 GPUs are held"),
        (submission(gpus=4), {"partition": WHOLE, "gpus": (4, 8)}, None),
        (submission(gpus=3), {"partition": WHOLE}, "More tasks do not fit there"),
        (asking({"tasks_per_node": 1}, gpus=3), {"partition": WHOLE}, "More tasks do not fit there"),
        (submission(n_tasks=1, exclusive=True), {}, "exclusive = true under [slurm] gives each job a whole node"),
        (asking({"tasks_per_node": 1}), {"partition": WHOLE, "gpus": (4, 8)}, "To use all, set tasks_per_node = 4."),
        (asking({"tasks_per_node": 1}, mem="80G"), {"partition": WHOLE}, "To use 3, set tasks_per_node = 3."),
        (submission(mem="200G"), {"partition": WHOLE}, "More tasks do not fit there"),
        (submission(gpu_bind="closest"), {"partition": WHOLE}, "To use all, set tasks_per_node = 4."),
        (submission(gpus=4), {"partition": WHOLE}, None),
        (submission(gpus=0), {"partition": WHOLE}, None),
        (submission(gres="none"), {"gpus": (0, 0)}, None),
        (submission(), {}, None),
        (submission(exclusive="user"), {}, None),
    ],
)
def test_of_gpus_that_idle_on_whole_nodes_submit_and_its_dry_run_tell(asked, known, idle):
    notes = respect_limits(asked, cluster_of(**known))[1]
    assert [idle in note for note in notes] == ([True] if idle else [])


@pytest.mark.parametrize(
    ("asked", "known", "n_tasks", "per_node"),
    [
        (submission(), {"partition": WHOLE}, 8, 4),
        (submission(exclusive=True), {}, 8, 4),
        (submission(), {}, 8, 1),
        (submission(gpus=2), {"partition": WHOLE}, 8, 2),
        (submission(n_tasks=5), {"partition": WHOLE}, 8, 4),  # two nodes anyway
        (submission(n_tasks=3), {"partition": WHOLE}, 3, 3),
        (submission(n_tasks=2), {"partition": WHOLE}, 2, 2),
        (submission(n_tasks=20, n_concurrent=2), {"partition": WHOLE}, 20, 2),
        (submission(n_tasks=4, n_concurrent=3), {"partition": WHOLE}, 6, 3),  # three at once, on one node
        (asking({"tasks_per_node": 4}, n_tasks=9, n_concurrent=8), {}, 12, 4),
        (submission(), {"partition": WHOLE, "gpus": (4, 8, 0)}, 8, 4),
        (submission(cpus_per_task=20), {"partition": WHOLE}, 9, 3),
        (submission(cpus_per_gpu="32"), {"partition": WHOLE}, 8, 2),
        (submission(mem="100G"), {"partition": WHOLE}, 8, 2),
        (submission(mem_per_gpu="200000"), {"partition": WHOLE}, 8, 1),
        (submission(mem_per_cpu="8G", cpus_per_task=10), {"partition": WHOLE}, 9, 3),
        (submission(mem="0"), {"partition": WHOLE}, 8, 4),
        # Of 64 CPUs, 60 are left for jobs, and 30 cores.
        (submission(cpus_per_task=16), {"partition": WHOLE, "size": (60, 250_000, 2)}, 9, 3),
        (submission(cpus_per_task=15), {"partition": WHOLE, "size": (60, 250_000, 2)}, 8, 4),
        (submission(cpus_per_task=15, hint="nomultithread"), {"partition": WHOLE, "size": (60, 250_000, 2)}, 8, 2),
        (submission(cpus_per_task=15, threads_per_core=1), {"partition": WHOLE, "size": (60, 250_000, 2)}, 8, 2),
        (submission(cpus_per_task=15, threads_per_core=2), {"partition": WHOLE, "size": (60, 250_000, 1)}, 8, 4),
        (submission(mem="2T"), {"partition": WHOLE}, 8, 1),
        (submission(gres="shard:1"), {"partition": WHOLE}, 8, 1),
        (submission(gpu_bind="closest"), {"partition": WHOLE}, 8, 1),
        (submission(gpus=0), {"partition": WHOLE}, 8, 1),
        (asking({"tasks_per_node": 1}), {"partition": WHOLE}, 8, 1),
        (asking({"tasks_per_node": 2}), {"partition": WHOLE}, 8, 2),
        (asking({"tasks_per_node": 4}), {}, 8, 4),
        (asking({"tasks_per_node": 4}, n_tasks=3), {}, 3, 3),
        (asking({"tasks_per_node": 4}, n_tasks=7), {}, 8, 4),  # eight were asked for, and seven shards are left
        (asking({"tasks_per_node": 4}, n_tasks=5), {"partition": WHOLE}, 6, 3),
    ],
)
def test_tasks_share_the_nodes_that_slurm_gives_whole(asked, known, n_tasks, per_node):
    shared, notes = respect_limits(asked, cluster_of(**known))
    assert (shared.n_tasks, shared.tasks_per_node) == (n_tasks, per_node)
    assert shared.n_concurrent == min(asked.n_concurrent, n_tasks) or shared.n_concurrent == n_tasks
    assert any("whole node here" in note for note in notes) == (per_node > 1 and not asked.resources)
    assert respect_limits(shared, cluster_of(**known))[0] == shared  # a dry run fits it, and so does submit


@pytest.mark.parametrize(
    ("asked", "default", "mem"),
    [
        (submission(), {"DefMemPerNode": "8000"}, "8000M"),
        (submission(), {"DefMemPerNode": "100000"}, "64000M"),  # a quarter of the node
        (submission(mem="1G"), {"DefMemPerNode": "8000"}, "1G"),
        (submission(), {"DefMemPerCPU": "500", "DefMemPerNode": "8000"}, None),  # Slurm gives each task its own
        (submission(), UNLIMITED, None),
        (asking({"tasks_per_node": 4}), {"DefMemPerNode": "8000"}, None),  # a dry run tells what each gets
    ],
)
def test_tasks_that_share_a_whole_node_have_the_memory_that_each_would_have_alone(asked, default, mem):
    known = cluster_of({**WHOLE, **UNLIMITED, **default}, SelectTypeParameters="CR_CORE_MEMORY", **UNLIMITED)
    shared, _ = respect_limits(asked, known)
    assert shared.slurm.get("mem") == mem
    assert shared.tasks_per_node == 4
    assert respect_limits(shared, known)[0] == shared


def test_tasks_that_see_gpus_of_others_share_no_node():
    with pytest.raises(SlurmGPUError, match=r"gpu_bind = 'closest' under \[slurm\].* Remove gpu_bind"):
        respect_limits(asking({"tasks_per_node": 2}, gpu_bind="closest"), cluster_of())


def test_where_one_of_several_partitions_gives_whole_nodes_tasks_share_them_if_told_to():
    known = cluster_of(WHOLE)
    known.partitions |= {"shared": {**PARTITION, "PartitionName": "shared", "Default": "NO"}}
    asked, [note] = respect_limits(submission(partition="gpu,shared"), known)
    assert asked.tasks_per_node == 1
    assert "the job computes on 1. To use all, set tasks_per_node = 4." in note


def test_limits_count_jobs_not_the_tasks_in_them():
    known = cluster_of(WHOLE, {**USERS, "MaxSubmitJobs": "3"}, qos={"MaxTRESPerJob": "gres/gpu=3"})
    asked, notes = respect_limits(submission(n_tasks=40, n_concurrent=40), known)
    assert (asked.n_tasks, asked.n_concurrent, asked.n_jobs) == (8, 8, 2)
    assert "is 2 and a job has 4; 8 will compute all shards." in notes[1]
    told = {limit.limit: (limit.asked, limit.then) for limit in limits_of(asked, known)[0]}
    assert told["MaxTRESPerJob of QOS normal"] == ("4 for a job", "pends for ever (QOSMaxGRESPerJob)")
    assert told["MaxSubmitJobs of ada in account lab"] == ("3", "")
    assert told["GPUs of a node of partition gpu"][0] == "4"
    assert told["nodes of partition gpu"] == ("2 at once", "")
    assert asked.bound_gpu_hours(3600) == 8.0


@pytest.mark.parametrize(
    ("refused", "tables"),
    [
        (["merge"], "[merge], which takes"),
        (["array"], "[slurm], [merge] or"),
        (["array", "merge"], "[slurm], [merge] or"),
    ],
)
def test_the_verdict_names_the_tables_of_the_job_that_slurm_refuses(refused, tables):
    trials = {job: Trial(None, "refused", job not in refused) for job in ("array", "merge")}
    assert f"job. Correct {tables}" in Shown({}, Preview(submission(), trials=trials), {}).verdict


NODE = "NodeName=n1 CPUAlloc=0 CPUTot=64 Gres=gpu:a100:4(S:0-1) RealMemory=257000 Sockets=2 CoresPerSocket=32"
"""A part of what scontrol shows of a node, before Slurm 22.05; partitions, and an administrator's words, follow."""
SPARE = f"{NODE} CPUEfctv=60 MemSpecLimit=7000"
THREADS = SPARE.replace("CoresPerSocket=32", "CoresPerSocket=16")


@pytest.mark.parametrize("over_subscribe", ["EXCLUSIVE", "NO"])
def test_submit_asks_for_gpus_only_where_a_partition_gives_whole_nodes(monkeypatch, over_subscribe):
    partition = f"PartitionName=gpu Default=YES OverSubscribe={over_subscribe}\n"
    answers = {"partition": partition, "node": f"{NODE} Partitions=gpu \n"}
    monkeypatch.setattr(commands, "run", lambda *command, **environ: answers.get(command[-1], ""))
    known = facts.read_facts({}, "lab", with_nodes=False)
    nodes = {"gpu": [Node({"a100": 4}, 64, 257_000)]} if over_subscribe == "EXCLUSIVE" else {}
    assert known.nodes == nodes


@pytest.mark.parametrize(
    ("told", "node"),
    [
        (NODE, Node({"a100": 4}, 64, 257_000)),
        (SPARE, Node({"a100": 4}, 60, 250_000)),
        (THREADS, Node({"a100": 4}, 60, 250_000, 2)),
        (NODE.replace("gpu:a100:4(S:0-1)", "(null)"), Node({}, 64, 257_000)),
    ],
)
def test_what_jobs_may_have_of_a_node_is_read(monkeypatch, told, node):
    line = f"{told} Partitions=gpu,long OS=Linux 6.1 #1 SMP Reason=bad Gres=gpu:9 [root@2026-11-29T10:00:00]\n"
    partitions = "".join(f"PartitionName={name}\n" for name in ("gpu", "long", "empty"))
    answers = {"partition": partitions, "node": line}
    monkeypatch.setattr(commands, "run", lambda *command, **environ: answers.get(command[-1], ""))
    assert facts.read_facts({}).nodes == {"gpu": [node], "long": [node], "empty": []}


@pytest.mark.parametrize(
    ("enforced", "asked", "short", "long"),
    [
        ("NO", "03:00:00", "no task starts there, but in another partition", ""),
        ("ANY", "03:00:00", "no task starts there, but in another partition", ""),
        ("ALL", "03:00:00", "sbatch refuses it", ""),
        ("ANY", "09:00:00", "sbatch refuses it", "sbatch refuses it"),
        ("NO", "09:00:00", "pends for ever (PartitionTimeLimit)", "pends for ever (PartitionTimeLimit)"),
        ("NO", "01:00:00", "", ""),
    ],
)
def test_one_of_several_partitions_that_allows_a_task_suffices(enforced, asked, short, long):
    known = cluster_of(EnforcePartLimits=enforced)
    known.partitions |= {"long": {**PARTITION, "PartitionName": "long", "Default": "NO", "MaxTime": "08:00:00"}}
    found = what_happens(submission(partition="gpu,long", time=asked), known)
    assert (found["MaxTime of partition gpu"], found["MaxTime of partition long"]) == (short, long)


def test_a_limit_of_the_qos_goes_over_the_same_one_of_the_association():
    known = cluster_of(association={**USERS, "MaxJobs": "2", "GrpJobs": "7"}, qos={"MaxJobsPerUser": "50"})
    found = what_happens(submission(), known)
    assert found["MaxJobsPerUser of QOS normal"] == ""
    assert "MaxJobs of ada in account lab" not in found
    assert found["GrpJobs of ada in account lab"] == "7 of its tasks run at once, the others pend (AssocGrpJobsLimit)"


FULL = {"a100 GPUs of partition gpu"}


def of_partition_and_job(partitions, jobs, *associations):
    """A cluster with a QOS of the partition, and another one that the jobs ask for."""
    known = cluster_of({**PARTITION, "QoS": "gates"})
    known.qos = {"gates": {**QOS, "Name": "gates", **partitions}, "long": {**QOS, "Name": "long", **jobs}}
    known.associations = associations or [USERS]
    return known


@pytest.mark.parametrize(
    ("partitions", "jobs", "associations", "binding"),
    [
        ({"MaxTRESPerUser": "gres/gpu=6"}, {"MaxTRESPerUser": "gres/gpu=2"}, (), {"MaxTRESPerUser of QOS gates"}),
        ({"MaxTRESPerUser": "cpu=9"}, {"MaxTRESPerUser": "gres/gpu=2"}, (), {"MaxTRESPerUser of QOS long"}),
        (
            {"MaxTRESPerUser": "gres/gpu=6"},
            {"MaxTRESPerUser": "gres/gpu=2", "Flags": "OverPartQOS"},
            (),
            {"MaxTRESPerUser of QOS long"},
        ),
        (
            {"MaxTRESPerUser": "gres/gpu=6"},
            {"MaxTRESPerUser": "gres/gpu:a100=2"},
            (),
            {"MaxTRESPerUser of QOS gates", "MaxTRESPerUser of QOS long"},
        ),
        ({"MaxTRESPerUser": "gres/gpu=6,gres/gpu:h100=1"}, {}, (), {"MaxTRESPerUser of QOS gates"}),
        (
            {},
            {},
            ({**USERS, "GrpTRES": "gres/gpu=7"}, {**LAB, "GrpTRES": "cpu=9"}, {**FACULTY, "GrpTRES": "gres/gpu=3"}),
            {"GrpTRES of ada in account lab", "GrpTRES of account faculty"},
        ),
        ({}, {"GrpTRES": "gres/gpu=5"}, (USERS, {**LAB, "GrpTRES": "gres/gpu=3"}), {"GrpTRES of QOS long"}),
        ({}, {}, ({**USERS, "MaxTRESPerJob": "gres/gpu=1"}, {**LAB, "MaxJobs": "3"}), {"MaxJobs of account lab"}),
        (
            {},
            {},
            ({**USERS, "GrpJobs": "4"}, {**LAB, "GrpJobs": "5"}),
            {"GrpJobs of ada in account lab", "GrpJobs of account lab"},
        ),
        ({}, {}, ({**USERS, "MaxJobs": "3"}, {**USERS, "Partition": "gpu", "MaxJobs": "8"}), set()),
        ({}, {}, ({**USERS, "MaxJobs": "3"}, {**LAB, "MaxJobs": "2"}), {"MaxJobs of ada in account lab"}),
        ({}, {}, ({**LAB, "GrpJobs": "7", "ParentName": "lab"},), {"GrpJobs of account lab"}),
    ],
)
def test_the_limits_that_hold_are_those_of_slurms_hierarchy(partitions, jobs, associations, binding):
    known = of_partition_and_job(partitions, jobs, *associations)
    asked = Submission(1, "slurm", "auto", 8, 8, 1, gpu_type="a100", slurm={"qos": "long"})
    assert {name for name, then in what_happens(asked, known).items() if "run at once" in then} - FULL == binding


@pytest.mark.parametrize(
    ("value", "shown"), [("gres/gpu=6,gres/gpu:a100=2", "2 GPUs"), ("gres/gpu=1,gres/gpu:a100=6", "1 GPU")]
)
def test_of_a_limit_on_all_gpus_and_one_on_the_type_the_lower_one_is_shown(value, shown):
    asked = Submission(1, "slurm", "auto", 8, 8, 1, gpu_type="a100")
    limits, _ = limits_of(asked, cluster_of(qos={"MaxTRESPerUser": value}))
    assert [limit.value for limit in limits if limit.limit.startswith("MaxTRES")] == [shown]


@pytest.mark.parametrize("who", ["partitions", "jobs"])
def test_a_qos_that_denies_makes_the_limits_of_all_strict(who):
    qos = {"partitions": {}, "jobs": {}, who: {"Flags": "DenyOnLimit"}}
    qos["jobs"] = {**qos["jobs"], "MaxWall": "01:00:00"}
    known = of_partition_and_job(qos["partitions"], qos["jobs"], {**USERS, "MaxTRESPerJob": "gres/gpu=1"})
    found = what_happens(submission(gpus=2, qos="long", time="90"), known)
    assert found["MaxWall of QOS long"] == "sbatch refuses it"
    assert found["MaxTRESPerJob of ada in account lab"] == "sbatch refuses it"


def test_a_qos_may_free_its_jobs_of_the_partitions_walltime():
    free = {"Flags": "DenyOnLimit,PartitionTimeLimit", "MaxWall": "1-00:00:00"}
    asked = submission(qos="long", time="10:00:00")
    found = what_happens(asked, of_partition_and_job({}, free))
    assert found["MaxWall of QOS long"] == ""
    assert "MaxTime of partition gpu" not in found
    assert what_happens(asked, of_partition_and_job(free, {}))["MaxTime of partition gpu"].startswith("pends for ever")


def test_a_qos_over_that_of_the_partition_may_free_its_jobs_as_well():
    free = {"Flags": "OverPartQOS,PartitionTimeLimit"}
    assert "MaxTime of partition gpu" not in what_happens(submission(qos="long"), of_partition_and_job({}, free))


@pytest.mark.parametrize(("default", "holds"), [("long", "long"), ("", "normal")])
def test_jobs_that_ask_for_no_qos_have_the_users_default_or_normal(default, holds):
    known = cluster_of(association={**USERS, "DefaultQOS": default})
    known.qos = {name: {**QOS, "Name": name, "MaxJobsPerUser": "3"} for name in ("long", "normal")}
    assert [name for name in what_happens(submission(), known) if "QOS" in name] == [f"MaxJobsPerUser of QOS {holds}"]


@pytest.mark.parametrize(
    ("partition", "qos", "walltime_s"),
    [
        ({}, {"MaxJobsPerUser": "4"}, 7200),
        ({"DefaultTime": "00:30:00"}, {}, 1800),
        ({"DefaultTime": "00:30:00"}, {"MaxWall": "00:10:00"}, 1800),
        ({}, {"MaxWall": "01:00:00"}, 3600),
        ({"MaxTime": "UNLIMITED"}, {"MaxWall": "01:00:00"}, 3600),
    ],
)
def test_a_walltime_that_is_not_asked_for_is_the_default_or_the_longest(partition, qos, walltime_s):
    known = cluster_of({**PARTITION, **partition}, qos={**qos, "MaxTRESMins": f"gres/gpu={walltime_s // 60 - 1}"})
    limits, found = limits_of(submission(), known)
    assert found == walltime_s
    assert [limit.then for limit in limits if "MaxTRESMins" in limit.limit] == [
        "pends for ever (QOSMaxGRESMinutesPerJob)"
    ]


@pytest.mark.parametrize(("gpus", "then"), [(4, ""), (8, ""), (9, "sbatch refuses it: no node has 9")])
def test_of_unlike_nodes_the_one_with_most_gpus_counts(gpus, then):
    assert what_happens(submission(gpus=gpus), cluster_of(gpus=(8, 4)))["GPUs of a node of partition gpu"] == then
    assert what_happens(submission(gpus=gpus), cluster_of(gpus=(4, 8)))["GPUs of a node of partition gpu"] == then


@pytest.mark.parametrize(("n_tasks", "then"), [(2, ""), (3, WHOLE_NODES)])
def test_as_many_tasks_as_whole_nodes_are_not_said_to_pend(n_tasks, then):
    assert what_happens(submission(n_tasks=n_tasks), cluster_of(WHOLE))["nodes of partition gpu"] == then


def test_accounts_are_asked_for_upwards_on_this_cluster_alone(monkeypatch):
    parents, asked = {"lab": "faculty", "faculty": "root", "root": ""}, []

    def answer(*command, **environ):
        if command[0] != "sacctmgr":
            return {"scontrol": "ClusterName = main\nAccountingStorageEnforce = limits\n"}.get(command[0], "")
        keys = command[-1].removeprefix("format=").split(",")
        if "assoc" not in command:
            return ""
        account = next(word for word in command if word.startswith("account=")).removeprefix("account=")
        asked.append((account, "cluster=main" in command))
        rows = [{"Account": account, "ParentName": parents[account]}, {"Account": account, "User": Facts().user}]
        return "".join("|".join(row.get(key, "") for key in keys) + "\n" for row in rows)

    monkeypatch.setattr(commands, "run", answer)
    known = facts.read_facts(commands.configuration(), "lab")
    assert asked == [("lab", True), ("faculty", True), ("root", True)]
    rows = [(row["User"], row["Account"]) for row in known.associations]
    assert rows == [("", "lab"), (known.user, "lab"), ("", "faculty"), ("", "root")]


def test_a_survey_has_the_accounts_of_this_cluster_alone(monkeypatch):
    rows = {"main": "lab|normal,long\n", "other": "guests|short\n"}

    def answer(*command, **environ):
        if "user" in command:
            return "me|guests\n"
        if "assoc" in command:
            of = [word.removeprefix("cluster=") for word in command if word.startswith("cluster=")]
            return "".join(rows[cluster] for cluster in of or rows)
        return "ClusterName = main\n" if command[0] == "scontrol" else ""

    monkeypatch.setattr(commands, "run", answer)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    found = survey()
    assert (found.accounts, found.qos) == (["lab"], ["long", "normal"])


def test_a_type_of_gpu_is_counted_alone():
    nodes = [Node({"a100": 4}, 64, 256_000), Node({"h100": 8, "": 1}, 64, 256_000)]
    known = Facts(partitions={"gpu": PARTITION}, nodes={"gpu": nodes})
    asked = Submission(1, "slurm", "auto", 16, 16, 1, gpu_type="h100")
    assert what_happens(asked, known)["h100 GPUs of partition gpu"].startswith("8 of its tasks")


def test_partitions_that_slurm_hides_are_said_to_be_unknown(monkeypatch):
    """With PrivateData=partitions scontrol of 22.05 prints nothing, and succeeds."""
    monkeypatch.setattr(commands, "run", lambda *command: "")
    notes = facts.read_facts({}, "lab").notes
    assert notes[0].startswith("Limits of partitions are not known. scontrol shows no partition")


@pytest.mark.parametrize(
    ("slurm", "partition", "qos", "hours"),
    [
        ({"time": "00:30:00"}, {}, {}, 8.0),
        ({}, {"DefaultTime": "00:15:00"}, {"MaxWall": "00:10:00"}, 4.0),
        ({}, {}, {}, 32.0),
        ({}, {}, {"MaxWall": "01:00:00"}, 16.0),
        ({}, {"MaxTime": "UNLIMITED"}, {}, None),
        ({"time": "UNLIMITED"}, {}, {}, None),
    ],
)
def test_the_bound_is_tasks_times_gpus_times_walltime(slurm, partition, qos, hours):
    asked = submission(n_tasks=8, gpus=2, **slurm)
    _, walltime_s = limits_of(asked, cluster_of({**PARTITION, **partition}, qos=qos))
    assert asked.bound_gpu_hours(walltime_s) == hours


def test_one_dead_command_costs_its_limits_alone(monkeypatch):
    def answer(*command, **environ):
        if command[0] == "sacctmgr":
            raise commands.SlurmUnavailableError("sacctmgr did not answer within 30 s.")
        return {"node": f"{NODE} Partitions=gpu"}.get(command[-1], "PartitionName=gpu Default=YES MaxTime=1:00:00")

    monkeypatch.setattr(commands, "run", answer)
    known = facts.read_facts({})
    assert known.notes == ["Limits of QOSes and associations are not known. sacctmgr did not answer within 30 s."]
    assert set(what_happens(submission(), known)) >= {"MaxTime of partition gpu", "GPUs of partition gpu"}


def test_limits_that_are_not_enforced_are_not_shown(monkeypatch):
    monkeypatch.setattr(commands, "run", lambda *command, **environ: {"scontrol": ""}[command[0]])
    assert "not enforced" in facts.read_facts({"AccountingStorageEnforce": "associations"}).notes[-1]


COURSE = {**USERS, "Account": "course", "MaxSubmitJobs": "1"}
QUICK = {**USERS, "Partition": "quick", "MaxSubmitJobs": "2"}


@pytest.mark.parametrize(
    ("slurm", "own", "n_tasks"),
    [
        ({}, {}, 8),
        ({}, {"MaxSubmitJobs": "5"}, 4),
        ({"account": False}, {"MaxSubmitJobs": "5"}, 4),
        ({"partition": "quick"}, {"MaxSubmitJobs": "5"}, 1),
    ],
)
def test_a_submission_is_cut_to_what_its_own_account_and_partition_allow(slurm, own, n_tasks):
    known = cluster_of(association={**USERS, **own})
    known.associations = [*known.associations, COURSE, QUICK]
    known.partitions = {**known.partitions, "quick": {**PARTITION, "PartitionName": "quick", "Default": "NO"}}
    assert respect_limits(submission(**slurm), known)[0].n_tasks == n_tasks
    with pytest.raises(SlurmGPUError, match=r"MaxSubmitJobs of ada in account course .* is 0, which allows no task"):
        respect_limits(submission(account="course"), known)


def test_the_job_in_which_a_run_is_submitted_counts_as_well(monkeypatch):
    known = cluster_of(association={**USERS, "MaxSubmitJobs": "4"})
    assert respect_limits(submission(n_tasks=8), known)[0].n_tasks == 3
    monkeypatch.setenv("SLURM_JOB_ID", "20")  # the merge job, by auto_resubmit
    less, [note] = respect_limits(submission(n_tasks=8), known)
    assert less.n_tasks == 2
    assert "(one is for the merge job, one is this job) is 2; 2 will compute all shards." in note
    known = cluster_of(association={**USERS, "MaxSubmitJobs": "2"})
    assert respect_limits(submission(n_tasks=1), known) == (submission(n_tasks=1), [])  # this job may be of another QOS
    known = cluster_of(association={**USERS, "MaxSubmitJobs": "0"})
    with pytest.raises(SlurmGPUError, match="is 0, which allows no task"):
        respect_limits(submission(n_tasks=1), known)


def test_where_there_are_no_arrays_one_task_is_a_plain_job():
    known = cluster_of(MaxArraySize="0")
    one = submission(n_tasks=1)
    assert respect_limits(one, known) == (one, [])
    assert what_happens(one, known)["MaxArraySize"] == ""
    less, notes = respect_limits(submission(n_tasks=8), known)
    assert less.n_tasks == 1
    assert notes == ["8 tasks were asked for, but MaxArraySize is 1; 1 will compute all shards."]
    with pytest.raises(SlurmGPUError, match="MaxArraySize is 0"):
        respect_limits(one, known, is_array=True)


def test_an_array_has_no_more_tasks_than_the_scheduler_takes_in_one():
    known = cluster_of(MaxArraySize="1001", SchedulerParameters="bf_interval=1,max_array_tasks=3,bf_continue")
    less, notes = respect_limits(submission(n_tasks=8), known)
    assert less.n_tasks == 3
    assert notes == ["8 tasks were asked for, but max_array_tasks is 3; 3 will compute all shards."]
    assert what_happens(less, known)["max_array_tasks"] == ""
    assert what_happens(submission(n_tasks=8), known)["max_array_tasks"] == "sbatch refuses it"


def test_a_partition_without_nodes_is_told():
    known = cluster_of()
    known.partitions = {**known.partitions, "empty": {**PARTITION, "PartitionName": "empty", "Default": "NO"}}
    known.nodes = {**known.nodes, "empty": []}
    both, alone = submission(partition="gpu,empty"), submission(partition="empty")
    assert empty_partitions(both, known) == ["empty"]
    assert not any("empty" in name for name in what_happens(both, known))
    assert what_happens(alone, known)["GPUs of a node of partition empty"] == "sbatch refuses it: it has no nodes"


def test_options_that_are_false_are_as_if_they_were_left_out():
    false = dict.fromkeys(("partition", "account", "qos", "time", "gres"), False)
    assert limits_of(submission(**false), cluster_of()) == limits_of(submission(), cluster_of())


@pytest.mark.parametrize(
    ("given", "partition", "config", "value"),
    [
        ({}, {}, {"DefMemPerCPU": "2000"}, ("DefMemPerCPU", "2,000 MB")),
        ({"cpus_per_task": 8}, {}, {"DefMemPerCPU": "2000"}, ("DefMemPerCPU", "16,000 MB")),
        ({"gpus": 2, "cpus_per_gpu": 4}, UNLIMITED, {"DefMemPerCPU": "2000"}, ("DefMemPerCPU", "16,000 MB")),
        ({"gpus": 2}, {"JobDefaults": "DefCpuPerGPU=3"}, {"DefMemPerCPU": "100"}, ("DefMemPerCPU", "600 MB")),
        ({}, {"DefMemPerCPU": "500"}, {"DefMemPerNode": "9000"}, ("DefMemPerCPU", "500 MB")),
        ({}, UNLIMITED, {"DefMemPerNode": "9000"}, ("DefMemPerNode", "9,000 MB")),
        ({"gpus": 2}, {"JobDefaults": "DefMemPerGPU=7"}, {"JobDefaults": "DefMemPerGPU=9"}, ("DefMemPerGPU", "14 MB")),
        ({"gpus": 0}, {"JobDefaults": "DefMemPerGPU=7"}, {"DefMemPerCPU": "2000"}, ("DefMemPerCPU", "2,000 MB")),
        ({"mem": "4G"}, {}, {"DefMemPerCPU": "2000"}, None),
    ],
)
def test_the_memory_of_tasks_that_ask_for_none_is_told(given, partition, config, value):
    known = cluster_of(partition=PARTITION | partition, SelectTypeParameters="CR_CORE_MEMORY", **config)
    found = {
        limit.limit: limit.value
        for limit in limits_of(submission(**given), known)[0]
        if "memory of a task" in limit.limit
    }
    assert found == ({} if value is None else {f"memory of a task in partition gpu ({value[0]})": value[1]})


THREADS = {"size": (64, 256_000, 2), "DefMemPerCPU": "100"}


@pytest.mark.parametrize(
    ("asked", "known", "value"),
    [
        (submission(), THREADS, "200 MB"),
        (submission(cpus_per_task=3), THREADS, "400 MB"),
        (submission(cpus_per_task=3, hint="nomultithread"), THREADS, "300 MB"),
        (submission(cpus_per_task=3), THREADS | {"SelectTypeParameters": "CR_CPU_MEMORY"}, "300 MB"),
        (replace(submission(), tasks_per_node=4), THREADS, "100 MB"),
        (replace(submission(gpus=4), nodes_per_task=2), {"JobDefaults": "DefMemPerGPU=7"}, "14 MB"),
        (replace(submission(gpus=4, cpus_per_gpu=2), nodes_per_task=2), {"DefMemPerCPU": "100"}, "400 MB"),
    ],
)
def test_the_memory_of_a_task_is_that_of_whole_cores_on_one_node(asked, known, value):
    """Slurm 22.05 was seen to give 1000 MB to a job of one CPU by DefMemPerCPU=500 and ThreadsPerCore=2."""
    found, _ = limits_of(asked, cluster_of(**{"SelectTypeParameters": "CR_CORE_MEMORY"} | known))
    assert [limit.value for limit in found if "memory of a task" in limit.limit] == [value]


CPUS, MEMORY = "CPUs of a node of partition gpu", "memory of a node of partition gpu"
NO_MEMORY = "sbatch refuses it: no node has so much"


@pytest.mark.parametrize(
    ("given", "shape", "expected"),
    [
        ({}, {}, {}),
        ({"mem": 0}, {}, {}),
        ({"mem": "100G"}, {}, {MEMORY: ("100,000 MB", "102,400 MB", NO_MEMORY)}),
        ({"mem": "100000"}, {}, {MEMORY: ("100,000 MB", "100,000 MB", "")}),
        ({"mem": "40000"}, {"tasks_per_node": 3}, {MEMORY: ("100,000 MB", "120,000 MB", NO_MEMORY)}),
        ({"mem_per_gpu": "30000", "gpus": 4}, {}, {MEMORY: ("100,000 MB", "120,000 MB", NO_MEMORY)}),
        ({"mem_per_gpu": "30000", "gpus": 4}, {"nodes_per_task": 2}, {MEMORY: ("100,000 MB", "60,000 MB", "")}),
        ({"mem_per_cpu": "100001"}, {}, {MEMORY: ("100,000 MB", "100,001 MB", NO_MEMORY)}),
        ({"cpus_per_task": 64}, {}, {CPUS: ("64", "64", "")}),
        ({"cpus_per_task": 65}, {}, {CPUS: ("64", "65", "sbatch refuses it: no node has 65")}),
        ({"cpus_per_task": 48, "gpus": 2}, {"nodes_per_task": 2}, {CPUS: ("64", "48", "")}),
        ({"cpus_per_gpu": 24, "gpus": 4}, {}, {CPUS: ("64", "96", "sbatch refuses it: no node has 96")}),
        ({"cpus_per_gpu": 24, "gpus": 4}, {"nodes_per_task": 2}, {CPUS: ("64", "48", "")}),
        ({"cpus_per_task": 8, "gpus": 8}, {}, {}),  # no node has the GPUs, which another line says
    ],
)
def test_cpus_and_memory_that_no_node_has_are_told(given, shape, expected):
    """The third node has more of both, and no GPU; the fourth has less."""
    known = cluster_of(size=(64, 100_000, 1))
    known.nodes["gpu"].append(Node({"a100": 4}, 32, 50_000))
    known.nodes["gpu"].append(Node({}, 128, 900_000))
    limits, _ = limits_of(replace(submission(**given), **shape), known)
    assert {
        each.limit: (each.value, each.asked, each.then) for each in limits if each.limit in (CPUS, MEMORY)
    } == expected
