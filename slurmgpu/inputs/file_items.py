"""Files that are items themselves, such as images in a folder: list them at planning, check each when it is read."""

from __future__ import annotations

import functools
import glob
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import databases, hub
from slurmgpu.inputs.formats import Find, Preview, Rows, recognised
from slurmgpu.inputs.lines import Lines, json_object
from slurmgpu.inputs.paths import FILES, globbed, is_data_set, none_there, unlisted
from slurmgpu.util.amounts import count_of, size_of
from slurmgpu.util.atomic_files import date_in_whole_seconds
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, PATIENCE_S, is_transient, retried

FILE = "input.files"
"""The listing in the run directory, a JSON object in a line for each item: `path`, `key`, `size_bytes`, `mtime_ns`."""

_IMAGES = ("avif", "bmp", "dcm", "gif", "heic", "jp2", "jpeg", "jpg", "jxl", "nii", "pgm", "png", "ppm", "svg")
_AUDIO = ("aac", "aif", "aiff", "flac", "m4a", "mp3", "oga", "ogg", "opus", "wav", "wma")
_VIDEO = ("avi", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "webm", "wmv")
_MEDIA = frozenset({*_IMAGES, "tif", "tiff", "webp", *_AUDIO, *_VIDEO, "pdf"})
"""Suffixes of files that are always items themselves."""

FIELDS = ("path", "key", "name")
_AT_ONCE, _OF_A_THREAD = 4096, 128
_SECOND_NS = 10**9
_LISTED = 4
"""The most patterns that an error message proposes."""


@dataclass(frozen=True)
class Listing:
    """The files of an input in order, each with its path and key, and the folders that the input names."""

    members: Sequence[tuple[str, str]]
    roots: tuple[str, ...]

    def write(self, path: Path) -> tuple[str, tuple[str, ...]]:
        """Write the listing, with each file's size and time; return a line about it, and the folders of the files."""
        total, folders = 0, dict.fromkeys(self.roots)
        with open(path, "w", encoding="ascii") as file, ThreadPoolExecutor(16) as beside:
            for start in range(0, len(self.members), _AT_ONCE):  # a pool would queue all of them at once
                some = self.members[start : start + _AT_ONCE]
                parts = [some[at : at + _OF_A_THREAD] for at in range(0, len(some), _OF_A_THREAD)]
                looks = chain.from_iterable(beside.map(_look_at_all, parts))
                for (name, key), (size, mtime, others) in zip(some, looks, strict=True):
                    total += max(size, 0)
                    folders |= dict.fromkeys(others)
                    line = {"path": name, "key": key, "size_bytes": size, "mtime_ns": mtime}
                    file.write(json.dumps(line) + "\n")
        date_in_whole_seconds(path)
        about = f"{count_of(len(self.members), 'file')} of {' and '.join(self.roots[:3])}, {size_of(total)}"
        if self.same_keys:
            n_files, key = self.same_keys
            about += f"; {n_files} of them share their key with another, such as {key!r}"
        return as_text(about), _outermost(folders)

    @functools.cached_property
    def same_keys(self) -> tuple[int, str] | None:
        """How many of the files have the key of another, and one such key; None if none has."""
        shared = {key: n for key, n in Counter(key for _, key in self.members).items() if n > 1}
        return (sum(shared.values()), next(iter(shared))) if shared else None


