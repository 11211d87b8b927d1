"""`--dry-run` of `submit` and `resubmit`: the submission, the cluster's limits, and an upper bound of the cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from slurmgpu.cli.console import result, result_json, wide_console
from slurmgpu.cli.exit_codes import EXIT_BAD_USAGE, EXIT_COMPLETE
from slurmgpu.executors import resubmission
from slurmgpu.executors.interface import Preview
from slurmgpu.executors.registry import executor_named
from slurmgpu.inputs import sweeps
from slurmgpu.operations.resubmit import Resubmission
from slurmgpu.operations.submit import check_place, submission_of
from slurmgpu.plan.planner import Draft
from slurmgpu.plan.site_file import Origins
from slurmgpu.run.directory import Run
from slurmgpu.shards.column_types import type_of_column
from slurmgpu.shards.columns import columns_from_json
from slurmgpu.util.amounts import count_of, size_of, time_words
from slurmgpu.util.redact import HIDDEN, hidden, hide_in

if TYPE_CHECKING:
    from slurmgpu.slurm.facts import Trial

DIGESTS = ("planned", "model_files", "adapter_files")
"""Settings that planning writes and that say nothing to a reader."""
MAX_CONFIGURATIONS = 8
"""The most configurations of a sweep that are printed; the JSON has all."""
SECRETS = f"values that look like secrets are shown as {HIDDEN}; --json and the submission have them"


@dataclass(frozen=True)
class Shown:
    """A draft, what the cluster says of it, and the JSON of `submit --dry-run`."""

    draft: Draft
    seen: Preview
    value: Mapping[str, Any]

    @property
    def code(self) -> int:
        """2 if Slurm refuses the submission."""
        return _code_of(self.seen)

    @property
    def verdict(self) -> str:
        """The cluster's answer, in words."""
        return _verdict(self.seen, executor_named(self.seen.submission.executor).title)


def look_at_draft(draft: Draft, after: Sequence[Run], values: Origins, inject: Sequence[str]) -> Shown:
    """A draft with what the cluster says of it."""
    check_place(draft)
    submission = submission_of(draft, after, inject)
    seen = executor_named(submission.executor).preview(submission, draft.run_dir, draft.plan.container)
    seen.notes[:0] = [
        *draft.notes,
        *draft.code.left_out,
        *resubmission.fewer_tasks(submission, draft.plan, draft.n_missing),
    ]
    value = {
        "run_dir": str(draft.run_dir),
        "plan": draft.plan.to_json(),
        "configurations": draft.items.configurations,
        "submission": asdict(seen.submission),
        "origins": values,
        **_of_cluster(seen),
    }
    return Shown(draft, seen, value)


def show_draft(draft: Draft, after: Sequence[Run], values: Origins, *, as_json: bool, inject: Sequence[str]) -> int:
    """Print the submission and the origin of each value; the exit code: 2 if Slurm refuses it."""
    shown = look_at_draft(draft, after, values, inject)
    if as_json:
        result_json(shown.value)
    else:
        show(shown)
    return shown.code


def show(shown: Shown) -> None:
    """Print a draft."""
    _show_plan(shown)
    _show_origins(shown.value["origins"])
    show_scripts(shown.seen.scripts)
    _show_limits(shown.seen, shown.draft.plan.auto_resubmit)  # last, so that it is visible after a long script


def show_resubmission(run: Run, drafted: Resubmission, *, as_json: bool) -> int:
    """Print what `resubmit` would submit; the exit code: 2 if Slurm refuses it."""
    executor = executor_named(drafted.submission.executor)
    seen = executor.preview(drafted.submission, run.folder, drafted.submission.container)
    seen.notes[:0] = [*drafted.notes, *drafted.changed, *drafted.computed]
    n_items = sum(stop - start for start, stop in map(run.plan.bounds, drafted.missing))
    value = {
        "run_dir": str(run.folder),
        "n_missing_items": n_items,
        "n_items_again": drafted.again.n_items,
        "submission": asdict(seen.submission),
        **_of_cluster(seen),
    }
    if as_json:
        result_json(value)
    else:
        computes = []
        if n_items:
            computes.append(f"{count_of(n_items, 'missing item')} in {count_of(len(drafted.missing), 'shard')}")
        if again := drafted.again.shards:
            computes.append(f"{count_of(drafted.again.n_items, 'item')} again in {count_of(len(again), 'shard')}")
        secrets = [SECRETS] if HIDDEN in json.dumps(hidden(value), ensure_ascii=False) else []
        rows = (("run", str(run.folder)), ("computes", " and ".join(computes)), ("tasks", _tasks(value["submission"])))
        table = Table.grid(padding=(0, 2))
        for name, text in (*rows, *(("note", hide_in(note)) for note in (*seen.notes, *secrets))):
            table.add_row(name, escape(text))
        wide_console().print(table)
        show_scripts(seen.scripts)
        _show_limits(seen, run.plan.auto_resubmit)
    return _code_of(seen)


