"""The files of an input: paths, globs and folders."""

from __future__ import annotations

import glob
import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs import databases, hub
from slurmgpu.inputs.formats import format_of, recognised
from slurmgpu.util.amounts import count_of, size_of
from slurmgpu.util.globs import matches

FILES = "files:"
"""The prefix of a path, a glob or a folder that makes every file an item, whatever its suffix."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def find(patterns: str | Sequence[str], base: Path) -> list[Path]:
    """The files of an input, absolute and in order: as listed, or sorted for a glob.

    A pattern is a path or a glob (`**` for any depth), relative to `base`; `~` is the home directory; `hf://` names
    files of the hub, which are downloaded into its cache unless they are there. SlurmGPUError for a missing file, a
    glob without a match, a directory, an unknown suffix, two formats, or a file that is named twice.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    if not patterns:
        raise SlurmGPUError("input is an empty list; expected a path, a list of paths, or a glob.")
    paths = [path for pattern in patterns for path in _expand(pattern, base.absolute())]
    _check_files(paths, base)
    format_of(paths)
    return paths


def is_of_hub(patterns: str | Sequence[str]) -> bool:
    """Whether an input names files of the hub."""
    return bool(_of_hub(patterns))


def fetch(patterns: str | Sequence[str]) -> list[str]:
    """Download the newest version of what an input names on the hub; return a line about each."""
    lines = []
    for named in _of_hub(patterns):
        paths = hub.download(named, newest=True)
        size = sum(path.stat().st_size for path in paths)
        where = str(hub.origin(paths[0])).partition("@")[2][:12]
        lines.append(f"{named} at {where} is in the hub's cache: {count_of(len(paths), 'file')}, {size_of(size)}")
    return lines


def _of_hub(patterns: str | Sequence[str]) -> list[str]:
    named = [patterns] if isinstance(patterns, str) else patterns
    return [each for each in named if each.startswith(hub.PREFIX)]


def _expand(pattern: str, base: Path) -> list[Path]:
    """The paths of a pattern; a file with exactly this name takes precedence over a glob."""
    if pattern.startswith(hub.PREFIX):
        return hub.download(pattern)
    if _URL.match(pattern) and not os.path.lexists(base / pattern):
        raise SlurmGPUError(
            f"Input {pattern!r} is a URL; expected files on this machine, or on the hub with {hub.PREFIX}. Download "
            "it, and name the file."
        )
    pattern = os.path.expanduser(pattern)  # Path.expanduser raises where there is no home
    if not glob.has_magic(pattern) or os.path.lexists(base / pattern):
        path = base / pattern
        return _data_set_files(path) if is_data_set(path) else [path]
    found = sorted(map(Path, globbed(pattern, base)))
    # Directories matched by `**` are skipped; one named like data (`parts.csv/`) is refused later.
    # Not Path.is_dir, which raises for a link into a folder without permission.
    paths = [path for path in found if not os.path.isdir(path) or recognised(path)]
    if not paths:
        raise SlurmGPUError(f"Input {pattern!r} matches no file. {none_there(pattern, base)}")
    return paths


def none_there(pattern: str, base: Path) -> str:
    """The second sentence of an error about a glob without a match: what to do."""
    name = os.path.expanduser(pattern.removeprefix(FILES))
    folders = sorted(each for each in globbed(name, base) if os.path.isdir(each))
    if folders:
        listed = f"ls -d {base / name} > folders.txt"
        return (
            f"It matches {count_of(len(folders), 'folder')}, such as {folders[0]}. If each folder is an item, as a "
            f"Zarr store is, let the input be a list of them, whose lines are the field 'text': `{listed}`. For the "
            f"files in them write '{pattern}/**/*'."
        )
    return passed_over(pattern, base) or f"Relative patterns are relative to {base}."


def globbed(pattern: str, base: Path) -> set[str]:
    """The absolute paths that a glob matches; SlurmGPUError if a folder on the way cannot be listed."""
    try:
        return matches(pattern, base)
    except OSError as error:
        raise unlisted(error) from error


