"""Binds and variables of a program in a container, from which the runtime makes the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import slurmgpu
from slurmgpu.containers import IMAGE, INSIDE
from slurmgpu.containers.environment import inner_environment
from slurmgpu.containers.folders import task_folder
from slurmgpu.containers.links import Known, names, upwards
from slurmgpu.containers.runtime import Start, runtime_named
from slurmgpu.containers.settings import Bind, Container, home_folder


def exec_command(
    container: Container,
    inner: Sequence[str],
    *,
    image: Path,
    binds: Sequence[Bind],
    gpus: bool,
    folder: Path,
    environ: Mapping[str, str],
    extra_env: Mapping[str, str],
    scratch: Path,
) -> tuple[list[str], dict[str, str]]:
    """The command that runs the image's Python with the arguments `inner` in `folder`, and its environment.

    `image`, `binds` and `scratch` are those of this node, which `node.prepare` has checked. Only a few variables of
    `environ`, the task's environment, are set inside; all of `extra_env` are, and override others.
    """
    runtime = runtime_named(container.runtime)
    needed = needed_binds([*binds, Bind(str(scratch), str(scratch))])
    inside = inner_environment(container, environ, {**extra_env, IMAGE: image.name}, scratch)
    _drop_invisible(inside, container, needed, runtime.shared)
    start = Start(
        container=container,
        image=image,
        argv=(container.python, *inner),
        binds=tuple(needed),
        gpus=gpus,
        folder=folder,
        environ=inside,
        home=home_folder(environ),
        own_folder=task_folder(scratch),
    )
    return runtime.command(start, environ)


def needed_binds(binds: Sequence[Bind]) -> list[Bind]:
    """The binds, plus binds for the targets of links on their paths, parents first, without redundant ones."""
    known: Known = {}
    kept: dict[str, Bind] = {}
    for bind in sorted(_where_links_lead(binds, known), key=lambda bind: (bind.dst.count("/"), bind.dst)):
        above = next((kept[folder] for folder in upwards(bind.dst) if folder in kept), None)
        if above is None or not _brings(above, bind, known):
            kept[bind.dst] = bind
    return list(kept.values())


def _where_links_lead(binds: Sequence[Bind], known: Known) -> list[Bind]:
    """One bind for each place inside; the target of a link is bound too, unless something else is bound there."""
    found: dict[str, Bind] = {}
    for bind in binds:
        _add(found, bind)
    for bind in list(found.values()):
        real = names(bind.src, known)[-1]
        _, *others = names(bind.dst, known)
        if others and others[-1] == real:
            for name in others:
                given = found.get(name)
                if given is None or names(given.src, known)[-1] == real:
                    _add(found, Bind(given.src if given else real, name, bind.read_only))
    return list(found.values())


def _add(found: dict[str, Bind], bind: Bind) -> None:
    # A folder that is bound twice is read-only if both binds are.
    read_only = bind.read_only and found.get(bind.dst, bind).read_only
    found[bind.dst] = Bind(bind.src, bind.dst, read_only)


def _brings(above: Bind, bind: Bind, known: Known) -> bool:
    rest = _below(bind.dst, above.dst) or ""
    *_, place = names(above.src.rstrip("/") + rest, known)
    if place != names(bind.src, known)[-1]:
        return False
    # The runtime silently ignores a mount on a link within another mount: the link is seen instead.
    through_link = place != names(above.src, known)[-1].rstrip("/") + rest
    return through_link or bind.read_only == above.read_only


def _below(path: str, folder: str) -> str | None:
    folder = folder.rstrip("/")
    return path[len(folder) :] if path == folder or path.startswith(f"{folder}/") else None


def _drop_invisible(
    inside: dict[str, str], container: Container, binds: Sequence[Bind], shared: tuple[str, ...]
) -> None:
    """Drop TMPDIR if it is not visible inside: `mktemp` would fail, and Python would silently use /tmp."""
    path = inside.get("TMPDIR")
    if path is None or "TMPDIR" in container.env:
        return
    seen = [bind.dst for bind in binds if not bind.read_only] + ([] if container.strict else list(shared))
    if path not in shared and not any(_below(path, folder) is not None for folder in seen):
        del inside["TMPDIR"]


def package_binds(packages: Sequence[tuple[str, str]]) -> list[Bind]:
    """Read-only binds of this slurmgpu and of the `packages`, names and paths, below /opt/slurmgpu."""
    own = ("slurmgpu", str(Path(slurmgpu.__file__).resolve().parent))
    return [Bind(path, f"{INSIDE}/{name}", read_only=True) for name, path in (own, *packages)]


def python_path(packages: Sequence[tuple[str, str]]) -> str:
    """The PYTHONPATH for the packages of `package_binds`."""
    folders = [str(Path(INSIDE, name).parent) for name, _ in packages]
    return ":".join(dict.fromkeys([INSIDE, *folders]))
