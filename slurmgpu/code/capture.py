"""Take a snapshot of the user's modules that a run computes with, as they are on disk now."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurmgpu import __version__
from slurmgpu.code import names_in_shell
from slurmgpu.code.file_kinds import CONFIGURATIONS, PROGRAMS
from slurmgpu.code.named_files import NAMED
from slurmgpu.code.snapshots import Snapshot
from slurmgpu.code.trace_notes import ARRAY_ID
from slurmgpu.code.tracer import Scope, Tracer
from slurmgpu.containers.settings import ContainerRecord
from slurmgpu.run.frozen_plan import Plan
from slurmgpu.run.mapped_function import MAPPED
from slurmgpu.run.submissions import CodeAbout, Git
from slurmgpu.util.env_info import PACKAGES

_LONG_TEXT = 4096
_GIT_PATIENCE_S = 20


def snapshot_of(
    plan: Plan,
    container: ContainerRecord | None,
    git: Git | None,
    *,
    also: Iterable[str] = (),
    texts: Iterable[str] = (),
    former: Snapshot | None = None,
) -> Snapshot:
    """A snapshot of a run's user modules as they are now.

    `git` is the state of their repository. `also` are further modules to include, and `texts` are texts in the source
    of functions that are in no module. Files of a `former` snapshot are looked for, too. SlurmGPUError if a file that
    the workload needs is missing, cannot be read, or is not valid Python.
    """
    script = plan.settings.get("argv", [])[:1] if plan.workload == MAPPED else []  # tasks do not read that file
    base, settings = Path(plan.search_path), [text for text in plan.texts() if text not in script]
    scope = Scope(
        base,
        None if container is None else [(str(name), str(path)) for name, path in container["packages"]],
        inputs={file["path"] for file in plan.named_files},
    )
    options = {_option_in(text).lstrip("-").replace("-", "_") for text in settings if text.startswith("--")}
    former_files, former_read = (former.files, former.read) if former else ((), ())
    tracer = Tracer(scope, former_files, options)
    tracer.code.add_named(plan.workload.rpartition(":")[0], needed=True)
    _add_settings(tracer, settings)
    if isinstance(environ := plan.settings.get("env"), Mapping):
        _add_environment(tracer, environ)
    for text in texts:
        tracer.named.add_text(text, (base,))
    for read in former_read:
        tracer.read.add(Path(read.path))
    for number, script in enumerate(plan.scripts):
        tracer.code.add_script(Path(script), is_started=number == 0)
    for name in sorted({*also, *(name for file in former_files for name in file.modules)}):
        tracer.code.add_module(name)
    trace = tracer.finish()
    about: CodeAbout = {
        "python": platform.python_version(),
        "distributions": _versions(trace.packages if container else {*trace.packages, *PACKAGES}),
        "image": container["identity"].get("sha256") if container else None,
        "git": git,
    }
    return Snapshot(trace.files, about, trace.notes, trace.namespaces, trace.read)


def _add_settings(tracer: Tracer, texts: Iterable[str]) -> None:
    """Add the files and modules that texts in the settings name, such as a command line, and the variables they set."""
    before, texts = "", list(texts)
    if "srun" in texts and "--overlap" not in texts:
        tracer.scope.notes.waiting_steps["The command"] = None
    for text in texts:
        if names_in_shell.is_before_code(before):
            tracer.shells.add_code(text)
        elif text.startswith("CUDA") and names_in_shell.sets_gpus(text):  # an argument of the program `env`
            tracer.scope.notes.choosing_gpus.append(text)
        elif text.startswith(f"{ARRAY_ID}="):
            tracer.scope.notes.sets_array_id = True
        option, before = before if "=" not in text else _option_in(text), text
        if len(text) < _LONG_TEXT:
            if found := NAMED.fullmatch(text):
                tracer.code.add_named(found[1])
            # The value of `--config=small.yaml`. Files with other suffixes are more likely outputs: `--log=log.txt`.
            if not names_in_shell.is_for_output(option):
                tracer.named.add_text(text.rpartition("=")[2], (tracer.scope.folder,), CONFIGURATIONS | PROGRAMS)
            if text.startswith("PYTHONPATH="):  # an argument of `env`
                tracer.code.search(names_in_shell.folders_in(text.partition("=")[2]), is_first=True)


def _add_environment(tracer: Tracer, environ: Mapping[str, Any]) -> None:
    """Add the files and modules that variables under `env` name."""
    tracer.code.search(names_in_shell.folders_in(str(environ.get("PYTHONPATH", ""))), is_first=False)
    if names_in_shell.sets_gpus(f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')}"):
        tracer.scope.notes.choosing_gpus.append("env under [settings]")
    tracer.scope.notes.sets_array_id |= ARRAY_ID in environ


def _option_in(text: str) -> str:
    """The part of `--option=value` before its value."""
    return text.partition("=")[0]


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


def version_of(name: str) -> str:
    """The version of a distribution; quicker than importlib.metadata.version, which also parses the README."""
    distribution = importlib.metadata.distribution(name)
    head, _, _ = (distribution.read_text("METADATA") or "").partition("\n\n")
    found = re.search(r"^Version: *(\S+)", head, re.MULTILINE)
    return found[1] if found else distribution.version


def _versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of these packages' distributions and of slurmgpu."""
    found = {"slurmgpu": __version__}
    unknown = set()
    for name in names:
        try:
            found[name.replace("_", "-").lower()] = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in PACKAGES:
                unknown.add(name)
    # A package such as `yaml` may have a distribution of another name.
    of_packages = importlib.metadata.packages_distributions() if unknown else {}
    for name in unknown:
        for distribution in of_packages.get(name, ()):
            found[distribution] = version_of(distribution)
    return dict(sorted(found.items()))
