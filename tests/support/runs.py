"""Helpers with which tests start runs, and read run directories and merged files."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import h5py

import slurmgpu
from slurmgpu.run.claims import Claims
from slurmgpu.run.creation import create_run
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.slurm import queue
from slurmgpu.util.pids import DEAD, look
from tests.support import command_line


def make_project(folder, n_items=100, workload="Rows", items=None, batch_size=4, held_from=None, **tables):
    """A folder with an input, a run file and the tests' workloads; items wait from `held_from` on (see `let_go`)."""
    folder.mkdir(exist_ok=True)
    if held_from is not None:
        (folder / "held").touch()
        tables["settings"] = {**tables.get("settings", {}), "held": str(folder / "held"), "held_from": held_from}
    lines = items if items is not None else [{"text": f"item {i} of many", "x": i} for i in range(n_items)]
    (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "workloads.py").write_text((Path(__file__).parent / "sample_workloads.py").read_text())
    # Pages have their own tests; drawing one takes longer than most of these runs.
    top = {"input": "items.jsonl", "shard_items": 8, "run_dir": "run", "lease_s": 4.0, "margin_s": 1.0, "html": False}
    top |= {key: tables.pop(key) for key in list(tables) if not isinstance(tables[key], dict)}
    tables = {"workload": {"use": f"workloads.py:{workload}", "batch_size": batch_size}, **tables}
    text = _toml(top) + "".join(f"\n[{name}]\n{_toml(table)}" for name, table in tables.items())
    (folder / "slurmgpu.toml").write_text(text)
    return folder


def _toml(table):
    return "".join(f"{key} = {toml(value)}\n" for key, value in table.items())


def let_go(folder):
    """Release the held items of a project, which let a test look at a running run."""
    (folder / "held").unlink()


def holders(folder):
    """The records of the tasks that hold shards which are not published yet."""
    run = Path(folder) / "run"
    if not run.exists():
        return []
    claimed = {int(path.name) for path in (run / "claims").iterdir() if path.name.isdigit()}
    claims = [Claims(run / "claims").read(shard) for shard in claimed - {int(name[:5]) for name in published(folder)}]
    held = {claim.attempt for claim in claims if claim}
    return [r for r in records(folder) if r["state"] == "running" and r["attempt"] in held]


def toml(value):
    """A value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value)  # JSON's scalars are TOML's


def start(*argv, cwd, stdin=None, **env):
    """The command line in the background, in a process group of its own; `stdin` is there to be written."""
    return command_line.shared().start(*argv, cwd=cwd, stdin=stdin, **env)


def report(folder):
    return json.loads((Path(folder) / "run" / "report.json").read_text())


def records(folder):
    return [json.loads(path.read_text()) for path in sorted((Path(folder) / "run" / "tasks").glob("[!.]*.json"))]


def published(folder):
    return sorted(path.name for path in (Path(folder) / "run" / "shards").glob("*.h5"))


def datasets(folder):
    """The bytes of every dataset of the merged file."""
    found = {}
    with h5py.File(Path(folder) / "run" / "merged.h5", "r") as file:
        file.visititems(
            lambda name, node: found.__setitem__(name, node[()].tobytes()) if isinstance(node, h5py.Dataset) else None
        )
    return found


def check_rows(folder, n_items, errors=()):
    """Every item has its row, in order, with the right values; the failed ones are exactly `errors`."""
    with slurmgpu.open(Path(folder) / "run" / "merged.h5") as merged:
        assert merged.index[:].tolist() == list(range(n_items))
        assert sorted(merged.errors) == sorted(errors)
        double, shout = merged["double"][:], merged["shout"][:]
        for index in range(n_items):
            if index not in errors:
                assert double[index] == 2.0 * index
                assert shout[index] == f"ITEM {index} OF MANY"


def check_ledger(outcome):
    """The seconds of each attempt in a report add up to its total, and so do the run's hours: its ledger."""
    for attempt in outcome["attempts"]:
        assert round(sum(attempt["spent"].values()), 3) == attempt["seconds"]
        assert min(attempt["spent"].values()) >= 0
    ledger = outcome["ledger"]
    parts = sum(ledger[kind] for kind in ("useful", "loading", "overhead", "idle", "lost", "repeated"))
    assert abs(parts - ledger["allocated"]) < 1e-9
    task_hours = sum(a["seconds"] for a in outcome["attempts"]) / 3600
    hours = outcome["gpu_hours"] if ledger["unit"] == "GPU-hours" else task_hours
    assert abs(ledger["allocated"] - hours) < 1e-4
    return ledger