def list_files(patterns: str | Sequence[str], base: Path) -> Listing | None:
    """The files that are items themselves; None for an input whose files contain the items.

    SlurmGPUError if the input names both kinds, or if it is unclear which kind a folder has.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if empty := [pattern for pattern in patterns if not pattern.removeprefix(FILES)]:
        raise SlurmGPUError(
            f"The input is {empty[0]!r}, which names nothing (is a shell variable unset?); expected a "
            f"path, a list of paths, or a glob. For the working folder write {empty[0] + '.'!r}."
        )
    found = [_listed(pattern, base.absolute()) for pattern in patterns]
    held = [pattern for pattern, listed in zip(patterns, found, strict=True) if listed is None]
    if len(held) == len(patterns):
        return None
    if held:
        other = next(pattern for pattern, listed in zip(patterns, found, strict=True) if listed is not None)
        raise SlurmGPUError(
            f"The input mixes {other!r}, where each file is an item, and {held[0]!r}, whose files hold items. "
            f"Plan two runs, or write {FILES + held[0]!r} if each of its files is an item."
        )
    members = [(path, key) for listed in found if listed for path, key in listed[1]]
    paths = Counter(path for path, _ in members) if len(patterns) > 1 else {}
    if twice := [path for path, n in paths.items() if n > 1]:
        raise SlurmGPUError(f"The input names {twice[0]} twice. Leave one of them out.")
    return Listing(members, tuple(dict.fromkeys(listed[0] for listed in found if listed)))


class Files(Lines, format="files"):
    """The files of a listing. An item's data has its `path`, its `key`, and its `name`, the key with the suffix."""

    def recognises(self, path: Path) -> bool:
        """False: users do not name listings, which planning writes."""
        return False

    def preview(self, file: BinaryIO, found: Preview) -> Preview:
        """The range of the lines, and the fields of all items."""
        return replace(super().preview(file, found), columns=FIELDS)

    def parse(self, record: bytes, columns: Sequence[str]) -> Mapping[str, Any]:
        """A line of the listing."""
        return json_object(record)

    def open(self, path: str, columns: Sequence[str] | None, find: Find) -> Rows:
        """The files of a listing. Each is checked when it is read."""
        return FileRows(super().open(path, columns, find))


class FileRows:
    """The files of a listing as items, with an ItemError for each file that has changed since planning."""

    def __init__(self, lines: Rows) -> None:
        self._lines = lines
        self._patience_s = PATIENCE_S

    def close(self) -> None:
        """Close the listing."""
        self._lines.close()

    def read(self, start: int, stop: int) -> list[Mapping[str, Any] | ItemError]:
        """Items start..stop-1."""
        lines = self._lines.read(start, stop)
        return [line if isinstance(line, ItemError) else self._checked(line) for line in lines]

    def _checked(self, line: Mapping[str, Any]) -> Mapping[str, Any] | ItemError:
        """The data of a file; an error if it has changed since planning or cannot be read."""
        path, shown = line["path"], as_text(line["path"])
        try:
            status = retried(lambda: os.stat(path), self._patience_s)  # a Path is slower, of a million
        except OSError as error:
            if is_transient(error):
                # If its folder cannot be read, either, this raises: the file is not at fault.
                os.stat(os.path.dirname(path))
                self._patience_s = BRIEF_PATIENCE_S  # for later files: a broken disk may fail for all of them
            return ItemError(f"{shown} cannot be read: {error.strerror}")
        return _unchanged(line, shown, status)


def _unchanged(line: Mapping[str, Any], shown: str, status: os.stat_result) -> Mapping[str, Any] | ItemError:
    if not stat.S_ISREG(status.st_mode):
        return ItemError(f"{shown} is not a regular file")
    time_ns, now_ns = line["mtime_ns"], status.st_mtime_ns
    # An archive, or another file system, may keep whole seconds only.
    is_as_it_was = now_ns == time_ns or now_ns == time_ns - time_ns % _SECOND_NS
    if status.st_size != line["size_bytes"] or not is_as_it_was:
        if line["size_bytes"] < 0:
            return ItemError(f"{shown} could not be read when the run was planned. Plan a new run with it")
        return ItemError(
            f"{shown} has changed since the run was planned: it had {line['size_bytes']} bytes and has "
            f"{status.st_size} now, or it was rewritten. Restore it, or plan a new run"
        )
    suffix = as_text(os.path.splitext(line["path"])[1])
    return {"path": line["path"], "key": line["key"], "name": line["key"] + suffix}


def as_text(name: str) -> str:
    """A file's name as valid Unicode; bytes that are not UTF-8 are written in hexadecimal."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _look_at_all(members: Sequence[tuple[str, str]]) -> list[tuple[int, int, list[str]]]:
    return [_look_at(path) for path, _ in members]


def _look_at(path: str) -> tuple[int, int, list[str]]:
    """A file's size and time, and the folders that links lead through; -1 if it cannot be read."""
    folders = [os.path.dirname(path)]
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            status = os.stat(path)  # raises where links go round
            while os.path.islink(path):
                path = os.path.normpath(os.path.join(folders[-1], os.readlink(path)))
                folders.append(os.path.dirname(path))
    except OSError as error:
        if is_transient(error):
            raise
        return -1, -1, folders
    return (status.st_size, status.st_mtime_ns, folders) if stat.S_ISREG(status.st_mode) else (-1, -1, folders)


