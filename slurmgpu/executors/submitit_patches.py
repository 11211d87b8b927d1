"""Patch how Submitit writes and reads its files, and how it finds the job id in sbatch's answer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import submitit
from submitit.core import utils

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import exists, replace, retried, status_of

log = logging.getLogger(__name__)

OWNERS = 0o600
"""The mode of what jobs run, and of `setup`, which may hold tokens; a default ACL grants others no more than that."""


class _SteadyPath(type(Path())):  # type: ignore[misc]  # the class of paths, by its name, cannot be subclassed before 3.12
    """A path whose `exists` tries again while the file system fails for a moment."""

    def exists(self, **given: Any) -> bool:
        """Whether there is a file."""
        return status_of(self) is not None


class _OwnersPath(type(Path())):  # type: ignore[misc]
    """A path of a file to write, which only its owner can read."""

    def open(self, mode: str = "r", *given: Any, **more: Any) -> Any:
        """The open file."""
        if "w" in mode:
            self.touch(OWNERS)
        return super().open(mode, *given, **more)


def patch_submitit() -> None:
    """Let Submitit, in this process, retry failed requests in a run's logs/, and find the job id that sbatch prints.

    A second call changes nothing.
    """
    paths: Any = utils.JobPaths
    if paths.move_temporary_file is _move:
        return
    paths.move_temporary_file = _move
    for name in ("submitted_pickle", "result_pickle"):
        setattr(paths, name, _steady(getattr(paths, name).fget))
    changed: Any = utils
    dump, in_logs = _owners(utils.cloudpickle_dump), paths.get_first_id_independent_folder
    paths.get_first_id_independent_folder = staticmethod(lambda folder: _OwnersPath(in_logs(folder)))
    changed.pickle_load, changed.cloudpickle_dump = _retrying(utils.pickle_load), _retrying(dump)
    changed.temporary_save_path = _saving
    changed.copy_process_streams = _telling(utils.copy_process_streams)
    executor: Any = submitit.SlurmExecutor
    executor._get_job_id_from_submission_command = staticmethod(_sbatchs_line(executor))


def _steady(path_of: Callable[[Any], Path]) -> property:
    return property(lambda paths: _SteadyPath(path_of(paths)))


def _owners(dump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def dumped(value: Any, path: Path | str) -> None:
        Path(path).touch(OWNERS)
        dump(value, path)

    return dumped


def _sbatchs_line(executor: Any) -> Callable[[str | bytes], str]:
    """Submitit's parser of the job id, given only sbatch's own line: a site's wrapper may print other job ids."""
    read = executor._get_job_id_from_submission_command

    def job_id(said: str | bytes) -> str:
        text = said if isinstance(said, str) else said.decode(errors="replace")
        _, begin, rest = text.rpartition("Submitted batch job ")
        return str(read(begin + rest))

    return job_id


def _telling(copy: Callable[..., None]) -> Callable[..., None]:
    """Like Submitit's, but logs once what a successful command prints on stderr, such as a warning of sbatch."""
    told: set[str] = set()

    def copied(process: Any, stdout: Any, stderr: Any, verbose: bool = False) -> None:
        copy(process, stdout, stderr, verbose)
        said = [line.strip() for line in stderr.getvalue().splitlines() if line.strip()]
        if process.wait() == 0 and not told.issuperset(said):
            told.update(said)
            log.warning("%s", "\n".join(said))

    return copied


def _retrying(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: retried(lambda: function(*given))


@contextlib.contextmanager
def _saving(filepath: Path | str) -> Iterator[Path]:
    """Like Submitit's: write under a temporary name, then rename."""
    path = Path(filepath)
    partial = path.with_suffix(f"{path.suffix}.save_tmp")
    yield partial
    replace(partial, path)


def _move(paths: utils.JobPaths, tmp_path: Path | str, name: str, keep_as_symlink: bool = False) -> None:
    """Like Submitit's. Called after sbatch, or the start of the process: a retry of the caller would start it twice."""
    source, target = Path(tmp_path), Path(getattr(paths, name))
    try:
        replace(source, target)
        if keep_as_symlink and not exists(source):
            retried(lambda: _link(source, target))
    except OSError as error:
        raise SlurmGPUError(
            f"{error.filename or target}: {error.strerror}. The job that was started needs this file. "
            f"Resubmit the run once the file system works."
        ) from error


def _link(source: Path, target: Path) -> None:
    try:
        source.symlink_to(target)
    except FileExistsError:
        if not source.is_symlink():
            raise
