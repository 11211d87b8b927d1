"""Memory limits and kills, from trees as the kernel writes them: cgroup v2, v1, and both."""

import pytest

from slurmgpu.util import cgroups

MB = 1 << 20
JOB = "system.slice/slurmstepd.scope/job_7"
STEP = f"{JOB}/step_0/user/task_0"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Makes the groups of a machine: `tree(own, {group: {file: text}})`, with the text of /proc/self/cgroup."""

    def make(own, groups):
        for group, files in groups.items():
            (tmp_path / "fs" / group).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (tmp_path / "fs" / group / name).write_text(text)
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(cgroups, "ROOT", tmp_path / "fs")
        monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")

    return make


def v2(limit="max", used=0, n_kills=0, high="max", **stat):
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{used}\n",
        "memory.stat": "".join(f"{name} {value}\n" for name, value in stat.items()),
        "memory.events": f"low 0\nhigh 3\nmax 9\noom 9\noom_kill {n_kills}\noom_group_kill 4\n",
    }


def v1(limit=0x7FFFFFFFFFFFF000, used=0, n_kills=0, **stat):
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": "".join(f"{name} {value}\n" for name, value in stat.items()),
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {n_kills}\n",
    }


def test_kills_count_up_to_the_tasks_group_and_not_those_of_the_jobs_other_tasks(tree):
    tree(f"0::/{STEP}\n", {STEP: v2(n_kills=1), JOB: v2(n_kills=2), "system.slice": v2(n_kills=100)})
    assert cgroups.oom_kills() == 1


def test_kills_count_up_to_the_jobs_group_where_its_tasks_have_none(tree):
    tree(f"0::/{STEP}\n", {f"{JOB}/step_0": v2(n_kills=1), JOB: v2(n_kills=2), "system.slice": v2(n_kills=100)})
    assert cgroups.oom_kills() == 3


def test_kills_count_in_a_container_that_sees_its_own_group_under_the_hosts_path(tree):
    tree("4:memory:/docker/abc\n1:cpu:/docker/abc\n0::/\n", {"memory": v1(n_kills=2)})
    assert cgroups.oom_kills() == 2
    tree("0::/../../kubepods/pod1\n", {"": v2(n_kills=5)})
    assert cgroups.oom_kills() == 5


def test_kills_outside_a_job_are_those_of_the_own_group_alone(tree):
    tree("0::/user.slice/user-7.slice/s.scope\n", {"user.slice/user-7.slice/s.scope": v2(n_kills=1)})
    tree("0::/user.slice/user-7.slice/s.scope\n", {"user.slice/user-7.slice": v2(n_kills=9)})
    assert cgroups.oom_kills() == 1


def test_the_memory_left_is_what_the_narrowest_group_allows_also_above_a_session(tree):
    tree("0::/user.slice/user-7.slice/s.scope\n", {"user.slice/user-7.slice/s.scope": v2(used=2 * MB)})
    tree("0::/user.slice/user-7.slice/s.scope\n", {"user.slice/user-7.slice": v2(limit=9 * MB, used=4 * MB)})
    assert cgroups.memory_left() == 5 * MB
    tree("0::/user.slice/user-7.slice/s.scope\n", {"user.slice": v2(high=3 * MB, used=MB)})
    assert cgroups.memory_left() == 2 * MB
    tree(f"4:memory:/slurm/uid_7/job_7\n0::/{STEP}\n", {"memory/slurm/uid_7/job_7": v1(8 * MB, 7 * MB)})
    assert cgroups.memory_left() == MB


def test_cached_files_are_memory_that_is_left_and_those_of_a_tmpfs_are_not(tree):
    # The files of a tmpfs are in `file` and among the anonymous pages: no file of a disk backs them.
    stat = {"file": 6 * MB, "shmem": 4 * MB, "active_file": MB, "inactive_file": MB, "inactive_anon": 4 * MB}
    tree(f"0::/{JOB}\n", {JOB: v2(limit=10 * MB, used=8 * MB, **stat)})
    assert cgroups.memory_left() == 4 * MB
    stat = {"total_cache": 6 * MB, "total_active_file": MB, "total_inactive_file": MB, "active_file": 0}
    tree("4:memory:/slurm/job_7\n", {"memory/slurm/job_7": v1(10 * MB, 8 * MB, **stat)})
    assert cgroups.memory_left() == 4 * MB


@pytest.mark.parametrize(
    ("own", "groups", "mb"),
    [
        (f"0::/{STEP}", {STEP: v2(), JOB: v2(limit=9 * MB), "system.slice": v2(limit=2 * MB)}, 9),
        (f"0::/{STEP}", {f"{JOB}/step_0": v2(limit=4 * MB), JOB: v2(limit=9 * MB)}, 4),
        (f"0::/{STEP}", {STEP: v2(), JOB: v2()}, None),
        ("4:memory:/slurm/uid_7/job_7/step_0", {"memory/slurm/uid_7/job_7": v1(8 * MB), "memory/slurm": v1()}, 8),
        ("4:memory:/slurm/uid_7/job_7/step_0", {"memory/slurm/uid_7/job_7": v1()}, None),
        ("0::/user.slice/user-7.slice", {"user.slice/user-7.slice": v2(limit=9 * MB)}, None),
    ],
)
def test_the_memory_of_a_job_is_the_narrowest_limit_up_to_its_group(tree, own, groups, mb):
    tree(f"{own}\n", groups)
    assert cgroups.memory_of_job() == (None if mb is None else mb * MB)
