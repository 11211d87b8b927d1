"""Snapshots of the user's modules at submission, and their digests, which rows carry.

RUN/code/DIGEST.json describes the files in RUN/code/DIGEST; docs/reference/files.md has the keys. The worker imports
this: standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from slurmgpu.errors import SlurmGPUError
from slurmgpu.run.owners import is_trusted
from slurmgpu.run.submissions import Code, CodeAbout, SubmissionLine
from slurmgpu.util.atomic_files import beside, fsync_dir, write_bytes
from slurmgpu.util.own_files import OTHERS_WRITE
from slurmgpu.util.shared_files import exists, list_entries, make_folder, read_bytes, replace, retried
from slurmgpu.util.users import name_in_words

SNAPSHOT_FORMAT = "slurmgpu code"
SNAPSHOT_VERSION = 1
FOLDER = "code"
DIGITS = 16
"""The number of digits in a digest of code."""
_LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Redundant fields of syntax trees, and type comments."""
_OF_THE_FILE = frozenset({"format", "version", "digest", "files", "left_out", "namespaces", "read"})
_SHOWN_DIGITS = 4
"""The least number of digits of a shortened digest."""
_digests: dict[bytes, str] = {}
"""The digests of sources, by that of their bytes."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the user's: its original `path`, and its `name` in the snapshot.

    `modules` are its module names, empty for a file that the run file names by path. `digest` is that of its syntax
    tree, or of its bytes for a script; `sha256` is that of its bytes. `source` is empty if it was not read. `inside` is
    its path in the run's image if that differs.
    """

    name: str
    path: str
    modules: tuple[str, ...]
    digest: str
    sha256: str
    source: bytes
    inside: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The file without its source."""
        return {key: value for key, value in asdict(self).items() if key != "source"}


@dataclass(frozen=True)
class ReadFile:
    """A file that code reads from disk: its name in messages, its path, and the digest of its bytes."""

    name: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Snapshot:
    """The user's modules; `about` has the versions of Python and packages, the commit and the image.

    `left_out` are notes, such as on what is not included. `namespaces` are the packages of these modules that have no
    `__init__.py`. `read` are files that are not copied, such as configurations.
    """

    files: tuple[SourceFile, ...]
    about: CodeAbout
    left_out: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    read: tuple[ReadFile, ...] = ()

    @cached_property
    def digest(self) -> str:
        """The digest of all names and contents, and of functions given to resubmissions.

        Comments and layout of modules do not count.
        """
        parts = sorted((file.name, file.digest) for file in self.files)
        parts += sorted((f"{role}()", each["same"]) for role, each in self.about.get("functions", {}).items())
        parts += sorted((f"{file.name}:read", file.sha256) for file in self.read)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGITS]

    def line(self) -> Code:
        """The record of the snapshot in a submission's line."""
        return {"digest": self.digest, **self.about, "left_out": list(self.left_out)}


def write(run: Path, snapshot: Snapshot) -> None:
    """Write a snapshot into a run directory atomically. If one of the same digest exists, its files stay."""
    folder = run / FOLDER
    about = folder / f"{snapshot.digest}.json"
    if (former := _former(run, snapshot.digest)) is not None:
        places = {file.name: file for file in snapshot.files}
        moved = [
            replace_fields(file, path=places[file.name].path, inside=places[file.name].inside) for file in former.files
        ]
        given = snapshot.about.get("functions", {})
        if moved != list(former.files) or given != former.about.get("functions", {}):
            # An editable install may have moved, and equal functions have another pickle in each process.
            known: CodeAbout = {**former.about, "functions": given} if given else former.about
            _write_about(about, replace_fields(former, files=tuple(moved), about=known))
        return
    # Tasks run this code as their user: nobody else may write it, whatever the umask.
    make_folder(folder, 0o755)
    target = folder / snapshot.digest
    if exists(target):  # left by a process that died before it wrote the JSON
        shutil.rmtree(target)
    retried(lambda: _write_sources(target, snapshot))
    fsync_dir(folder)
    _write_about(about, snapshot)


def _former(run: Path, digest: str) -> Snapshot | None:
    try:
        return read(run, digest)
    except SlurmGPUError:
        return None


