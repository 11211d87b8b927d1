"""`check`: one line for each thing that a run needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from slurmgpu import __version__
from slurmgpu.config import RunFile, read_run_file
from slurmgpu.errors import SlurmGPUError
from slurmgpu.executors import commands
from slurmgpu.planning import allocate, draft_run


def run_checks(run_file: Path) -> int:
    """Print a line for each check; 2 if one failed, else 0."""
    config: list[RunFile] = []

    def versions() -> str:
        import importlib.metadata as metadata

        names = ("submitit", "h5py", "numpy")
        return f"slurmgpu {__version__}, " + ", ".join(f"{name} {metadata.version(name)}" for name in names)

    def file() -> str:
        config.append(read_run_file(run_file))
        return str(run_file)

    def plan() -> str:
        # In a place of its own: an existing run directory is no fault of the run file.
        with draft_run(run_file, run_dir=Path(f".slurmgpu-check-{id(config)}")) as draft:
            return f"{draft.plan.n_items:,} items, {draft.plan.n_shards:,} shards, workload {draft.plan.workload}"

    def resources() -> str:
        wanted = config[0].resources
        found = allocate(wanted, None)
        return (
            f"{found.n_tasks} tasks of {found.gpus_per_task} GPUs, executor {wanted.executor}, device {wanted.device}"
        )

    def executor() -> str:
        if config[0].resources.executor != "slurm":
            return f"{config[0].resources.executor}: no Slurm is needed"
        limits = f"MaxArraySize {commands.max_array_size()}"
        return f"{commands.run('sbatch', '--version').strip()}, {limits}"

    checks = {
        "versions": versions,
        "run file": file,
        "plan": plan,
        "resources": resources,
        "executor": executor,
    }
    console = Console(highlight=False, emoji=False, soft_wrap=True)
    results = [
        _line(console, name, check) for name, check in checks.items() if name in ("versions", "run file") or config
    ]
    return 0 if all(results) and config else 2


def _line(console: Console, name: str, check: Callable[[], str]) -> bool:
    try:
        console.print(f"[green]✓[/] {name:<10} {escape(check())}")
    except SlurmGPUError as error:
        console.print(f"[red]✗[/] {name:<10} {escape(' '.join(str(error).split()))}")
        return False
    return True
