"""Submit what a run lacks, or what failed in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmgpu.code import former, snapshots
from slurmgpu.code import functions as code_functions
from slurmgpu.code.functions import Packed
from slurmgpu.containers.runtime import runtime_named
from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import NothingToSubmitError, SlurmGPUError
from slurmgpu.executors import live_tasks, resubmission
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.submission import Outcome, start
from slurmgpu.inputs import InputSpec, check_input
from slurmgpu.merge.failed_items import failed_again, forget_deaths
from slurmgpu.plan.checked_workload import refuse_other_columns
from slurmgpu.plan.container_spec import contain_again
from slurmgpu.plan.written_keys import edited_notes
from slurmgpu.report.completeness import is_complete
from slurmgpu.run import mapped_function, owners
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import Lock
from slurmgpu.run.recompute import Recompute, recompute_path, write_recompute
from slurmgpu.run.submissions import Pickled, Submission
from slurmgpu.shards.merged_head import read_merged_head
from slurmgpu.util.amounts import count_of
from slurmgpu.util.shared_files import exists, remove


@dataclass(frozen=True)
class Request:
    """What to resubmit: by default the missing items, with the resources of the last submission.

    `resources` are keys of [resources]; `slurm` and `merge` are sbatch options of the array job and the merge job. All
    override those of the last submission. The rest is as in `RunHandle.resubmit`; `functions` replace those of a mapped
    run.
    """

    resources: Mapping[str, Any] = field(default_factory=dict)
    slurm: Mapping[str, Any] = field(default_factory=dict)
    merge: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    code: str | None = None
    other_code: bool = False
    functions: Packed | None = None


def resubmit(
    run: Run,
    asked: Request,
    on_tick: Callable[[Run], None] = lambda run: None,
    *,
    force: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Submit the missing items as `RunHandle.resubmit` does.

    `tell` gets the notes before anything starts: changes in the code, adjustments, and what is recomputed. Without it
    the outcome has them.
    """
    drafts: list[Resubmission] = []

    def prepare(lock: Lock) -> tuple[Submission, list[str]]:
        live_tasks.refuse_alive(run, "resubmit", force=force)
        live_tasks.forget_dead_tasks(run)  # otherwise the merge at the end would watch them again
        drafted = _draft(run, asked)
        drafts.append(drafted)
        run.claims.clear(lock.check)
        lock.check()
        remove(recompute_path(run.folder))  # left by a failed submission of the same number
        if drafted.again.shards:
            write_recompute(run.folder, drafted.again)
            forget_deaths(run, list(drafted.again.shards))
        return drafted.submission, [*drafted.changed, *drafted.notes, *drafted.computed]

    outcome = start(run, prepare, lambda: on_tick(run), tell=tell)
    if awaited := drafts[-1].awaited:
        executor_named(drafts[-1].submission.executor).wait_for(run, awaited)
    return outcome


@dataclass(frozen=True)
class Resubmission:
    """A submission that is not made yet, and sentences about it.

    `missing` are shards without rows; `again` are shards with items to recompute. `notes` are about adjustments,
    `changed` about the code, `computed` about what is recomputed. `awaited` are runs whose merged files are the input,
    and which are not complete yet.
    """

    submission: Submission
    missing: Sequence[int]
    again: Recompute
    notes: Sequence[str]
    changed: Sequence[str]
    computed: Sequence[str]
    awaited: Sequence[Run] = ()


def foresee(run: Run, asked: Request, *, force: bool) -> Resubmission:
    """What `resubmit` would submit. Writes nothing, and raises the same errors."""
    live_tasks.refuse_alive(run, "resubmit", force=force)
    return _draft(run, asked, writes=False)


def _draft(run: Run, asked: Request, *, writes: bool = True) -> Resubmission:
    number = max((line["submission"] for line in run.submissions()), default=0) + 1
    again = failed_again(run, number) if asked.failed else Recompute(number, {})
    missing = sorted(set(range(run.plan.n_shards)) - run.published(fresh=True))
    if not missing and not again.shards and not asked.other_code:
        raise _nothing_to_compute(run)
    if asked.code:
        taken, changed = former.former_code(run, asked.code)
    else:
        taken, changed = former.code_now(run, run.plan.container, asked.functions, writes=writes)
        planned = snapshots.code_digest(run.submissions()[:1])
        if planned not in (None, taken["digest"]) and owners.why_foreign(run) is None:
            refuse_other_columns(run.plan)
    if asked.other_code:
        again = former.with_rows_of_others(run, again, taken["digest"])
        if not missing and not again.shards:
            raise NothingToSubmitError(f"{run.folder} has every shard, and the current code computed all rows.")
    _check_functions(run, taken.get("functions", {}), asked.functions)
    spec = InputSpec.from_json(run.input)
    awaited = _awaited(spec)
    check_input(spec, run.index)
    submission, notes = resubmission.next_submission(
        run, asked.resources, asked.slurm, asked.merge, n_again=len(again.shards)
    )
    notes += edited_notes(run.plan)
    if container := submission.container or run.plan.container:
        container, changes = contain_again(
            container, Path(run.plan.provenance["run_file"]), run.plan.provenance.get("container", {})
        )
        check_image(container)
        submission = replace(submission, container=container)
        notes += changes
    else:  # an image's own Python is compared by the tasks
        _refuse_other_python(run, taken.get("functions", {}))
    executor = executor_named(submission.executor)
    jobs = dict.fromkeys(job for other in awaited for job in executor.jobs_completing(other))
    submission = replace(submission, after=(*jobs,))
    executor.check(submission, container)
    computed = []
    if again.shards:
        what = count_of(again.n_items, "item" if asked.other_code else "failed item")
        verb, where = "is" if again.n_items == 1 else "are", count_of(len(again.shards), "shard")
        computed.append(f"{what} {verb} recomputed, in {where}; all other rows stay as they are.")
    if asked.failed and asked.functions is None and (name := mapped_function.function_by_value(run)) is not None:
        computed.append(
            f"They are computed with the function that is stored in the run. To use an edited one, resubmit in Python: "
            f"{mapped_function.with_another_function(run, name)}"
        )
    return Resubmission(replace(submission, code=taken), missing, again, notes, changed, computed, awaited)