def _show_plan(shown: Shown) -> None:
    """Print the plan and the submission without secrets, and the notes on them."""
    seen, plan, submission = shown.seen, shown.value["plan"], shown.value["submission"]
    table = Table.grid(padding=(0, 2))
    table.add_row("run", escape(f"{shown.draft.run_dir} (not created)"))
    for number, line in enumerate(_items_of(shown.draft)):
        table.add_row("" if number else "input", escape(hide_in(line)))
    # Digests of files are long; `--json` shows them.
    settings = hidden({name: value for name, value in plan["settings"].items() if name not in DIGESTS})
    table.add_row("workload", escape(plan["workload"]))
    if settings:
        table.add_row("settings", escape(json.dumps(settings, ensure_ascii=False)))
    columns = columns_from_json(plan["columns"])
    types = (f"{name} {type_of_column(column) or column.kind}" for name, column in columns.items())
    table.add_row("columns", escape(", ".join(types)))
    of_items = count_of(plan["shard_items"], "item")
    parts = f", each in {plan['parts']} parts" if plan["parts"] > 1 else ""
    table.add_row("shards", f"{shown.draft.plan.n_shards:,} of {of_items}, in batches of {plan['batch_size']}{parts}")
    if plan["container"]:
        image = plan["container"]["identity"]
        table.add_row("image", escape(f"{plan['container']['image']} (sha256 {image['sha256'][:12]})"))
    table.add_row("tasks", _tasks(submission))
    if submission["inject"]:
        table.add_row("faults", f"{', '.join(submission['inject'])}: a rehearsal with injected faults")
    if plan["on_end"]:
        table.add_row("on_end", escape(hide_in(plan["on_end"])))
    for line in plan["placement"]:
        table.add_row("placement", escape(line))
    for note in (*seen.notes, *([SECRETS] if _has_secrets(plan, submission, seen.scripts) else ())):
        table.add_row("note", escape(note))
    wide_console().print(table)


