"""What a colleague can do with another user's run: read it, change it where that was allowed, and run its code by wish.

Alice owns the run; bob is of her group; carol is of no group of hers. All three are real users, with real files.
"""

import contextlib
import grp
import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run import lock as locks
from slurmgpu.run import owners
from slurmgpu.run.directory import Run
from slurmgpu.util import pids, users
from tests.cluster.fixture import leave_out
from tests.support.access_lists import let_all_write_below
from tests.support.command_line import CommandLine
from tests.support.images import fork
from tests.support.nightly import by_night
from tests.support.runs import check_rows, make_project, planned_run, published, report, submissions
from tests.support.somebody import _python

ALICE, BOB, CAROL = (pwd.getpwnam(name) for name in ("games", "news", "bin"))
ROOT = pwd.getpwuid(0)
TEAM = grp.getgrnam("users").gr_gid
COMPUTE = ("--executor", "debug", "--device", "cpu")
LAYOUTS = {"read": (0o755, 0o022), "group": (0o2770, 0o002), "world": (0o1777, 0o000)}
"""The mode of the folder in which a run is made, and the umask of its owner."""


@dataclass(frozen=True)
class Colleagues:
    """What each of them can type, and folders of projects."""

    world: Path
    lines: dict[str, CommandLine]

    def slurmgpu(self, user, *argv, cwd="/", expect=0, umask=0o022, **env):
        """The command line as a user types it."""
        env = {"USER": user.pw_name, "LOGNAME": user.pw_name, **env}
        return self.lines[user.pw_name](*argv, cwd=cwd, expect=expect, umask=umask, **env)

    @staticmethod
    def identity(user):
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [TEAM] if user is not CAROL else []}

    def project(self, layout, n_items=24, lacking=True, **tables):
        """A project of alice's, with a run; of its rows a shard is missing if it is `lacking`, and it is not merged."""
        mode, umask = LAYOUTS[layout]
        top = Path(tempfile.mkdtemp(prefix="project-", dir=self.world))
        folder = make_project(top / "project", n_items, **tables)
        for path in (top, folder):
            os.chown(path, ALICE.pw_uid, TEAM)
            path.chmod(mode)
        for path in folder.rglob("*"):
            os.chown(path, ALICE.pw_uid, TEAM)
            path.chmod(0o644)
        self.slurmgpu(ALICE, "submit", *COMPUTE, cwd=folder, umask=umask, expect=0)
        if lacking:
            lack(folder, 1)
        return folder


def lack(folder, shard):
    """Take a shard away, and what was merged."""
    run = folder / "run"
    for path in (run / "shards" / f"{shard:05d}.h5", run / "merged.h5", run / "report.json"):
        path.unlink()


def open_to_the_group(folder):
    """What alice may do if her colleagues shall go on with her run."""
    run = folder / "run"
    for path in (run, *(run / name for name in ("claims", "shards", "tasks", "telemetry", "logs"))):
        os.chown(path, ALICE.pw_uid, TEAM)
        path.chmod(0o2770)
    for path in (run / "submissions.jsonl",):
        os.chown(path, ALICE.pw_uid, TEAM)
        path.chmod(0o664)


def as_user(user, work):
    """Do something in a process of another user's, started from this one; fails if it raises."""
    pids.own_id()  # what it imports cannot be read by others

    def do():
        os.setgroups([TEAM] if user is not CAROL else [])
        os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
        os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
        work()

    assert os.waitpid(fork(do), 0)[1] == 0


def content(folder):
    """Every file of a run, with what makes it what it is."""
    found = {path.relative_to(folder): path for path in sorted((folder / "run").rglob("*")) if not path.is_dir()}
    return {name: (path.lstat().st_uid, path.lstat().st_mode, path.read_bytes()) for name, path in found.items()}


