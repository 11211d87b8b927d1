"""Submits what a run lacks, or what failed in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurmgpu.code import former
from slurmgpu.code import functions as code_functions
from slurmgpu.code.functions import Packed
from slurmgpu.containers.registry import runtime_named
from slurmgpu.containers.settings import ContainerError
from slurmgpu.errors import NothingToSubmitError, SlurmGPUError
from slurmgpu.executors import liveness, resubmission
from slurmgpu.executors.registry import executor_named
from slurmgpu.executors.submission import Outcome, start
from slurmgpu.merge import merge
from slurmgpu.plan.container_spec import contain_again
from slurmgpu.report.build import is_complete
from slurmgpu.run.directory import Run
from slurmgpu.run.lock import Lock
from slurmgpu.run.recompute import Recompute, recompute_path, write_recompute
from slurmgpu.run.submissions import Submission
from slurmgpu.util.amounts import count_of
from slurmgpu.util.shared_files import remove


def resubmit(
    run: Run,
    resources: Mapping[str, Any] | None = None,
    slurm: Mapping[str, Any] | None = None,
    on_tick: Callable[[Run], None] = lambda run: None,
    *,
    failed: bool = False,
    merging: Mapping[str, Any] | None = None,
    force: bool = False,
    code: str | None = None,
    other_code: bool = False,
    functions: Packed | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Submit the missing items as `RunHandle.resubmit` does; the outcome's notes say what was adjusted.

    `slurm` and `merging` are sbatch options of the array job and the merge job; they override those of the last
    submission. Changes in the code are notes, too; if `tell` is given, it gets them before anything starts.
    `functions` take the place of those of a mapped run.
    """

    def prepare(lock: Lock) -> tuple[Submission, list[str]]:
        liveness.refuse_alive(run, "resubmit", force=force)
        liveness.forget_dead_tasks(run)  # whose silence the merge at the end would wait for once more
        number = max((line["submission"] for line in run.submissions()), default=0) + 1
        again = merge.failed_again(run, number) if failed else Recompute(number, {})
        n_missing = run.plan.n_shards - len(run.published(fresh=True))
        if not n_missing and not again.shards and not other_code:
            raise _nothing_to_compute(run, failed)
        if code:
            taken, changed = former.former_code(run, code)
        else:
            taken, changed = former.code_now(run, run.plan.container, functions)
        if other_code:
            again = former.with_rows_of_others(run, again, taken["digest"])
            if not n_missing and not again.shards:
                raise NothingToSubmitError(f"{run.folder} has every shard, and this code computed all rows.")
        submission, notes = resubmission.next_submission(run, resources, slurm, merging, n_again=len(again.shards))
        if container := submission.container or run.plan.container:
            container, changes = contain_again(
                container, Path(run.plan.provenance["run_file"]), run.plan.provenance["container"]
            )
            check_image(container)
            submission = replace(submission, container=container)
            notes += changes
        executor_named(submission.executor).check(submission, container)
        submission = replace(submission, code=taken)
        if tell is None:
            notes += changed
        else:
            for note in changed:
                tell(note)
        run.claims.clear(lock.check)
        lock.check()
        remove(recompute_path(run.folder))  # left by a failed submission of the same number
        if again.shards:
            write_recompute(run.folder, again)
            merge.forget_deaths(run, list(again.shards))
            what = count_of(again.n_items, "item" if other_code else "failed item")
            verb, where = "is" if again.n_items == 1 else "are", count_of(len(again.shards), "shard")
            notes.append(f"{what} {verb} computed again, in {where}; all other rows stay as they are.")
        if failed and functions is None and (name := code_functions.function_by_value(run)) is not None:
            notes.append(
                f"They are computed with the function that the run keeps; an edited one takes Python: "
                f"{code_functions.with_another_function(run, name)}"
            )
        return submission, notes

    return start(run, prepare, lambda: on_tick(run))


def packed(
    run: Run, function: Callable[..., Any] | None, load: Callable[..., Any] | None, code: str | None
) -> Packed | None:
    """The pickle of functions that a mapped run is to be computed with; None if none is given."""
    given = {role: each for role, each in (("function", function), ("load", load)) if each is not None}
    if not given:
        return None
    plan = run.plan
    if plan.workload != code_functions.MAPPED:
        raise SlurmGPUError(
            f"function= and load= are for runs of slurmgpu.map; {run.folder} computes {plan.workload}, whose code "
            f"is taken as it is now."
        )
    if code is not None:
        raise SlurmGPUError(
            f"code={code!r} has the functions of that code: leave out either it, or function= and load=."
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


def _nothing_to_compute(run: Run, failed: bool) -> SlurmGPUError:
    if not is_complete(run):
        return SlurmGPUError(
            f"{run.folder} has every shard, but merged.h5 lacks some of their rows. "
            f"`slurmgpu merge {run.typed}` merges them."
        )
    if failed:
        return NothingToSubmitError(f"{run.folder} has every shard, and no item failed: there is nothing to compute.")
    if run.plan.look:
        more = "it has some items of its input: for all of them submit again without --limit and --items"
    else:
        more = f"items that were added to its input take another run: submit again by --extend {run.typed}"
    return NothingToSubmitError(
        f"{run.folder} has every shard: there is nothing to compute. "
        f"`slurmgpu resubmit --failed {run.typed}` computes its failed items again; {more}, with another --run-dir."
    )