def passed_over(patterns: str | Sequence[str], base: Path) -> str | None:
    """A note on files that globs leave out because their suffix has another case; None without any.

    Cameras write `.JPG`, people write `.jpg`, and patterns are case-sensitive.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    globs = [_of_any_case(pattern, base) for pattern in patterns]
    taken, left = {str(base / os.path.expanduser(pattern)) for pattern in patterns}, dict[str, str]()
    for pattern, found in zip(patterns, globs, strict=True):
        if found is not None:
            name, suffix = found
            paths = globbed(name, base.absolute())
            taken |= (same := {path for path in paths if path.endswith(suffix)})
            left |= dict.fromkeys(sorted(paths - same), pattern)
    for pattern, found in zip(patterns, globs, strict=True):
        if found is None and left.keys() - taken and glob.has_magic(pattern) and not _is_elsewhere(pattern):
            taken |= globbed(os.path.expanduser(pattern.removeprefix(FILES)), base.absolute())
    others = [path for path in left if path not in taken and not os.path.isdir(path)]
    if not others:
        return None
    suffixes = list(dict.fromkeys(Path(path).suffix for path in others))
    pattern = left[others[0]]
    more = [pattern.removesuffix(Path(pattern).suffix) + suffix for suffix in suffixes]
    example = os.fsencode(others[0]).decode("utf-8", "backslashreplace")
    return (
        f"The input skips {count_of(len(others), 'file')} with {' and '.join(suffixes)}, such as {example}, because a "
        f"pattern matches a suffix exactly. To include them, list the patterns: "
        f"[{', '.join(map(repr, [pattern, *more]))}]."
    )


def _is_elsewhere(pattern: str) -> bool:
    """Whether an input is not given by paths of files."""
    return pattern.startswith((hub.PREFIX, *databases.PREFIXES))


def _of_any_case(pattern: str, base: Path) -> tuple[str, str] | None:
    """The glob with its suffix in any case, and that suffix; None if it is no glob with a suffix."""
    name = os.path.expanduser(pattern.removeprefix(FILES))
    if _is_elsewhere(name) or not glob.has_magic(name) or os.path.lexists(base / name):
        return None
    suffix = re.search(r"\.\w*[a-zA-Z]\w*$", name)
    if suffix is None:
        return None
    either = (f"[{c.lower()}{c.upper()}]" if c.isascii() and c.isalpha() else c for c in suffix[0])
    return name.removesuffix(suffix[0]) + "".join(either), suffix[0]


def unlisted(error: OSError) -> SlurmGPUError:
    """The error for a folder that cannot be listed, whose files would otherwise be missing silently."""
    name = os.fsencode(str(error.filename)).decode("utf-8", "backslashreplace")
    return SlurmGPUError(f"Input {name} cannot be listed: {error.strerror}. Make it readable, or leave it out.")


def is_data_set(path: Path) -> bool:
    """Whether a path is a folder that `save_to_disk` of Hugging Face's datasets has written."""
    # Not Path.is_file, which raises for a folder without permission; listing it later raises a SlurmGPUError.
    return any(os.path.isfile(path / name) for name in (_STATE, _SPLITS))


def _data_set_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved data set, in the order of its rows; SlurmGPUError for one of several splits."""
    about = folder / (_STATE if (folder / _STATE).is_file() else _SPLITS)
    try:
        state = json.loads(about.read_bytes())
        if about.name == _SPLITS:
            splits = [str(folder / name) for name in state["splits"]]
            raise SlurmGPUError(f"Input {folder} is a data set with several splits. Name one, such as {splits[0]!r}.")
        names = [file["filename"] for file in state["_data_files"]]
        indirect = state.get("_indices_data_files")
    except OSError as error:
        raise SlurmGPUError(f"Input {about} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise SlurmGPUError(
            f"Input {folder} has a {about.name} that save_to_disk did not write, or not completely "
            f"({type(error).__name__}: {error}). Save the data set again."
        ) from error
    if indirect or not names:
        found = "takes its rows through a table of indices" if indirect else "has no files"
        raise SlurmGPUError(f"Input {folder} {found}. Save it again with a current version of datasets.")
    return [folder / name for name in names]


def _check_files(paths: Sequence[Path], base: Path) -> None:
    """SlurmGPUError for anything but regular files, and for files named twice, also through links."""
    seen: dict[tuple[int, int], Path] = {}
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError as error:
            is_braces = re.search(r"\{\w+\.\.\w+\}", str(path))
            braces = " Braces are not expanded: write * instead." if is_braces else ""
            raise SlurmGPUError(
                f"Input {path} does not exist. Relative paths are relative to {base.absolute()}.{braces}"
            ) from error
        except OSError as error:
            raise SlurmGPUError(f"Input {path} cannot be read: {error.strerror}.") from error
        if stat.S_ISDIR(status.st_mode):
            raise SlurmGPUError(
                f"Input {path} is a directory; expected files. Name those in it, for example '{path}/*.jsonl'."
            )
        if not stat.S_ISREG(status.st_mode):
            raise SlurmGPUError(f"Input {path} is not a regular file. Save it as one: items are read at any offset.")
        twin = seen.setdefault((status.st_dev, status.st_ino), path)
        if twin is not path:
            raise SlurmGPUError(f"The input names the same file twice, as {twin} and {path}. Leave one out.")
