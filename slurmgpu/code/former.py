"""The code of a resubmission: the user's modules as they are now, or a former snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurmgpu.code import functions, snapshots
from slurmgpu.code.capture import git_state, snapshot_of
from slurmgpu.code.functions import Packed
from slurmgpu.code.namesakes import refuse_other_modules
from slurmgpu.code.snapshots import Snapshot
from slurmgpu.code.versions import stretches_of
from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.directory import Run
from slurmgpu.run.recompute import Again, Recompute, spans_of
from slurmgpu.run.submissions import Code
from slurmgpu.shards.shard_file import read_directory
from slurmgpu.shards.userblock import DamagedShardError
from slurmgpu.util.amounts import some_of

_FORMER = "former"
_MANY_NAMED = 5


def code_now(
    run: Run, container: ContainerRecord | None, given: Packed | None, *, writes: bool
) -> tuple[Code, list[str]]:
    """The record of a snapshot of the code as it is now, and notes on what has changed since the last submission.

    With `writes`, the snapshot is written to the run directory. `given` functions replace those with the same roles,
    also in later submissions. SlurmGPUError as `snapshot_of`.
    """
    line, notes = snapshots.code_of(run.submissions()), []
    former = None
    if line is not None:
        try:
            former = replace(snapshots.read(run.folder, line["digest"], with_sources=False), about=line)
        except SlurmGPUError as error:
            notes = [f"Changes in the code are unknown. {error}"]
    # The former snapshot also has modules that were imported by names computed at run time.
    now = snapshot_of(
        run.plan,
        container,
        git_state(Path(run.plan.search_path)),
        also=given.modules if given else (),
        texts=given.texts if given else (),
        former=former,
    )
    in_use = dict(line.get("functions", {})) if line else {}
    if given is not None:
        refuse_other_modules(now.files, given.modules, Path(run.plan.search_path))
        in_use |= dict.fromkeys(given.roles, functions.keep(run.folder, given))
    if in_use:
        now = replace(now, about={**now.about, "functions": in_use})
    if writes:
        snapshots.write(run.folder, now)
    return now.line(), [*now.left_out, *notes, *(_changed(run, former, now) if former else ())]


def changed_since(run: Run, now: Snapshot) -> str:
    """The files of a snapshot that have changed since the last submission of a run, in words; "" if none has.

    Files that only the former snapshot has do not count: a module may have been seen only during the computation.
    """
    digest = snapshots.code_digest(run.submissions())
    if digest is None or digest == now.digest:
        return ""
    try:
        former = snapshots.read(run.folder, digest, with_sources=False)
    except SlurmGPUError as error:
        return f"which files differ is unknown. {error}"
    then = snapshots.digests_of(former)
    names = sorted(name for name, each in snapshots.digests_of(now).items() if then.get(name) != each)
    return f"{some_of(names, _MANY_NAMED)} changed since." if names else ""


def former_code(run: Run, named: str) -> tuple[Code, list[str]]:
    """The record of a former snapshot, and notes on it.

    `named` is "former" for the last submission's, or the first digits of a digest. SlurmGPUError if no snapshot or
    more than one matches, or if it is damaged.
    """
    known = {line["submission"]: code for line in run.submissions() if (code := snapshots.code_of([line]))}
    if not known:
        raise SlurmGPUError(
            f"--code {named}: {run.folder} was never submitted, so it has no former code. Leave the option out to use "
            f"the current code."
        )
    last = max(known)
    wanted = known[last]["digest"] if named == _FORMER else named
    chosen = [number for number, code in known.items() if named and code["digest"].startswith(wanted)]
    digests = [code["digest"] for code in known.values()]
    if len({known[number]["digest"] for number in chosen}) != 1:
        words = ", ".join(dict.fromkeys(snapshots.short(digest, digests) for digest in digests))
        raise SlurmGPUError(f"--code {named}: expected {_FORMER!r}, or the digest of one of the snapshots: {words}.")
    number = chosen[-1]
    digest = known[number]["digest"]
    found = snapshots.read(run.folder, digest)  # before anything is queued
    notes = [f"The code of submission {number} is used, {_short(run, digest)}."]
    if changed := snapshots.read_and_changed(found.read):
        notes.append(
            f"That code reads {some_of(changed, _MANY_NAMED)}, which has changed since. Restore it; otherwise these "
            f"rows count as computed by unknown code."
        )
    return known[number], notes


def with_rows_of_others(run: Run, again: Recompute, digest: str) -> Recompute:
    """Extend a recompute by the published rows that were not computed by the code of `digest`."""
    found = dict(again.shards)
    for shard, revisions in sorted(run.shard_files(fresh=True).items()):
        try:
            makers = read_directory(run.revision_path(shard, revisions[-1])).made_by
        except (DamagedShardError, FileNotFoundError):
            continue  # the merge reports it
        stretches = stretches_of(makers, *run.plan.bounds(shard))
        spans = [(start, stop) for start, stop, by in stretches if by != digest]
        if shard in found:
            spans += found[shard].items
        if spans:
            items = sorted({index for start, stop in spans for index in range(start, stop)})
            found[shard] = Again(revisions[-1] + 1, spans_of(items))
    return Recompute(again.submission, found)


def _short(run: Run, digest: str) -> str:
    return snapshots.short(digest, snapshots.digests_in(run.folder))


def _changed(run: Run, former: Snapshot, now: Snapshot) -> list[str]:
    found, last = snapshots.changes(former, now), run.submissions()[-1]["submission"]
    if not found:
        return []
    what = "; ".join(found)
    if former.digest == now.digest:
        return [f"Since submission {last} the user's code is unchanged, but versions have changed: {what}."]
    return [
        f"The code has changed since submission {last}: {what}. New rows are computed by {_short(run, now.digest)}, "
        f"former ones were by {_short(run, former.digest)}; `slurmgpu resubmit --code former {run.typed}` "
        f"uses the former code."
    ]