def wait_until(condition, what, timeout_s=250):
    deadline = time.monotonic() + timeout_s
    while begun := time.monotonic():
        if condition():
            return
        assert begun < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(max(0.05, 3 * (time.monotonic() - begun)))  # a look may be a command


def wait_until_held(folder, n_shards, n_tasks=1):
    """Wait until so many shards are published, and so many tasks hold another one each."""

    def are_held():
        return len(published(folder)) == n_shards and len(holders(folder)) == n_tasks

    wait_until(are_held, f"{n_tasks} tasks to hold shards behind {n_shards}")


def make_plan(**values):
    """A plan without a workload, of one shard of 40 items, or as its `values` say."""
    texts = dict.fromkeys(("input_digest", "workload", "search_path"), "")
    tables = {name: {} for name in ("settings", "columns", "resources", "slurm", "merge")}
    tables["provenance"] = {"run_file": ""}
    n_items = values.get("n_items", 40)
    tables["input"] = {"format": "jsonl", "files": [], "n_items": n_items, "stride": 1, "columns": None}
    tables["input"] |= {"ranges": None, "folders": [], "repacked": False}
    items = {"n_items": 40, "batch_size": 4, "shard_items": 40, "seed": 0}
    times = {"lease_s": 120.0, "margin_s": 0.0, "auto_resubmit": 0}
    return Plan(**{"name": "run", **texts, **tables, **items, **times, **values})


def planned_run(folder, **values):
    """A run with such a plan."""
    return create_run(folder, make_plan(**values), ())


def copy_run(folder, copy):
    """A copy of a run directory that can replace the run: it counts the original's submissions as its own."""
    shutil.copytree(folder, copy)
    path = copy / "submissions.jsonl"
    path.write_text(re.sub(r', "folder": "[^"]*", "inode": \d+', "", path.read_text()))


def shard_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in (Path(folder) / "run" / "shards").glob("*.h5")}


def has_ended(pid):
    """Whether a process has ended; its parent may not have waited for it."""
    seen = look(int(pid))
    return seen is None or seen[0] in DEAD


def workers(folder, module="slurmgpu.worker.main"):
    """The living worker processes of the runs in a folder, with their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if re.match(r"rank \d", name := (path / "comm").read_text()):  # a fork of its launcher
                line = line.replace("slurmgpu.worker.group_launcher", "slurmgpu.worker.main")
            elif name == "slurmgpu worker\n":  # a fork of its task: its arguments are a slot's, its log is its own
                log = (path / "fd" / "2").readlink()
                line = f'slurmgpu.worker.main {log.parents[1]} {{"attempt": "{log.stem}"}}'
        except OSError:
            continue
        if module in line and str(folder) in line:
            found.append((int(path.name), line))
    return found


def kill_workers(folder):
    """SIGKILL the workers of a run; return how many there were."""
    mine = workers(folder)
    for pid, _ in mine:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(mine)


def submissions(folder):
    """One record per submission, merged from the lines of submissions.jsonl as a user would."""
    merged = {}
    for line in (folder / "run" / "submissions.jsonl").read_text().splitlines():
        value = json.loads(line)
        merged.setdefault(value["submission"], {}).update(value)
    return [merged[number] for number in sorted(merged)]


def queued_of(ids):
    """What squeue shows of these jobs, plain ones or arrays."""
    return [job for job in queue.own_jobs() if job.array_job in ids]


def wait_for_end(folder):
    """Wait until the last submission is merged, and Slurm has none of the jobs."""
    wait_until(lambda: submissions(folder)[-1]["state"] == "ended", "the merge")
    ids = [i for line in submissions(folder) for i in (line.get("array_job"), line.get("merge_job")) if i]
    wait_until(lambda: not queued_of(ids), "the end of the merge job")