def _listed(pattern: str, base: Path) -> tuple[str, list[tuple[str, str]]] | None:
    """The folder that a pattern begins with, and its files with their keys; None if the files contain items."""
    if pattern.startswith((hub.PREFIX, *databases.PREFIXES)):
        return None
    is_explicit = pattern.startswith(FILES)
    name = str(PurePosixPath(os.path.expanduser(pattern.removeprefix(FILES))))
    path = str(base / name)
    if not glob.has_magic(name) or os.path.lexists(path):
        if os.path.isdir(path):
            if not is_explicit and is_data_set(Path(path)):
                return None
            root, paths = path, sorted(_walked(path), key=_parts)
        else:
            if not (is_explicit or _suffix(path) in _MEDIA):
                return None
            if not os.path.lexists(path):
                raise SlurmGPUError(f"Input {path} does not exist. Relative paths are relative to {base}.")
            root, paths, is_explicit = os.path.dirname(path), [path], True
    else:
        if not is_explicit and recognised(Path(name)):
            return None
        root = _before_magic(path)
        paths = sorted((match for match in globbed(name, base) if not os.path.isdir(match)), key=_parts)
        if paths and not is_explicit and _MEDIA.isdisjoint(map(_suffix, paths)):
            return None
    if not paths:
        raise SlurmGPUError(
            f"Input {pattern!r} matches no file (hidden files are skipped). {none_there(pattern, base)}"
        )
    if not is_explicit:
        _refuse_unclear(pattern, root, paths)
    return root, [(each, _key(each, root)) for each in paths]


def _walked(folder: str) -> Iterator[str]:
    """The files of a folder at any depth, without hidden ones. A folder that links reach twice is listed once."""
    seen: set[tuple[int, int]] = set()
    for where, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
        status = os.stat(where)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(where, name) for name in files if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise unlisted(error) from error


def _refuse_unclear(pattern: str, root: str, paths: Sequence[str]) -> None:
    """SlurmGPUError for a folder whose files contain items, or that has media beside other files."""
    suffixes, examples = Counter(map(_as_written, paths)), {_as_written(path): path for path in paths}
    media = [suffix for suffix, _ in suffixes.most_common() if suffix.lower() in _MEDIA]
    holding = {suffix for suffix, path in examples.items() if suffix not in media and recognised(Path(path))}
    if not holding and len(media) in (0, len(suffixes)):
        return
    shown = as_text(root)
    choices = [
        f"'{shown}/**/*.{suffix}' for {'the items in' if suffix in holding else 'each of'} its .{suffix} files"
        for suffix, _ in suffixes.most_common(3)
        if suffix in holding or suffix in media
    ]
    if len(media) > 1:  # suffixes may differ only by case, which patterns distinguish
        choices.append(f"a list for several, such as {[f'{shown}/**/*.{suffix}' for suffix in media[:_LISTED]]}")
    counted = [
        count_of(n, f".{suffix} file" if suffix else "file without a suffix") for suffix, n in suffixes.most_common(4)
    ]
    raise SlurmGPUError(
        f"Input {pattern!r} has {' and '.join(counted)}, so it is unclear whether each file is an item or holds "
        f"items. Write {', '.join(choices)}, or {FILES + shown!r} to make every file an item."
    )


def _suffix(path: str) -> str:
    return _as_written(path).lower()


def _as_written(path: str) -> str:
    """The suffix of a path as it is written, for a pattern."""
    return os.path.splitext(path)[1][1:]


def _key(path: str, root: str) -> str:
    """The path within the folder without its suffix, as valid Unicode."""
    return as_text(os.path.splitext(path[len(root.rstrip("/")) + 1 :])[0])


def _parts(path: str) -> str:
    """A key to sort paths part by part, as `Path` does: `a/x` comes before `a b/x`."""
    return path.replace("/", "\0")


def _before_magic(path: str) -> str:
    """The folder of a pattern up to its first wildcard."""
    parts = path.split("/")
    return "/".join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))]) or "/"


def _outermost(folders: Iterable[str]) -> tuple[str, ...]:
    """The folders and the targets of links among them, without folders inside of another one."""
    found = sorted({name for folder in folders for name in (folder, os.path.realpath(folder))}, key=_parts)
    kept: list[str] = []
    for folder in found:
        if not kept or not Path(folder).is_relative_to(kept[-1]):
            kept.append(folder)
    return tuple(kept)