def _show_origins(origins: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print every value that was set, by table of the run file, with its origin."""
    for name, values in origins.items():
        if not values:
            continue
        result(f"\n[{name}]")
        shown = {key: hidden(entry["value"], key) for key, entry in values.items()}
        texts = {key: f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in shown.items()}
        width = min(40, max(map(len, texts.values())))
        for key, entry in values.items():
            result(f"{texts[key]:<{width}}  # {entry['from']}")


def show_scripts(scripts: Mapping[str, str]) -> None:
    """Print the sbatch scripts of `submit --dry-run` without secrets."""
    for job, text in scripts.items():
        result(f"\n# ---- {job}.sbatch ----")
        sys.stdout.write(hide_in(text))


def _tasks(submission: Mapping[str, Any]) -> str:
    n, per_task = submission["n_tasks"], submission["gpus_per_task"]
    share = f"of {count_of(per_task, 'GPU')}" if per_task else "on CPUs"
    share += f", on {submission['nodes_per_task']} nodes" if submission["nodes_per_task"] > 1 else ""
    per_node = submission["tasks_per_node"]
    share += f", {per_node} on each node" if per_node > 1 else ""
    at_once = "" if submission["n_concurrent"] == n else f", {submission['n_concurrent']} at once"
    return f"{n} {share}{at_once}, executor {submission['executor']}, device {submission['device']}"


def _of_cluster(seen: Preview) -> dict[str, Any]:
    """What the cluster says of a submission, as in the JSON of a dry run."""
    return {
        "notes": seen.notes,
        "limits": [limit.to_json() for limit in seen.limits],
        "walltime_s": seen.walltime_s,
        "bound_gpu_hours": seen.bound_gpu_hours,
        "start_estimate": {job: trial.to_json() for job, trial in seen.trials.items()},
        "scripts": seen.scripts,
    }


def _code_of(seen: Preview) -> int:
    return EXIT_COMPLETE if all(trial.taken for trial in seen.trials.values()) else EXIT_BAD_USAGE


def _has_secrets(plan: Mapping[str, Any], asked: Mapping[str, Any], scripts: Mapping[str, str]) -> bool:
    told = [plan["settings"], plan["on_end"], plan["container"], asked["slurm"], scripts]
    return HIDDEN in json.dumps(hidden(told), ensure_ascii=False)


def _show_limits(seen: Preview, auto_resubmit: int) -> None:
    executor = executor_named(seen.submission.executor)
    if not executor.queues:
        return
    result("\n# ---- limits ----")
    table = Table.grid(padding=(0, 2))
    for limit in seen.limits:
        table.add_row(*map(escape, (limit.limit, limit.value, f"asked {limit.asked}", limit.then or "fits")))
    wide_console().print(table)
    result(bound_in_words(seen, auto_resubmit))
    for job, trial in seen.trials.items():
        result(f"{job}: {_in_words(trial)}")
    result(f"verdict: {_verdict(seen, executor.title)}")


def _verdict(seen: Preview, title: str) -> str:
    from slurmgpu.slurm.limits import CORRECT, CORRECT_MERGE, ELSEWHERE, ENDS, NEVER, PENDS, REFUSED

    if not seen.trials:
        return f"not known: {title} does not answer"
    if refused := [job for job, trial in seen.trials.items() if not trial.taken]:
        to_do = CORRECT_MERGE if refused == ["merge"] else CORRECT
        return f"Slurm refuses the {' and the '.join(refused)} job. {to_do}"
    above = [limit for limit in seen.limits if limit.then not in ("", ELSEWHERE)]
    for then, words in (
        (REFUSED, "sbatch will refuse it"),
        (NEVER, "Slurm takes it, but it pends for ever"),
        (ENDS, "Slurm takes it, but may end its tasks before they are done"),
        (PENDS, "Slurm takes it, but its last tasks may pend"),
        ("", "Slurm takes it, but runs fewer tasks at once than asked for"),
    ):
        if names := [limit.limit for limit in above if limit.then.startswith(then)]:
            return f"{words}, by {', '.join(names)}"
    return "Slurm takes it, and it is within all of these limits"


def bound_in_words(seen: Preview, auto_resubmit: int) -> str:
    """The most GPU-hours that a submission can use, with what they come from."""
    submission, hours = seen.submission, seen.bound_gpu_hours
    if submission.gpus_per_task == 0:
        return "at most: no GPU-hours; it runs on CPUs"
    if hours is None or seen.walltime_s is None:
        return "at most: not known, because the tasks have no walltime; set time under [slurm]"
    text = (
        f"at most: {hours:,.2f} GPU-hours = {count_of(submission.n_tasks, 'task')} × "
        f"{count_of(submission.gpus_per_task, 'GPU')} × "
        f"{time_words(seen.walltime_s)}"
    )
    if submission.n_concurrent < submission.n_tasks:
        text += f"; {hours * submission.n_concurrent / submission.n_tasks:,.2f} by the tasks that run at once"
    if submission.shares_gpus:
        text += "; tasks share GPUs, and each counts as if it had one of its own"
    return text + (f"; as much again by each of {auto_resubmit} automatic resubmissions" if auto_resubmit else "")


def _in_words(trial: Trial) -> str:
    if trial.start is not None:
        when = f"{trial.start:%Y-%m-%d %H:%M:%S} {trial.start.tzname()}"
        return f"would start at {when}, by the present queue; this ignores the limits"
    if not trial.taken:
        return f"refused: {trial.said}"
    return trial.said if "to start at" not in trial.said else "would start after the array"


def _items_of(draft: Draft) -> list[str]:
    """Lines about the input: its files, or a description of other items; the first configurations of a sweep."""
    lines = [draft.items.said] if draft.items.said else []
    if configurations := draft.items.configurations or ():
        first = enumerate(configurations[:MAX_CONFIGURATIONS])
        lines += [f"{number}: {sweeps.describe(each)}" for number, each in first]
        if (n_more := len(configurations) - MAX_CONFIGURATIONS) > 0:
            lines.append(f"… and {n_more:,} more; --json shows all")
    files = draft.items.spec.files
    size = size_of(sum(max(0, file.size_bytes) for file in files))
    return lines or [f"{count_of(draft.plan.n_items, 'item')} in {count_of(len(files), 'file')}, {size}"]
