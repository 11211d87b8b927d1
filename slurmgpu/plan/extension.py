"""A run that extends another one: its input has more items at the end, and only these are computed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.formats import CHUNK_BYTES, named
from slurmgpu.inputs.spec import InputFile, InputSpec
from slurmgpu.run.directory import Run
from slurmgpu.run.frozen_plan import PROMISED, Plan
from slurmgpu.util.amounts import count_of
from slurmgpu.util.atomic_files import fsync_dir, whole_file
from slurmgpu.util.shared_files import NO_HARD_LINKS, exists, make_folder, retried

OF_INPUT = frozenset({"input_digest", "n_items", "ranges"})
"""The parts of `Plan.basis` that may differ: the input, which is compared file by file."""
FilesOfItem = Callable[[int], Collection[str]]
"""The files that a workload keeps for an item's row, as paths relative to the run directory."""
CANNOT_LINK = (*NO_HARD_LINKS, errno.EACCES)
"""Errors of a file that can only be copied: another file system, another user's file, too many links."""


@dataclass(frozen=True)
class Extension:
    """The run that is extended, and its published shards with the same items in both runs, with their files.

    `files_of_item` is the workload's method.
    """

    run: Run
    shards: Mapping[int, list[int]]
    files_of_item: FilesOfItem | None

    def describe(self, plan: Plan) -> str:
        """A note on the shards that are reused, and the items that are computed."""
        n_taken = sum(stop - start for start, stop in map(plan.bounds, self.shards))
        shards = count_of(len(self.shards), "shard")
        return (
            f"reused from {self.run.folder}: {shards} with {count_of(n_taken, 'item')}; "
            f"{count_of(plan.n_items - n_taken, 'item')} {'is' if plan.n_items - n_taken == 1 else 'are'} computed."
        )

    def check(self) -> None:
        """Raise SlurmGPUError if files of the workload cannot be reused, before anything is written."""
        for _ in self._files():
            pass

    def put_into(self, run: Run) -> None:
        """Link the shards into the run directory of the extending run, or copy them where they cannot be linked.

        The same is done with the files that the workload keeps beside the rows, if they exist.
        """
        for path in self._files():
            _link_or_copy_into(run.folder, path, self.run.folder)
        for shard, revisions in self.shards.items():
            for revision in revisions:
                link_or_copy(self.run.revision_path(shard, revision), run.revision_path(shard, revision))
        fsync_dir(run.shards)

    def _files(self) -> Iterator[PurePosixPath]:
        """The workload's files of the items in these shards. SlurmGPUError if one is outside the run directory."""
        if (files_of_item := self.files_of_item) is None:
            return
        for shard in self.shards:
            for index in self.run.plan.indices(*self.run.plan.bounds(shard)):
                for name in files_of_item(index):
                    path = PurePosixPath(name)
                    if path.is_absolute() or ".." in path.parts or not path.parts:
                        raise SlurmGPUError(
                            f"The workload's files_of_item({index}) returned {name!r}; expected paths of files in the "
                            "run directory, relative to it."
                        )
                    yield path


def extend(old: Run, plan: Plan, folder: Path, files_of_item: FilesOfItem | None = None) -> Extension:
    """The extension of `old` by a plan. Raises SlurmGPUError if the plan does not extend it.

    `folder` has the input's files that lie in run directories. `files_of_item` is the workload's.
    """
    before, spec = InputSpec.from_json(old.plan.input), InputSpec.from_json(plan.input)
    if before.ranges is not None:
        raise _refusal(
            old, "it computed only some items of its input. Extend a run of a whole input, or leave out --extend"
        )
    for what, mine in plan.basis.items():
        others = old.plan.basis[what]
        if what not in OF_INPUT and not _is_same(mine, others):
            raise _refusal(old, _difference(what, mine, others))
    if (before.format, before.columns) != (spec.format, spec.columns):
        raise _refusal(old, f"its input is {_kind(before)}, and the new one is {_kind(spec)}")
    if any(file.size_bytes == PROMISED for file in (*before.files, *spec.files)):
        raise _refusal(old, "the input, a merged file, did not exist yet when one of the two runs was planned")
    _check_prefix(old, before.files, spec, folder)
    if spec.n_items <= before.n_items:
        raise _refusal(
            old, f"the input has no items after its {count_of(before.n_items, 'item')}. There is nothing to compute"
        )
    n_whole = before.n_items // plan.shard_items
    there = old.shard_files(fresh=True)
    taken = {shard: there[shard] for shard in sorted(there) if shard < n_whole}
    extension = Extension(old, taken, files_of_item)
    extension.check()
    return extension