@pytest.fixture(scope="module")
def colleagues():
    if os.geteuid() != 0:
        leave_out("only root can be somebody else")
    # Not below pytest's own folder, which other users may not enter.
    world = Path(tempfile.mkdtemp(prefix="slurmgpu-test-users-", dir="/tmp"))
    world.chmod(0o755)
    try:
        python, env = _python(world)
        (world / "home").mkdir(mode=0o755)
        env |= {"HOME": str(world / "home"), "XDG_CONFIG_HOME": str(world / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
        users = (ALICE, BOB, CAROL, ROOT)
        lines = {user.pw_name: CommandLine(python, env, **Colleagues.identity(user)) for user in users}
        yield Colleagues(world, lines)
        for line in lines.values():
            line.close()
    finally:
        shutil.rmtree(world)


# Who may only read


@pytest.mark.parametrize("layout", ["read", by_night("group"), by_night("world")])
def test_who_may_read_a_run_sees_all_of_it_and_changes_nothing(colleagues, layout):
    folder = colleagues.project(layout, lacking=False, settings={"faults": {"7": "exception"}})
    user = BOB if layout == "group" else CAROL
    before = content(folder)
    commands = (
        ("status", "run"),
        ("status", "run", "--json"),
        ("list", "."),
        ("report", "run", "--json"),
        ("logs", "run"),
        ("logs", "run", "--item", "7"),
        ("logs", "run", "--class", "item_error"),
        ("merge", "run", "--verify"),
        ("export", "run", "-o", "-", "--format", "csv"),
        ("export", "run", "-o", "-", "--format", "jsonl"),
    )
    told = [colleagues.slurmgpu(user, *command, cwd=folder) for command in commands]
    assert content(folder) == before
    assert len(told[-1].stdout.splitlines()) == 24


CHANGES = (
    ("merge", "run"),
    ("merge", "--wait", "--trust", "run"),
    ("resubmit", *COMPUTE, "run"),
    ("resubmit", "--failed", "--force", "--trust", *COMPUTE, "run"),
    ("task", "--trust", "--device", "cpu", "run"),
)
IN_A_JOB = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_END_TIME": "4e9"}


@pytest.mark.parametrize("layout", [by_night("read"), "group", "world"])
def test_who_may_not_change_a_run_is_told_so_before_anything_is_done(colleagues, layout):
    folder = colleagues.project(layout, lacking=True)
    (folder / "run" / "report.json").touch()  # root's: in a folder with the sticky bit nobody of them may replace it
    before = content(folder)
    for command in CHANGES:
        done = colleagues.slurmgpu(BOB, *command, cwd=folder, expect=2, **IN_A_JOB)
        assert f"{folder / 'run'} belongs to games, and you cannot " in done.stderr
        assert f"Have games do it, or do it in your own copy: cp -r {folder / 'run'} " in done.stderr
        assert done.stdout == ""
    assert content(folder) == before


def test_a_copy_is_ones_own_and_goes_on_from_where_the_run_stands(colleagues):
    folder = colleagues.project("read", lacking=True)
    copy = Path(tempfile.mkdtemp(prefix="copy-", dir=colleagues.world)) / "mine"
    os.chown(copy.parent, BOB.pw_uid, BOB.pw_gid)
    subprocess.run(["cp", "-r", folder / "run", copy], **colleagues.identity(BOB), check=True)
    before = content(folder)
    colleagues.slurmgpu(BOB, "resubmit", *COMPUTE, copy, expect=0)
    assert content(folder) == before
    assert json.loads((copy / "report.json").read_text())["complete"]


# Where the owner has opened it


def test_where_all_may_be_written_a_colleague_computes_and_merges(colleagues):
    folder = colleagues.project("group", lacking=True)
    open_to_the_group(folder)
    said = colleagues.slurmgpu(BOB, "resubmit", *COMPUTE, "run", cwd=folder, expect=2).stderr
    assert "would run, as you, what games wrote" in said
    assert published(folder) == ["00000.h5", "00002.h5"]
    colleagues.slurmgpu(BOB, "resubmit", "--trust", *COMPUTE, "run", cwd=folder, umask=0o002, expect=0)
    check_rows(folder, 24)
    assert (folder / "run" / "merged.h5").stat().st_uid == BOB.pw_uid
    assert submissions(folder)[-1]["uid"] == BOB.pw_uid
    # And the owner takes it up again: in her folder she can replace whatever others have put there.
    lack(folder, 0)
    said = colleagues.slurmgpu(ALICE, "resubmit", *COMPUTE, "run", cwd=folder, umask=0o002, expect=2).stderr
    assert f"chmod go-w {folder / 'run' / 'submissions.jsonl'}" in said
    colleagues.slurmgpu(ALICE, "resubmit", "--trust", *COMPUTE, "run", cwd=folder, umask=0o002, expect=0)
    check_rows(folder, 24)
    assert (folder / "run" / "merged.h5").stat().st_uid == ALICE.pw_uid


@pytest.mark.parametrize(("umask", "has_group"), [(0o077, True), (0o027, False)])
def test_who_would_hide_rows_from_the_owner_by_a_umask_is_told_so_before_anything_is_done(colleagues, umask, has_group):
    folder = colleagues.project("group", lacking=True)
    open_to_the_group(folder)
    if not has_group:
        for path in (folder / "run").rglob("*/"):
            os.chown(path, ALICE.pw_uid, TEAM)
            path.chmod(0o777)  # a file there has its maker's own group
    before = content(folder)
    for command in (("merge", "run"), ("resubmit", "--trust", *COMPUTE, "run"), ("task", "--trust", "run")):
        said = colleagues.slurmgpu(BOB, *command, cwd=folder, umask=umask, expect=2, **IN_A_JOB).stderr
        assert f"games could not read what you write there with the umask {umask:04o}; type `umask 0022` first" in said
    assert content(folder) == before
    colleagues.slurmgpu(BOB, "resubmit", "--trust", *COMPUTE, "run", cwd=folder, expect=0)
    lack(folder, 0)
    colleagues.slurmgpu(ALICE, "resubmit", "--trust", *COMPUTE, "run", cwd=folder, umask=0o077, expect=0)
    check_rows(folder, 24)


def test_whoever_could_read_what_was_merged_can_read_what_replaces_it(colleagues):
    folder = colleagues.project("read", lacking=True)
    colleagues.slurmgpu(ALICE, "merge", "run", cwd=folder, expect=3)
    replaced = [folder / "run" / name for name in ("merged.h5", "report.json")]
    before = [path.read_bytes() for path in replaced]
    colleagues.slurmgpu(ALICE, "resubmit", *COMPUTE, "run", cwd=folder, umask=0o077, expect=0)
    assert all(path.read_bytes() != content for path, content in zip(replaced, before, strict=True))
    assert [stat.S_IMODE(path.stat().st_mode) for path in replaced] == [0o644] * 2
    said = colleagues.slurmgpu(BOB, "show", "run", cwd=folder, expect=0).stdout
    assert len(said.splitlines()) == 11


def test_where_an_access_control_list_stands_for_the_umask_nobody_is_refused_for_one(colleagues):
    folder = colleagues.project("group", lacking=True)
    open_to_the_group(folder)
    let_all_write_below(folder / "run", *(path for path in (folder / "run").iterdir() if path.is_dir()))
    (folder / "run").chmod(0o2770)  # without the sticky bit, so that bob may replace what alice has merged
    colleagues.slurmgpu(BOB, "resubmit", "--trust", *COMPUTE, "run", cwd=folder, umask=0o077, expect=0)
    check_rows(folder, 24)
    made = [path for path in (folder / "run").rglob("*.h5") if path.stat().st_uid == BOB.pw_uid]
    assert made
    as_user(ALICE, lambda: [path.read_bytes() for path in made])


def test_an_access_control_list_lets_colleagues_neither_write_what_jobs_run_nor_read_what_may_hold_tokens(colleagues):
    top = Path(tempfile.mkdtemp(prefix="project-", dir=colleagues.world))
    folder = make_project(top / "project", 24)
    for path in (top, folder, *folder.iterdir()):
        os.chown(path, ALICE.pw_uid, TEAM)
        path.chmod(0o755 if path.is_dir() else 0o644)
    let_all_write_below(folder, user=BOB.pw_uid)
    colleagues.slurmgpu(ALICE, "submit", "--executor", "local", "--gpus", "0", cwd=folder, expect=0)
    run = folder / "run"
    pickles = list((run / "logs").glob("*.pkl"))
    executed = [run / "run.json", run / "submissions.jsonl", *pickles, *(run / "code").rglob("*.*")]
    assert len(pickles) == 2
    assert len(executed) == 6

    def open_them():
        assert list(run.glob("shards/*.h5"))
        for path in run.glob("shards/*.h5"):
            path.open("r+b").close()  # which the list does let him write
        for path in executed:
            with pytest.raises(PermissionError):
                path.open("r+b")
        for path in pickles:
            with pytest.raises(PermissionError):
                path.read_bytes()

    as_user(BOB, open_them)


def test_an_owner_who_is_refused_takes_no_permission_from_colleagues_who_are_at_work(colleagues):
    folder = colleagues.project("group", lacking=True)
    open_to_the_group(folder)
    before = content(folder)
    said = colleagues.slurmgpu(ALICE, "resubmit", "--trust", "--code", "abcdef", *COMPUTE, "run", cwd=folder, expect=2)
    assert "abcdef" in said.stderr
    assert content(folder) == before
    assert not stat.S_IMODE((folder / "run").stat().st_mode) & stat.S_ISVTX
    assert stat.S_IMODE((folder / "run" / "logs").stat().st_mode) == 0o2770


def test_a_task_by_hand_of_a_colleague_computes_where_all_may_be_written(colleagues):
    folder = colleagues.project("group", lacking=True)
    open_to_the_group(folder)
    task = ("task", "--device", "cpu", "run")
    said = colleagues.slurmgpu(BOB, *task, cwd=folder, expect=2, **IN_A_JOB).stderr
    assert "would run, as you, what games wrote" in said
    assert not list((folder / "run" / "tasks").glob("77_*"))
    colleagues.slurmgpu(BOB, *task, "--trust", cwd=folder, umask=0o002, expect=0, **IN_A_JOB)
    assert published(folder) == ["00000.h5", "00001.h5", "00002.h5"]
    assert (folder / "run" / "shards" / "00001.h5").stat().st_uid == BOB.pw_uid
    colleagues.slurmgpu(BOB, "merge", "--force", "run", cwd=folder, umask=0o002, expect=0)
    check_rows(folder, 24)


# Whose code is run

POISON = """
import os
from pathlib import Path
{mark}
from slurmgpu import Array


class Rows:
    columns = {{"double": Array("float32")}}
    batch_size = 4

    def load(self, task):
        pass

    def __call__(self, items):
        return [{{"double": 2.0 * item.index}} for item in items]

    def summarize(self, merged):
        return {{"by": os.getuid()}}

    @property
    def exports(self):
        return {{"mine": lambda merged, file: file.write(b"rows")}}
"""


def poisoned(colleagues, layout="group", **tables):
    """A complete run of alice's whose workload, snapshot and on_end leave marks that name who ran them."""
    marks = Path(tempfile.mkdtemp(prefix="marks-", dir=colleagues.world))
    marks.chmod(0o777)
    mark = f'Path("{marks}", "import" + str(os.getuid())).touch()'
    tables = {"on_end": f"touch {marks}/end$(id -u)", **tables}
    mode, umask = LAYOUTS[layout]
    top = Path(tempfile.mkdtemp(prefix="project-", dir=colleagues.world))
    folder = make_project(top / "project", 24, **tables)
    (folder / "workloads.py").write_text(POISON.format(mark=mark))
    for path in (top, folder, *folder.rglob("*")):
        os.chown(path, ALICE.pw_uid, TEAM)
        path.chmod(mode if path.is_dir() else 0o644)
    colleagues.slurmgpu(ALICE, "submit", *COMPUTE, cwd=folder, umask=umask, expect=0)
    assert {path.name for path in marks.iterdir()} == {f"import{ALICE.pw_uid}", f"end{ALICE.pw_uid}"}
    for path in marks.iterdir():
        path.unlink()
    return folder, marks


MINE = ("--format", "mine")


def ran(marks):
    return sorted(path.name for path in marks.iterdir())


@pytest.mark.parametrize("user", [BOB, by_night(ROOT)], ids=["colleague", "root"])
def test_to_look_at_a_run_imports_none_of_its_code(colleagues, user):
    folder, marks = poisoned(colleagues)
    page = Path(tempfile.mkdtemp(dir=colleagues.world))
    page.chmod(0o777)
    commands = (
        ("status", "run"),
        ("list", "."),
        ("report", "run"),
        ("logs", "run"),
        ("logs", "run", "--item", "3"),
        ("merge", "--verify", "run"),
        ("export", "run", "-o", "-", "--format", "csv"),
        ("export", "run", "-o", page / "rows.jsonl"),
        ("export", "run", "-o", page / "rows.mine", *MINE),
        ("cancel", "run"),
    )
    told = {command: colleagues.slurmgpu(user, *command, cwd=folder, expect=None).returncode for command in commands}
    assert [command for command, code in told.items() if code] == [("export", "run", "-o", page / "rows.mine", *MINE)]
    assert ran(marks) == []


def test_a_format_of_the_workloads_own_is_written_by_its_code_only_if_that_is_asked_for(colleagues):
    folder, marks = poisoned(colleagues)
    out = Path(tempfile.mkdtemp(dir=colleagues.world))
    out.chmod(0o777)
    export = ("export", "run", "-o", out / "rows.mine", *MINE)
    said = colleagues.slurmgpu(BOB, *export, cwd=folder, expect=2).stderr
    assert "would run, as you, what games wrote" in said
    assert "--trust" in said
    assert (ran(marks), list(out.iterdir())) == ([], [])
    colleagues.slurmgpu(BOB, *export, "--trust", cwd=folder, expect=0)
    assert ran(marks) == [f"import{BOB.pw_uid}"]
    assert [path.name for path in out.iterdir()] == ["rows.mine"]


@pytest.mark.parametrize("user", [by_night(BOB), ROOT], ids=["colleague", "root"])
def test_another_users_merge_runs_neither_summarize_nor_on_end(colleagues, user):
    folder, marks = poisoned(colleagues)
    open_to_the_group(folder)
    plan = json.loads((folder / "run" / "run.json").read_text())
    plan["on_end"] = f"touch {marks}/end$(id -u)"  # as it stood there before there was a private.json
    (folder / "run" / "run.json").write_text(json.dumps(plan))
    for path in (folder / "run").glob("*.h5"):
        path.unlink()
    lines = (folder / "run" / "submissions.jsonl").read_text().splitlines()
    (folder / "run" / "submissions.jsonl").write_text("".join(f"{line}\n" for line in lines if "ended" not in line))
    done = colleagues.slurmgpu(user, "merge", "--force", "run", cwd=folder, umask=0o002, expect=0)
    assert ran(marks) == []
    assert f"what games wrote. To allow it: slurmgpu merge --trust {folder / 'run'}" in done.stderr
    assert report(folder)["complete"]
    (folder / "run" / "submissions.jsonl").write_text("".join(f"{line}\n" for line in lines if "ended" not in line))
    colleagues.slurmgpu(user, "merge", "--force", "--trust", "run", cwd=folder, umask=0o002, expect=0)
    assert ran(marks) == [f"end{user.pw_uid}", f"import{user.pw_uid}"]
    assert report(folder)["summary"] == {"by": user.pw_uid}


def test_what_others_may_write_is_not_run_as_its_owner(colleagues):
    folder, marks = poisoned(colleagues)
    path = folder / "run" / "run.json"
    path.chmod(0o664)
    said = colleagues.slurmgpu(ALICE, "merge", "run", cwd=folder, expect=0).stderr
    assert f"chmod go-w {path}" in said
    (folder / "run" / "shards" / "00001.h5").unlink()
    (folder / "run" / "merged.h5").unlink()
    said = colleagues.slurmgpu(ALICE, "resubmit", *COMPUTE, "run", cwd=folder, expect=2).stderr
    assert f"others may write {path} (mode 0664)" in said
    assert ran(marks) == []
    path.chmod(0o644)
    colleagues.slurmgpu(ALICE, "resubmit", *COMPUTE, "run", cwd=folder, expect=0)
    assert f"import{ALICE.pw_uid}" in ran(marks)


def test_a_run_json_that_a_colleague_has_put_in_its_place_is_not_run_as_the_owner(colleagues):
    folder, marks = poisoned(colleagues)
    path = folder / "run" / "run.json"
    (folder / "run").chmod(0o2770)
    forged = {**json.loads(path.read_text()), "on_end": f"touch {marks}/forged"}
    path.unlink()
    path.write_text(json.dumps(forged))
    os.chown(path, BOB.pw_uid, BOB.pw_gid)
    (folder / "run" / "shards" / "00001.h5").unlink()
    (folder / "run" / "merged.h5").unlink()
    said = colleagues.slurmgpu(ALICE, "resubmit", *COMPUTE, "run", cwd=folder, expect=2).stderr
    assert "would run, as you, what news wrote" in said
    colleagues.slurmgpu(ALICE, "merge", "--force", "run", cwd=folder, expect=3)
    assert ran(marks) == []


def test_a_snapshot_that_others_may_write_is_not_imported(colleagues):
    folder, marks = poisoned(colleagues)
    [about] = (folder / "run" / "code").glob("*.json")
    about.chmod(0o664)
    (folder / "run" / "shards" / "00001.h5").unlink()
    (folder / "run" / "merged.h5").unlink()
    former = ("resubmit", "--code", "former", *COMPUTE, "run")
    said = colleagues.slurmgpu(ALICE, *former, cwd=folder, expect=2).stderr
    assert f"others may write {about} (mode 0664)" in said
    assert ran(marks) == []


# Locks, jobs, probes


def leave_lock(folder, user, pid):
    """The lock of a process of a user's that was killed."""

    def write():
        with locks.hold(folder / ".submitting", "merging", patient=True) as lock:
            os.link(folder / ".submitting", folder / ".kept")
            lock.content["pid"] = pid
        (folder / ".kept").write_bytes(locks._encode(lock.content))
        (folder / ".kept").rename(folder / ".submitting")

    as_user(user, write)


def dead_pid():
    pid = fork(lambda: None)
    os.waitpid(pid, 0)
    return pid


def test_the_lock_of_an_owner_that_was_killed_is_hers_to_remove_in_a_sticky_folder(colleagues):
    folder = Path(tempfile.mkdtemp(dir=colleagues.world))
    os.chown(folder, ALICE.pw_uid, TEAM)
    folder.chmod(0o3770)
    leave_lock(folder, ALICE, dead_pid())

    def take():
        with pytest.raises(SlurmGPUError) as raised, locks.run_lock(folder, "merging"):
            pass
        said = str(raised.value)
        assert f"{folder / '.submitting'} is the lock of a dead process (process " in said
        assert "Have games remove it" in said

    as_user(BOB, take)
    assert [path.name for path in folder.iterdir()] == [".submitting"]

    def take_own():
        with locks.run_lock(folder, "merging"):
            pass

    as_user(ALICE, take_own)
    leave_lock(folder, BOB, dead_pid())
    as_user(ALICE, take_own)  # the folder is hers
    folder.chmod(0o2770)
    leave_lock(folder, ALICE, dead_pid())
    as_user(BOB, take_own)
    assert list(folder.iterdir()) == []


def test_a_lock_that_was_renewed_as_a_colleague_took_it_away_is_its_holders_again(colleagues):
    folder = Path(tempfile.mkdtemp(dir=colleagues.world))
    os.chown(folder, ALICE.pw_uid, TEAM)
    folder.chmod(0o2770)
    path = folder / ".submitting"

    lock = locks.Lock(path, {"token": "t" * 32, "beat": 0, "doing": "merging", "user": "games", **pids.own_id()})
    as_user(ALICE, lambda: path.write_bytes(locks._encode(lock.content)))
    seen = dict(lock.content)
    lock.content["beat"] = 1
    as_user(ALICE, lambda: path.write_bytes(locks._encode(lock.content)))

    def take():
        assert not locks._take_away(path, seen)

    as_user(BOB, take)
    assert path.stat().st_uid == ALICE.pw_uid
    as_user(ALICE, lock.check)
    assert [each.name for each in folder.iterdir()] == [".submitting"]


def test_another_users_processes_are_his_to_cancel(colleagues):
    top = Path(tempfile.mkdtemp(dir=colleagues.world))
    top.chmod(0o755)
    run = planned_run(top / "run")
    process = subprocess.Popen(["sleep", "600"], **colleagues.identity(ALICE))
    try:
        line = {"submission": 1, "state": "running", "executor": "local", "uid": ALICE.pw_uid, "time": time.time()}
        line |= {"host": os.uname().nodename, **pids.numbering(), "pids": [os.getpid(), process.pid], "n_tasks": 1}
        run.record_submission(line)
        for path in (run.folder, *run.folder.rglob("*")):
            os.chown(path, ALICE.pw_uid, TEAM)
        said = colleagues.slurmgpu(BOB, "cancel", run.folder, expect=2).stderr
        assert f"have games type `slurmgpu cancel {run.folder}`" in said
        assert process.poll() is None
        colleagues.slurmgpu(ALICE, "cancel", run.folder, expect=0)
        assert process.wait(60) == -15
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("shown", ["nothing", "arguments", "output"])
def test_a_process_that_others_have_named_is_ended_only_if_it_shows_that_it_is_the_runs(colleagues, shown):
    top = Path(tempfile.mkdtemp(dir=colleagues.world))
    top.chmod(0o755)
    run = planned_run(top / "run")
    for path in (run.folder, *run.folder.rglob("*")):
        os.chown(path, BOB.pw_uid, TEAM)
    run.logs.chmod(0o777)
    argv = ["sh", "-c", "while :; do sleep 600; done", "sh"]
    argv += ["slurmgpu.executors.slot", str(run.logs)] if shown == "arguments" else []
    with open(run.logs / "a.out" if shown == "output" else os.devnull, "w") as out:
        process = subprocess.Popen(argv, stdout=out, start_new_session=True, **colleagues.identity(ALICE))
    try:
        line = {"submission": 1, "state": "running", "executor": "local", "uid": ALICE.pw_uid, "time": time.time()}
        line |= {"host": os.uname().nodename, **pids.numbering(), **pids.processes([os.getpid(), process.pid])}
        run.record_submission(line)
        os.chown(run.folder / "submissions.jsonl", BOB.pw_uid, TEAM)
        done = colleagues.slurmgpu(ALICE, "cancel", run.folder, expect=0)
        if shown == "nothing":
            assert "no task of this run is alive" in done.stdout
            assert f"process {process.pid} is not stopped: only files that others can write" in done.stderr
            assert process.poll() is None
        else:
            assert process.wait(60) == -15
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
            os.killpg(process.pid, 9)
        process.wait()


def test_a_colleagues_probe_is_not_removed(colleagues):
    folder = colleagues.project("world", lacking=False)
    probe = ("submit", *COMPUTE, "--run-dir", "new", "--probe", "4")
    colleagues.slurmgpu(ALICE, *probe, cwd=folder, umask=0)
    before = sorted((folder / "new-probe").rglob("*"))
    said = colleagues.slurmgpu(BOB, *probe, cwd=folder, expect=2).stderr
    assert f"{folder / 'new-probe'}, where the probe would go, belongs to games. Name another --run-dir." in said
    assert sorted((folder / "new-probe").rglob("*")) == before


def test_a_user_without_a_name_is_called_by_number(tmp_path):
    assert users.name_in_words(os.getuid()) == pwd.getpwuid(os.getuid()).pw_name
    assert users.name_in_words(987654) == "the user with the number 987654"
    run = planned_run(tmp_path / "run")
    if os.geteuid() == 0:
        os.chown(run.folder / "run.json", 987654, 987654)
        with pytest.raises(SlurmGPUError, match="would run, as you, what the user with the number 987654 wrote"):
            owners.refuse_foreign(Run.open(run.folder), "resubmit it")


def test_trust_is_of_one_run(tmp_path, monkeypatch):
    run = planned_run(tmp_path / "run")
    (run.folder / "run.json").chmod(0o666)
    monkeypatch.setenv(owners.ENVIRON, str(tmp_path / "other"))
    assert owners.why_foreign(Run.open(run.folder)) is not None
    (tmp_path / "link").symlink_to(run.folder)
    owners.trust(tmp_path / "link")
    assert owners.why_foreign(Run.open(run.folder)) is None
    assert stat.S_IMODE((run.folder / "run.json").stat().st_mode) == 0o666
