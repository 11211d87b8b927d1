"""Find the files of an input."""

from __future__ import annotations

import glob
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.formats import format_of, recognised

_MOST_LOOKS = 5
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def find(patterns: str | Sequence[str], base: Path) -> list[Path]:
    """The files of an input, absolute and in order: as listed, or sorted for a glob.

    A pattern is a path or a glob (`**` for any depth), relative to `base`; `~` is the home directory. SlurmGPUError for
    a missing file, a glob without a match, a directory, an unknown suffix, two formats, or a file that is named twice.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    if not patterns:
        raise SlurmGPUError("input is an empty list: expected a path, a list of paths, or a glob.")
    paths = [path for pattern in patterns for path in _expand(pattern, base.absolute())]
    _check_files(paths, base)
    format_of(paths)
    return paths


def _expand(pattern: str, base: Path) -> list[Path]:
    """The paths of a pattern; a file with exactly this name takes precedence over a glob."""
    pattern = os.path.expanduser(pattern)  # noqa: PTH111 - Path.expanduser raises where there is no home
    if not glob.has_magic(pattern) or os.path.lexists(base / pattern):
        path = base / pattern
        return data_set_files(path) if is_data_set(path) else [path]
    matches = globbed(pattern, base)
    # Directories matched by `**` are skipped; one named like data (`parts.csv/`) is refused later.
    found = sorted(base / match for match in matches)
    paths = [path for path in found if not path.is_dir() or recognised(path)]
    if not paths:
        raise SlurmGPUError(f"Input {pattern!r} matches no file. Relative patterns start at {base}.")
    return paths


def globbed(pattern: str, base: Path) -> set[str]:
    """The matches of a glob, confirmed by a second look: glob skips folders that cannot be listed at the moment."""
    # Not Path.glob, which takes no absolute pattern. A set, since `**` may find a file twice.
    found = set(glob.glob(pattern, root_dir=base, recursive=True))  # noqa: PTH207
    for _ in range(_MOST_LOOKS):
        before, found = found, set(glob.glob(pattern, root_dir=base, recursive=True))  # noqa: PTH207
        if found == before:
            break
    return found


def is_data_set(path: Path) -> bool:
    """Whether a path is a folder that `save_to_disk` of Hugging Face's datasets has written."""
    return any((path / name).is_file() for name in (_STATE, _SPLITS))


def data_set_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved data set, in the order of its rows; SlurmGPUError for one of several splits."""
    about = folder / (_STATE if (folder / _STATE).is_file() else _SPLITS)
    try:
        state = json.loads(about.read_bytes())
        if about.name == _SPLITS:
            splits = [str(folder / name) for name in state["splits"]]
            raise SlurmGPUError(f"Input {folder} is a data set of several splits: name one, as in {splits[0]!r}.")
        names = [file["filename"] for file in state["_data_files"]]
        indirect = state.get("_indices_data_files")
    except OSError as error:
        raise SlurmGPUError(f"Input {about} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SlurmGPUError(
            f"Input {folder} has a {about.name} that save_to_disk has not written, or not to its end "
            f"({type(error).__name__}: {error}). Save the data set again."
        ) from error
    if indirect or not names:
        found = "takes its rows through a table of indices" if indirect else "has no files"
        raise SlurmGPUError(f"Input {folder} {found}. Save it again with a present version of datasets.")
    return [folder / name for name in names]


def _check_files(paths: Sequence[Path], base: Path) -> None:
    """SlurmGPUError for anything but regular files, and for files named twice, also through links."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise SlurmGPUError(f"Input {path} does not exist. Relative paths start at {base.absolute()}.") from error
        except OSError as error:
            raise SlurmGPUError(f"Input {path} cannot be read: {error.strerror}.") from error
        if stat.S_ISDIR(status.st_mode):
            raise SlurmGPUError(
                f"Input {path} is a directory: expected files. Name those in it, as in '{path}/*.jsonl'."
            )
        if not stat.S_ISREG(status.st_mode):
            raise SlurmGPUError(f"Input {path} is not a regular file: items are read at any offset, again and again.")
        twin = seen.setdefault((status.st_dev, status.st_ino), path)
        if twin is not path:
            raise SlurmGPUError(f"The input names one file twice, as {twin} and {path}. Leave one of them out.")
