"""The container of a run in run.json, and the error for a container that cannot work."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

from slurmgpu.errors import SlurmGPUError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


class ContainerError(Exception):
    """The container cannot work here. Nothing was claimed, so nothing is lost.

    `kind` is the failure class; `node_at_fault`: it may work on another node. `is_damage`: the image is damaged, or a
    copy of it.
    """

    def __init__(
        self, message: str, *, kind: str = "container", node_at_fault: bool = False, is_damage: bool = False
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.node_at_fault = node_at_fault
        self.is_damage = is_damage


def other_image(path: Path, difference: str) -> ContainerError:
    """The error if the image is not the one in the plan."""
    return ContainerError(
        f"the image {path} is not the one that this run was planned with: {difference}. "
        f"Restore the old image, or plan a new run with this one"
    )


@dataclass(frozen=True)
class Bind:
    """A file or folder of the node in the container; paths may hold `$VARIABLES` and `~` of the node."""

    src: str
    dst: str
    read_only: bool = False

    @classmethod
    def parse(cls, value: str | Mapping[str, Any], folder: Path | None = None) -> Bind:
        """A bind from SRC[:DST[:ro]] or a table of src, dst and ro; a relative SRC is relative to `folder`."""
        if isinstance(value, str):
            parts = value.split(":")
            if len(parts) > 3 or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
                raise SlurmGPUError(
                    f"bind {value!r} is not of the form SRC, SRC:DST or SRC:DST:ro. Write one text per bind; "
                    f'for a path with a colon write {{src = "…", dst = "…", ro = true}}.'
                )
            src, dst, read_only = parts[0], ":".join(parts[1:2]), parts[2:] == ["ro"]
        else:
            src, dst, read_only = value["src"], value.get("dst") or "", bool(value.get("ro"))
        if not src:
            raise SlurmGPUError(f"bind {value!r} names no source; expected SRC:DST.")
        if not _rooted(src):
            if folder is None:
                raise SlurmGPUError(f"bind {value!r}: the source must be an absolute path, but {src!r} is not.")
            src = whole_path(src, folder)
        if dst and not _rooted(dst):
            hint = f" For a read-only bind write {src}:{src}:ro." if dst in ("ro", "rw") else ""
            raise SlurmGPUError(
                f"bind {value!r}: the path in the container must be absolute, but {dst!r} is not.{hint}"
            )
        return cls(src, dst or src, read_only)

    def expanded(self, environ: Mapping[str, str]) -> Bind:
        """The bind on this node, `$VARIABLES` and `~` filled in; ContainerError if a variable is not set here."""
        return Bind(expand(self.src, environ), expand(self.dst, environ), self.read_only)


def whole_path(path: str, folder: Path) -> str:
    """`path`, relative to `folder` unless it is absolute or begins with a `$VARIABLE` or `~` of the node."""
    return path if _rooted(path) else os.path.normpath(folder / path)


def _rooted(path: str) -> bool:
    return path.startswith(("/", "$", "~"))


def home_folder(environ: Mapping[str, str]) -> str:
    """The home of a process that has this environment."""
    return environ.get("HOME") or os.path.expanduser("~")


def expand(path: str, environ: Mapping[str, str], what: str = "the bind") -> str:
    """`path` with `$VARIABLES` and `~` filled in; ContainerError, in which `what` names it, if that cannot be done."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise ContainerError(
                f"{what} {path} names the variable {match[1]}, which is not set on this node", node_at_fault=True
            )
        return environ[match[1]]

    home = home_folder(environ)
    filled = VARIABLE.sub(value, home + path[1:] if path == "~" or path.startswith("~/") else path)
    if not filled.startswith("/"):
        raise ContainerError(f"{what} {path} becomes {filled!r} on this node; expected an absolute path")
    return os.path.normpath(filled)


class Identity(TypedDict, total=False):
    """The identity of an image: see `Runtime.identify`."""

    kind: str
    sha256: str
    partition_sha256: str | None
    uuid: str | None
    arch: str | None
    labels: dict[str, str]
    created: str | None
    size_bytes: int | None
    mtime_ns: int


class BindRecord(TypedDict):
    """A bind in run.json."""

    src: str
    dst: str
    read_only: bool


class ContainerRecord(TypedDict):
    """The content of "container" in run.json."""

    image: str
    runtime: str
    python: str
    binds: Sequence[BindRecord]
    env: Mapping[str, str | bool]
    home: str
    stage: str
    scratch: str | None
    strict: bool
    identity: Identity
    packages: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Container:
    """The image in which a run's workers run, and what they see of the node.

    `image` is absolute. `env` values are texts, `True` (the task's own value) or `False` (not set). `identity` is that
    of the image when the run was planned. `packages` are the names and paths of folders and files that the workload is
    imported from.
    """

    image: str
    runtime: str = "apptainer"
    python: str = "python3"
    binds: tuple[Bind, ...] = ()
    env: Mapping[str, str | bool] = field(default_factory=dict)
    home: str = "host"
    stage: str = "none"
    scratch: str | None = None
    strict: bool = False
    identity: Identity = field(default_factory=Identity)
    packages: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> ContainerRecord:
        """The content of "container" in run.json."""
        return cast(ContainerRecord, asdict(self))

    @classmethod
    def from_json(cls, value: ContainerRecord) -> Container:
        """The container that run.json describes."""
        binds = tuple(Bind(**bind) for bind in value["binds"])
        packages = tuple((name, path) for name, path in value["packages"])
        return cls(**{**value, "binds": binds, "packages": packages})  # type: ignore[arg-type]  # the other values as they are


def check_env(env: Mapping[str, str | bool]) -> None:
    """Raise SlurmGPUError for variables that [container] env cannot set."""
    for name, value in env.items():
        # With one name that no shell takes apptainer drops all variables, with exit code 0.
        if not NAME.match(name):
            raise SlurmGPUError(
                f"[container] env: {name!r} is not a valid name of a variable: use letters, digits and underscores, "
                f"and no digit at the beginning."
            )
        if name == "HOME":
            raise SlurmGPUError('[container] env: HOME cannot be set; home = "private" gives an empty one.')
        if isinstance(value, str) and "\0" in value:
            raise SlurmGPUError(f"[container] env: the value of {name} holds a NUL character.")