def _write_about(path: Path, snapshot: Snapshot) -> None:
    head = {"format": SNAPSHOT_FORMAT, "version": SNAPSHOT_VERSION, "digest": snapshot.digest}
    left_out, files = list(snapshot.left_out), [file.to_json() for file in snapshot.files]
    named = {"namespaces": list(snapshot.namespaces), "read": [asdict(file) for file in snapshot.read]}
    told = {**head, **snapshot.about, "left_out": left_out, "files": files, **named}
    text = json.dumps(told, indent=2, ensure_ascii=False) + "\n"
    # Not by the umask: a group that may write this file could choose what tasks import.
    write_bytes(path, text.encode("utf-8", "backslashreplace"), mode=0o644)


def _write_sources(target: Path, snapshot: Snapshot) -> None:
    with beside(target) as partial:
        partial.mkdir(mode=0o755, exist_ok=True)
        for file in snapshot.files:
            path = partial / file.name
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            mode = 0o755 if file.source.startswith(b"#!") else 0o644  # a script may be called by its path
            if exists(path):  # each try has a new folder, and each name is there once
                raise SlurmGPUError(
                    f"{file.path} cannot be kept in {target}: that file system has another of the workload's modules "
                    f"by this name, as it ignores upper and lower case or the form of accented letters. Rename one of "
                    f"them, or put the run on another file system with --run-dir."
                )
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "wb") as opened:
                opened.write(file.source)
                opened.flush()
                os.fsync(opened.fileno())
        replace(partial, target)


def read(run: Path, digest: str, *, with_sources: bool = True) -> Snapshot:
    """The snapshot of a digest in a run directory. SlurmGPUError if it is missing or damaged."""
    path = run / FOLDER / f"{digest}.json"
    try:
        _expect_ours(run, path, path.with_suffix(""))
        value = json.loads(read_bytes(path))
        if value["format"] != SNAPSHOT_FORMAT or value["version"] != SNAPSHOT_VERSION:
            raise ValueError(f"its format is {value['format']!r} version {value['version']!r}")
        files = tuple(_read_file(path.with_suffix(""), file, with_sources=with_sources) for file in value["files"])
        about = cast(CodeAbout, {key: value[key] for key in value if key not in _OF_THE_FILE})
        left_out, namespaces = (tuple(map(str, value[key])) for key in ("left_out", "namespaces"))
        reads = tuple(ReadFile(**each) for each in value["read"])
        snapshot = Snapshot(files, about, left_out, namespaces, reads)
        if snapshot.digest != digest:
            raise ValueError(f"its files belong to the snapshot {snapshot.digest}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SlurmGPUError(
            f"The snapshot of the code, {path}, cannot be used: {error or type(error).__name__}. "
            f"`slurmgpu resubmit RUN` takes a new one of the current files."
        ) from error
    return snapshot


def _expect_ours(run: Path, *paths: Path) -> None:
    """Raise ValueError unless this user, the run's owner or root owns the files, which this user will import."""
    owners = {os.geteuid(), 0, retried((run / "run.json").lstat).st_uid}
    for path in (run / FOLDER, *paths):
        status = retried(path.lstat)
        if status.st_uid not in owners:
            raise ValueError(f"{path} belongs to {name_in_words(status.st_uid)}, not to you or to the run's owner")
        if status.st_mode & OTHERS_WRITE and not is_trusted(run):
            raise ValueError(f"others may write {path} (mode {stat.S_IMODE(status.st_mode):04o})")


def _read_file(folder: Path, value: Mapping[str, Any], *, with_sources: bool) -> SourceFile:
    file = SourceFile(**{**value, "modules": tuple(value["modules"])}, source=b"")
    if file.name.startswith("/") or ".." in Path(file.name).parts:
        raise ValueError(f"it names {file.name!r}")
    if not with_sources:
        return file
    source = read_bytes(folder / file.name)
    if hashlib.sha256(source).hexdigest() != file.sha256:
        raise ValueError(f"{folder / file.name} was changed")
    return replace_fields(file, source=source)


