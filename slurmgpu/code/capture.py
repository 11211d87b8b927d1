"""Take a snapshot of the user's modules that a run computes with, as they are on disk now."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmgpu import __version__
from slurmgpu.code import names_in_shell
from slurmgpu.code.snapshots import ReadFile, Snapshot, SourceFile
from slurmgpu.code.tracer import CONFIGURATIONS, NAMED, PROGRAMS, TEXTS, Tracer
from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.submissions import CodeAbout, Git
from slurmgpu.util.env_info import PACKAGES

LONG_TEXT = 4096
_GIT_PATIENCE_S = 20


def snapshot_of(
    plan: Plan,
    container: ContainerRecord | None,
    git: Git | None,
    *,
    also: Iterable[str] = (),
    former: Iterable[SourceFile] = (),
    texts: Iterable[str] = (),
    formerly_read: Iterable[ReadFile] = (),
) -> Snapshot:
    """A snapshot of a run's user modules as they are now. SlurmGPUError names file and line of a syntax error.

    `git` is the state of their repository. `also` are other modules that were seen to be imported. `former` are the
    files of an earlier snapshot; their modules are traced, too. `texts` are those of functions that are in no module,
    and `formerly_read` the files that an earlier snapshot's code read.
    """
    packages = None if container is None else [(str(name), str(path)) for name, path in container["packages"]]
    former = list(former)
    tracer = Tracer(Path(plan.search_path), packages, former)
    tracer.inputs = {str((file["source"] or file)["path"]) for file in plan.input["files"]}
    tracer.add_named(plan.workload.rpartition(":")[0], needed=True)
    before = ""
    for text in plan.texts():
        if names_in_shell.is_before_code(before):
            tracer.add_shell_code(text)
        elif text.startswith("CUDA") and names_in_shell.sets_gpus(text):  # of `env`
            tracer.choosing_gpus.append(text)
        if text.startswith("--"):
            tracer.options.add(text.partition("=")[0].lstrip("-").replace("-", "_"))
        option, before = before if "=" not in text else text.partition("=")[0], text
        if len(text) < LONG_TEXT:
            if found := NAMED.fullmatch(text):
                tracer.add_named(found[1], needed=False)
            # The text of `--config=small.yaml`. Of others it is more likely that a task writes them: `--log=log.txt`.
            if not names_in_shell.is_for_output(option):
                tracer.add_text(text.rpartition("=")[2], (Path(plan.search_path),), CONFIGURATIONS | PROGRAMS)
            if text.startswith("PYTHONPATH="):  # of `env`
                tracer.add_folders(names_in_shell.folders_in(text.partition("=")[2]), is_first=True)
    if isinstance(environ := plan.settings.get("env"), Mapping):
        tracer.add_folders(names_in_shell.folders_in(str(environ.get("PYTHONPATH", ""))), is_first=False)
        if names_in_shell.sets_gpus(f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')}"):
            tracer.choosing_gpus.append("env under [settings]")
    for text in texts:
        tracer.add_text(text, (Path(plan.search_path),), CONFIGURATIONS | PROGRAMS | TEXTS)
    for file in formerly_read:
        tracer.add_text(file.path, (Path(plan.search_path),), frozenset({Path(file.path).suffix}))
    for script in plan.scripts:
        tracer.add_script(Path(script))
    for name in sorted({*also, *(name for file in former for name in file.modules)}):
        tracer.add_module(name, needed=False)
    files = tracer.follow()
    read = tracer.read_files(files)
    about: CodeAbout = {
        "python": platform.python_version(),
        "distributions": _versions(tracer.where.bound_in if container else {*tracer.where.foreign, *PACKAGES}),
        "image": container["identity"].get("sha256") if container else None,
        "git": git,
    }
    return Snapshot(files, about, tuple(tracer.sentences(read)), tracer.namespaces(files), read)


def git_state(folder: Path) -> Git | None:
    """The commit of a folder's repository and whether its tree is dirty; None without a repository or git."""
    try:
        commit = _git_output(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git_output(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git_output(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_GIT_PATIENCE_S
    )
    return done.stdout.strip()


def _versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of these packages' distributions and of slurmgpu."""
    found = {"slurmgpu": __version__}
    unknown = set()
    for name in names:
        try:
            found[name.replace("_", "-").lower()] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in PACKAGES:
                unknown.add(name)
    # A package such as `yaml` may have a distribution of another name.
    of_packages = importlib.metadata.packages_distributions() if unknown else {}
    for name in unknown:
        for distribution in of_packages.get(name, ()):
            found[distribution] = importlib.metadata.version(distribution)
    return dict(sorted(found.items()))