def _check_prefix(old: Run, before: tuple[InputFile, ...], spec: InputSpec, folder: Path) -> None:
    """Raise SlurmGPUError unless the files are the former ones, the last of which may have grown, then new ones."""
    grows, files = named(spec.format).grows, spec.files
    for number, former in enumerate(before):
        was = _origin(former)
        if number == len(files):
            raise _refusal(old, f"its input also has {was}, which the new input lacks")
        if (file := files[number]).sha256 == former.sha256:
            continue
        now = _origin(file)
        if any(later.sha256 == former.sha256 for later in files[number + 1 :]):
            raise _refusal(
                old,
                f"{now} comes before {was}, which was file {number + 1} of its input. List new files "
                f'after the former ones, for example input = ["former/*.jsonl", "new.jsonl"]',
            )
        if grows and spec.repacked:
            raise _refusal(
                old,
                f"{now} differs from the former {was}, and with compressed files in the input it cannot be checked "
                f"whether only lines were added. Put the new lines into a file of their own, after the others",
            )
        has_grown = grows and _begins_with(folder / file.path, former)
        if not has_grown:
            raise _refusal(old, f"{now} differs from the former {was} by more than lines added at its end")
        if number < len(before) - 1:
            raise _refusal(
                old,
                f"{now} has more lines than before, and other files of the input follow it. "
                f"Put the new lines into a file of their own, after the others",
            )


def _origin(file: InputFile) -> str:
    """The user's name of a file, also of one that was repacked."""
    return file.path if file.source is None else file.source.path


def _begins_with(path: Path, former: InputFile) -> bool:
    """Whether a file begins with the bytes of a former one, which end where a line does."""
    checksum, left = hashlib.sha256(), former.size_bytes
    with open(path, "rb") as file:
        last = b""
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            checksum.update(chunk)
            left -= len(chunk)
            last = chunk[-1:]
        is_end_of_line = b"\n" in (last, file.read(1))
    return not left and is_end_of_line and checksum.hexdigest() == former.sha256


def _link_or_copy_into(folder: Path, path: PurePosixPath, old: Path) -> None:
    """Link or copy a file of an old run directory into another one, unless it is missing there."""
    if not exists(old / path):
        return
    for number in range(1, len(path.parts)):
        make_folder(folder.joinpath(*path.parts[:number]))
    link_or_copy(old / path, folder / path)
    fsync_dir((folder / path).parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a link to a file, or a copy with its time where it cannot be linked."""

    def link() -> None:
        try:
            os.link(source, target)
        except FileExistsError:
            if not source.samefile(target):  # if it is: NFS lost the reply to a first, successful request
                raise

    def copy() -> None:
        with open(source, "rb") as content, whole_file(target) as file:
            shutil.copyfileobj(content, file, CHUNK_BYTES)
        status = source.stat()
        with contextlib.suppress(PermissionError):  # where links are refused, this may be as well
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    try:
        retried(link)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        retried(copy)


def _difference(what: str, mine: Any, others: Any) -> str:
    if isinstance(mine, Mapping):
        names = [name for name in sorted({*mine, *others}) if not _is_same(mine.get(name), others.get(name))]
        found = [f"{table[names[0]]!r:.200}" if names[0] in table else "not set" for table in (mine, others)]
        what = f"{what}.{names[0]}"
    else:
        found = [f"{each!r:.200}" for each in (mine, others)]
    return f"{what} is {found[0]}, and in that run it was {found[1]}. Restore that value, or plan a separate run"


def _is_same(mine: Any, others: Any) -> bool:
    """Whether two values of JSON are equal; NaN, which differs from itself, is."""
    return json.dumps(mine, sort_keys=True) == json.dumps(others, sort_keys=True)


def _kind(spec: InputSpec) -> str:
    return f"{spec.format} with the columns {', '.join(spec.columns)}" if spec.columns else spec.format


def _refusal(old: Run, why: str) -> SlurmGPUError:
    return SlurmGPUError(f"{old.folder} cannot be extended: {why}.")