def digests_in(run: Path) -> list[str]:
    """The digests of the snapshots in a run directory, oldest first."""
    try:
        found = [entry for entry in list_entries(run / FOLDER) if entry.name.endswith(".json")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [entry.name for entry in sorted(found, key=lambda entry: retried(entry.stat).st_mtime)]
    return [name.removesuffix(".json") for name in names if not name.startswith(".")]


def code_of(lines: Sequence[SubmissionLine]) -> Code | None:
    """The code of the last of these submissions; None if there was none."""
    found = lines[-1].get("code") if lines else None
    return found if isinstance(found, dict) and isinstance(found.get("digest"), str) else None


def code_digest(lines: Sequence[SubmissionLine]) -> str | None:
    """The digest of the code of the last of these submissions; None if there was none."""
    found = code_of(lines)
    return None if found is None else found["digest"]


def read_and_changed(files: Iterable[ReadFile]) -> list[str]:
    """The names of the files whose content has changed, or that cannot be read."""
    return [file.name for file in files if _sha256_now(file.path) != file.sha256]


def _sha256_now(path: str) -> str | None:
    try:
        return hashlib.sha256(read_bytes(Path(path))).hexdigest()
    except OSError:
        return None


def short(digest: str, others: Iterable[str]) -> str:
    """The first digits of a digest, enough to distinguish it from `others`."""
    n_digits = _SHOWN_DIGITS
    while n_digits < len(digest) and any(other != digest and other[:n_digits] == digest[:n_digits] for other in others):
        n_digits += 1
    return digest[:n_digits]


def changes(before: Snapshot, now: Snapshot) -> list[str]:
    """Changes in files, versions and image: `a.py differs`, `torch is 2.5, was 2.4`."""
    then, today = (digests_of(each) for each in (before, now))
    found = [f"{name} differs" for name in sorted(then.keys() & today.keys()) if then[name] != today[name]]
    found += [f"{name} is new" for name in sorted(today.keys() - then.keys())]
    paths = {file.name: file.path for file in before.files} | {file.name: file.path for file in before.read}
    gone = {name for name, path in paths.items() if not os.path.exists(path)}  # no error for EACCES
    for name in sorted(then.keys() - today.keys()):
        found.append(f"{name} is {'gone' if name in gone else 'no longer imported'}")
    of_former, of_now = before.about.get("functions", {}), now.about.get("functions", {})
    found += [
        f"`{role}` is another function"
        for role, each in of_now.items()
        if role not in of_former or of_former[role]["same"] != each["same"]
    ]
    return found + _changed_versions(before.about, now.about)


def digests_of(snapshot: Snapshot) -> dict[str, str]:
    """The digests of a snapshot's files, and of those that its code reads, by their names."""
    return {file.name: file.digest for file in snapshot.files} | {file.name: file.sha256 for file in snapshot.read}


def _changed_versions(before: CodeAbout, now: CodeAbout) -> list[str]:
    """Changes of distributions, Python and image between two submissions."""
    found = []
    then, today = before.get("distributions") or {}, now.get("distributions") or {}
    for name in sorted(then.keys() & today.keys()):
        if then[name] != today[name]:
            found.append(f"{name} is {today[name]}, was {then[name]}")
    if before.get("python") != now.get("python"):
        found.append(f"Python is {now.get('python')}, was {before.get('python')}")
    if before.get("image") != now.get("image"):
        found.append("the image differs" if before.get("image") and now.get("image") else "only one has an image")
    return found


def digest_of(source: bytes, path: str, tree: ast.Module | None = None) -> str:
    """`tree_digest` of a source, computed once in this process: a plan asks for it twice, a notebook at each plan."""
    key = hashlib.sha256(source).digest()
    if (known := _digests.get(key)) is None:
        known = _digests[key] = tree_digest(source, path, tree)
    return known


def tree_digest(source: bytes, path: str, tree: ast.Module | None = None) -> str:
    """The digest of a file's syntax tree, the same in each version of Python. SyntaxError if it cannot be parsed.

    Docstrings count, comments and layout do not. `tree` is given if the source was parsed before.
    """
    words: list[str] = []
    try:
        _spell(tree or ast.parse(source, path), words)
    except RecursionError:  # an expression of a thousand operators
        return hashlib.sha256(source).hexdigest()[:DIGITS]
    return hashlib.sha256("\0".join(words).encode("utf-8", "backslashreplace")).hexdigest()[:DIGITS]


def _spell(node: object, words: list[str]) -> None:
    """Append a syntax tree as words; the output of ast.dump depends on the version of Python.

    Empty texts in f-strings are skipped: Python 3.12.1 adds one at the end of `f"{x:{width}}"`.
    """
    if isinstance(node, ast.AST):
        words.append(f"({type(node).__name__}")
        for name, value in ast.iter_fields(node):
            if isinstance(node, ast.JoinedStr) and name == "values":
                value = [each for each in value if not (isinstance(each, ast.Constant) and each.value == "")]
            if name not in _LEFT_OUT and (isinstance(node, ast.Constant) or (value is not None and value != [])):
                words.append(name)
                _spell(value, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for each in node:
            _spell(each, words)
        words.append("]")
    else:  # hex: Python refuses to print very long decimal numbers
        words.append(f"{type(node).__name__} {hex(node) if type(node) is int else repr(node)}")