def _awaited(spec: InputSpec) -> list[Run]:
    """The incomplete runs whose merged files are the input; SlurmGPUError if none will be the planned one."""
    runs = []
    for file in spec.promised:
        merged = Path(file.path)
        if exists(merged) and not exists(merged.parent / "run.json"):
            continue  # it was kept without its run; tasks compare it with the plan
        other = Run.open(merged.parent)
        if other.plan.fingerprint != file.sha256:
            raise SlurmGPUError(
                f"The input was to be the merged file of a run of plan {file.sha256}, but {other.folder} has plan "
                f"{other.plan.fingerprint}. Restore that run, or submit this one again with another --run-dir."
            )
        if not is_complete(other):
            runs.append(other)
    return runs


def _refuse_other_python(run: Run, given: Mapping[str, Pickled]) -> None:
    """SlurmGPUError if tasks, which run in this Python, cannot read a function that is stored in the run.

    `given` are the functions that replace the planned ones, by role.
    """
    pickled = _pickled(run, given)
    for role, each in pickled.items():
        if each["python"] != (here := code_functions.minor_version()):
            raise SlurmGPUError(
                f"`{role}` of {run.folder} is stored as Python {each['python']} pickled it, and this is Python {here}, "
                f"which cannot read it. Resubmit from Python {each['python']}, or hand it over again, in Python: "
                f"slurmgpu.open_run({str(run.folder)!r}).resubmit({', '.join(f'{name}={name}' for name in pickled)})"
            )


def _check_functions(run: Run, given: Mapping[str, Pickled], new: Packed | None) -> None:
    """SlurmGPUError if a function that the run stores is not as it was submitted; `new` ones need not be there yet."""
    for role, each in _pickled(run, given).items():
        if new is None or role not in new.roles:
            code_functions.read_pickle(
                code_functions.path_of(run.folder, each) if role in given else run.folder / code_functions.PICKLE, each
            )


def _pickled(run: Run, given: Mapping[str, Pickled]) -> dict[str, Pickled]:
    """The functions by value of a mapped run, by role; `given` are those that replace the planned ones."""
    settings = run.plan.settings
    if run.plan.workload != mapped_function.MAPPED:
        return {}
    planned = settings.get("pickled")
    roles = [role for role in ("function", "load") if settings.get(role) or role in given]
    return {role: each for role in roles if (each := given.get(role, planned)) is not None}


def packed(
    run: Run, function: Callable[..., Any] | None, load: Callable[..., Any] | None, code: str | None
) -> Packed | None:
    """The pickle of the functions to compute a mapped run with; None if none is given."""
    given = {role: each for role, each in (("function", function), ("load", load)) if each is not None}
    if not given:
        return None
    plan = run.plan
    if plan.workload != mapped_function.MAPPED:
        raise SlurmGPUError(
            f"function= and load= are for runs of slurmgpu.map; {run.folder} computes {plan.workload}, and takes its "
            f"current code. Leave them out."
        )
    if code is not None:
        raise SlurmGPUError(
            f"code={code!r} includes the functions of that code: leave out either code=, or function= and load=."
        )
    loads = load is not None or plan.settings.get("load") is not None
    code_functions.check(function, load, loads=loads)
    return code_functions.pack(given, Path(plan.search_path), plan.settings.get("argv"))


def check_image(container: Mapping[str, Any]) -> None:
    """Raise SlurmGPUError if the image is not the one that the run was planned with."""
    try:
        runtime_named(container["runtime"]).same_image(Path(container["image"]), container["identity"])
    except ContainerError as error:
        text = str(error)
        raise SlurmGPUError(f"{text[:1].upper()}{text[1:].rstrip('.')}.") from error


def _nothing_to_compute(run: Run) -> SlurmGPUError:
    if not is_complete(run):
        return SlurmGPUError(
            f"{run.folder} has every shard, but merged.h5 lacks some of their rows. "
            f"`slurmgpu merge {run.typed}` merges them."
        )
    if run.plan.look:
        more = "The run has only some items of its input; for all of them submit again without --limit and --items"
    else:
        more = f"If items were added to its input, compute them in another run: submit again with --extend {run.typed}"
    head = read_merged_head(run.merged)  # is_complete has found it intact
    if head is not None and head.n_errors:
        again = f"`slurmgpu resubmit --failed {run.typed}` recomputes {count_of(head.n_errors, 'failed item')}."
        said = f"{run.folder} has every shard: there is nothing to compute. {again}"
    else:
        said = f"{run.folder} has every shard, and no item failed: there is nothing to compute."
    return NothingToSubmitError(f"{said} {more}, with another --run-dir.")
