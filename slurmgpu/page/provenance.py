"""The provenance section of the page: versions, GPUs, settings, submissions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slurmgpu.code.versions import RowsByCode, in_words
from slurmgpu.page.words import cut, moment, plain
from slurmgpu.report.report_file import Report
from slurmgpu.report.versions import versions_in_words
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import GIVEN_RUN_FILE, NO_RUN_FILE, Plan
from slurmgpu.run.private import public
from slurmgpu.run.submissions import JOB_KEYS
from slurmgpu.util.amounts import count_of
from slurmgpu.util.array_ids import task_of_attempt
from slurmgpu.util.redact import hidden

MOST_FILES = 5
"""How many files of an input are named."""
OF_PLANNING = ("planned",)
"""Settings that planning added, which say nothing to readers."""


def provenance_of(run: Run, report: Report) -> list[tuple[str, str]]:
    """The provenance of a run: names and texts."""
    plan, made_by = run.plan, report["provenance"]
    git, image = made_by.get("git"), report["image"]
    entries = [
        ("run directory", report["run_dir"]),
        ("run file", _run_file(made_by.get("run_file", "–"))),
        (
            "git commit",
            f"{git['commit']}{' and uncommitted changes' if git['dirty'] else ''}" if git else "no repository",
        ),
        ("workload", plan.workload),
        ("code", _code(report["code"])),
        ("image", f"{image['path']} (sha256 {image.get('sha256', '–')})" if image else "none"),
        ("planned with", ", ".join(f"{name} {version}" for name, version in (made_by.get("versions") or {}).items())),
        ("computed with", versions_in_words(report["computed_with"]) or "–"),
        ("input", f"{count_of(plan.n_items, 'item')}, digest {plan.input_digest}: {_files(plan)}"),
        ("shards", f"{plan.n_shards:,} of {count_of(plan.shard_items, 'item')}, in batches of {plan.batch_size:,}"),
        ("seed", str(plan.seed)),
        ("fingerprint", report["fingerprint"]),
        ("GPUs", gpus_of(report)),
        ("report written", moment(report["written"])),
    ]
    return [(name, plain(text)) for name, text in entries]


def _files(plan: Plan) -> str:
    """The paths of the input's files; of more than MOST_FILES the first and the last."""
    # A repacked file lies in the run directory; its source is what the run file names.
    paths = [each["path"] for each in plan.named_files]
    if len(paths) > MOST_FILES:
        paths = [paths[0], f"{len(paths) - 2:,} others", paths[-1]]
    return ", ".join(hidden(paths))


def _run_file(path: str) -> str:
    """The path of the run file, or what gave its tables instead."""
    folder, _, name = path.rpartition("/")
    given_by = {NO_RUN_FILE: "slurmgpu run", GIVEN_RUN_FILE: "Python"}
    return f"none: given by {given_by[name]} in {folder}" if name in given_by else path


def _code(versions: Sequence[RowsByCode]) -> str:
    """The number of rows by each version of the code, and the digests."""
    if not versions:
        return "no row"
    digests = ", ".join(str(version["digest"]) for version in versions if version["digest"])
    return in_words(versions) + (f" ({digests})" if digests else "")


def gpus_of(report: Report) -> str:
    """The number of GPUs that the largest submission had at once, and their models."""
    by_job: dict[str, dict[str, int]] = {}
    for attempt in report["attempts"]:
        job, _, task = task_of_attempt(str(attempt["attempt"])).rpartition("_")
        by_job.setdefault(job, {})[task] = attempt["n_gpus"] * attempt["n_nodes"]
    at_once = {
        str(line.get("array_job") or f"{line.get('executor')}{line.get('submission')}"): line.get("n_concurrent")
        for line in report["submissions"]
    }
    n_gpus = max((sum(sorted(tasks.values())[-(at_once.get(job) or 0) :]) for job, tasks in by_job.items()), default=0)
    if not n_gpus:
        return "none"
    names = {name for a in report["attempts"] for name in a["gpus"] or () if isinstance(name, str)}
    models = sorted(name for name in names if not name.isdecimal())
    if not models and all(line.get("device") == "cpu" for line in report["submissions"]):
        return f"{n_gpus:,} allocated, but none used: device cpu"
    return f"{n_gpus:,} × {models[0]}" if len(models) == 1 else f"{n_gpus:,}: {', '.join(models)}".rstrip(": ")


def settings_of(run: Run) -> str:
    """The workload's settings and the resources of the first submission, as JSON."""
    settings = {name: value for name, value in run.plan.settings.items() if name not in OF_PLANNING}
    value = {"settings": settings, "resources": run.plan.resources, "slurm": public({"slurm": run.plan.slurm})["slurm"]}
    value = hidden(value)
    value["slurm"] = {key: _option(key, each) for key, each in value["slurm"].items()}
    return cut(json.dumps(value, indent=2, ensure_ascii=False), 20_000)


def _option(key: str, value: Any) -> Any:
    """The value of an sbatch option, for `export` only the names of variables."""
    return ",".join(part.partition("=")[0] for part in value.split(",")) if key == "export" else value


def submissions_of(report: Report) -> list[list[str]]:
    """A row for each submission: number, time, executor, tasks, jobs, options."""
    rows = []
    for line in report["submissions"]:
        jobs = [f"{line[key]}" for key in JOB_KEYS if line.get(key)]
        options = " ".join(f"{key}={_option(key, value)}" for key, value in hidden(line.get("slurm") or {}).items())
        state = "cancelled" if line.get("cancelled") else ""
        row = [line.get("submission", ""), moment(line.get("time")), line.get("executor", ""), line.get("n_tasks", "")]
        rows.append([plain(cell) for cell in (*row, ", ".join(jobs) or "–", options or "–", state)])
    return rows
