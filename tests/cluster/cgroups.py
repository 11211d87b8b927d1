"""Memory limits: where this machine mounts cgroups, what cgroup.conf says about it, cleaning up afterwards."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .processes import wait_for

CONTROLLERS = (
    "freezer",
    "memory",
)  # of v1: what proctrack/cgroup and task/cgroup use with the settings below
LIMITS = """\
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
"""


@dataclass(frozen=True)
class Cgroups:
    """What the cluster can use: `conf` is cgroup.conf's text; with version 0, `why_not` is a sentence."""

    version: int
    conf: str = ""
    why_not: str = ""


def prepare(name: str, links: Path, nodes: tuple[str, ...], slurm_version: tuple[int, int]) -> Cgroups:
    """Make the cluster's own directories in the machine's hierarchies, if it has any that can be used."""
    v1, v2 = _mounts()
    if all(controller in v1 for controller in CONTROLLERS):
        return _prepare_v1(name, links, v1)
    if v2 is not None:
        return _prepare_v2(v2, nodes, slurm_version)
    return Cgroups(0, why_not="no memory limits: neither cgroup v2 nor v1's memory and freezer are mounted here")


def remove(name: str, nodes: tuple[str, ...], version: int) -> None:
    """Remove the cgroups that `prepare` and Slurm made, whose processes must be gone; v2's system.slice stays."""
    v1, v2 = _mounts()
    if version == 1:
        owned = [v1[controller] / name for controller in CONTROLLERS]
    elif version == 2 and v2 is not None:
        owned = [_scope(v2, node) for node in nodes]
    else:
        owned = []
    for directory in owned:
        # A cgroup is busy until the kernel is through with its last process: a moment after that one's end.
        wait_for(partial(_removed, directory), f"the cgroup {directory} could be removed", timeout_s=120)


def _prepare_v1(name: str, links: Path, mounts: dict[str, Path]) -> Cgroups:
    # Slurm builds its path from CgroupMountpoint, the controller and the node's name, and node names are the same
    # in each cluster. Links to directories of our own keep two clusters, or an earlier one's remains, apart.
    links.mkdir()
    for controller in CONTROLLERS:
        own = mounts[controller] / name
        try:
            own.mkdir()
        except OSError as error:
            return Cgroups(0, why_not=f"no memory limits: {own} cannot be made ({error.strerror})")
        (links / controller).symlink_to(own)
    return Cgroups(1, f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={links}\n{LIMITS}")


def _prepare_v2(mount: Path, nodes: tuple[str, ...], slurm_version: tuple[int, int]) -> Cgroups:
    if "memory" not in (mount / "cgroup.controllers").read_text().split():
        return Cgroups(0, why_not=f"no memory limits: the memory controller is not in {mount}/cgroup.controllers")
    used = [scope for scope in (_scope(mount, node) for node in nodes) if scope.exists()]
    if used:
        # The path has the node's name in it, but not the cluster's: two clusters' jobs would share limits.
        return Cgroups(0, why_not=f"no memory limits: another cluster uses {used[0]}")
    slice_ = _scope(mount, nodes[0]).parent
    try:
        slice_.mkdir(exist_ok=True)
        for directory in (mount, slice_):
            # pids is not needed, but Slurm 22.05 does not see the last name of cgroup.controllers.
            (directory / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError as error:
        # EBUSY: in a container, whose own processes are in what looks like the root. EROFS, EACCES: not ours.
        return Cgroups(0, why_not=f"no memory limits: {mount} cannot be set up ({error.strerror})")
    # Without systemd's help Slurm itself must enable the controllers; the option for that was renamed.
    enable = "EnableControllers" if slurm_version >= (23, 11) else "CgroupAutomount"
    return Cgroups(2, f"CgroupPlugin=cgroup/v2\nCgroupMountpoint={mount}\nIgnoreSystemd=yes\n{enable}=yes\n{LIMITS}")


def _scope(mount: Path, node: str) -> Path:
    """Where Slurm puts a node's steps under cgroup v2."""
    return mount / "system.slice" / f"{node}_slurmstepd.scope"


def _mounts() -> tuple[dict[str, Path], Path | None]:
    """v1's controllers and where they are mounted, and v2's mount point (as proc(5) describes mountinfo)."""
    v1: dict[str, Path] = {}
    v2 = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind == "cgroup":
            v1.update(dict.fromkeys(options.split(","), Path(mount.split()[4])))
        elif kind == "cgroup2":
            v2 = Path(mount.split()[4])
    return v1, v2


def _removed(top: Path) -> bool:
    """Try to remove a cgroup and those below it; false while one is busy."""
    for directory, _, _ in os.walk(top, topdown=False):
        try:
            Path(directory).rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
    return True
