"""The files that `init` writes: a commented run file, or the site file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from slurmgpu.cli.console import result
from slurmgpu.containers.registry import DEFAULT, runtime_named
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.site_file import site_path
from slurmgpu.slurm.survey import Survey, survey
from slurmgpu.workload import Template, template_of, translator_of

TEMPLATE = """\
# A run file of slurmgpu; every key is in docs/reference/run-file.md.
{input:<33}  # a path, a list of paths or a glob: .jsonl, .csv, .parquet, .txt or .h5
{run_dir:<33}  # default: runs/<this file's stem>
# seed = 0
# shard_items = 1024               # default: from the input's size alone, never from the number of GPUs
# auto_resubmit = 2                # how often the merge job may resubmit what is missing
# on_end = "mail -s $SLURMGPU_NAME:$SLURMGPU_STATE ada@example.org"   # run when the run ends, report.json on stdin

[workload]
use = "{use}"
{batch}
[settings]                         # what the workload's __init__ takes
{settings}
[resources]
gpus = {gpus}                           # held at once
{array:<33}  # spread over tasks of one GPU; without it one task holds all of them
# gpus_per_task = 4                # with array: GPUs of each task
# gpu_type = "a100"                # as Slurm calls it
# processes = "per-gpu"            # a process for each GPU of a task; default: the workload's choice
# nodes_per_task = 2               # spread each task over nodes; needs processes = "per-gpu"
# device = "cpu"                   # compute on CPUs even if GPUs are allocated

# [container]                      # without it tasks run in the Python that submits
# image = "image.sif"              # an {title} image, with what the workload imports
# binds = ["/data", "/scratch/ada:/scratch"]
# env = {{HF_HOME = "/data/hf", HF_TOKEN = true}}   # true: the value on the task's node

[slurm]                            # sbatch's own names, passed through
# partition = "gpu"
# time = "04:00:00"                # the walltime of a task; default: the site file's, else the partition's
# mem = "32G"

[merge]                            # the same for the merge job, which needs no GPU
# partition = "cpu"
"""


SITE_TEMPLATE = """\
# The site file: defaults for all of your runs on this cluster.
# Run files override it, and command-line options override both.
# Written by `slurmgpu init --site` from Slurm's answers on the cluster {cluster}.

[slurm]                            # sbatch's own names
{slurm}
[merge]                            # the merge job, which needs no GPU
{merge}
[resources]
{resources}
[container]                        # relative paths are relative to this file
# image = "/path/to/image.sif"
# binds = ["/data"]
# scratch = "{scratch}"            # a folder on each node for images and caches; default: $TMPDIR, else /tmp
"""


def write_run_file(workload: str | None, path: Path) -> Path:
    """Write a commented run file. SlurmGPUError if the file exists."""
    _refuse_to_overwrite(path)
    path.write_text(run_file_template(workload, path.stem), "utf-8")
    return path


def write_translated(use: str | None, arguments: str, path: Path) -> None:
    """Write the run file that stands for the arguments of a replaced script, and print what each became."""
    translate = translator_of(use, path.parent) if use else None
    if use is None or translate is None:
        raise SlurmGPUError("--from-args is for tracin: `slurmgpu init tracin --from-args ARGS`.")
    found = translate(arguments, path.parent, path.stem)
    items = path.with_name(f"{path.stem}.tests.jsonl")
    written = [path] if found.items is None else [path, items]
    _refuse_to_overwrite(*written)
    if found.items is not None:
        items.write_text("".join(f"{json.dumps(item, ensure_ascii=False)}\n" for item in found.items), "utf-8")
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in found.settings.items())
    path.write_text(_filled(use, Template(settings, found.input, **found.resources), path.stem), "utf-8")
    width = max(len(flag) for flag, _ in found.lines)
    for flag, said in found.lines:
        result(f"{flag:<{width}}  {said}")
    result(f"{' and '.join(map(str, written))}: written. Look at it, then: slurmgpu submit {path} --dry-run")


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise SlurmGPUError(f"{path} exists; name another file with -o, or remove it.")


def write_site_file(path: Path | None) -> Path:
    """Write the site file, by default where every run looks for it. SlurmGPUError if the file exists."""
    path = path or site_path()
    if path.exists():
        raise SlurmGPUError(f"{path} exists; edit it, or write a new proposal elsewhere with -o FILE.")
    text = site_file_template(survey())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def site_file_template(found: Survey) -> str:
    """A commented site file: proposed values, with the alternatives in comments."""
    with_gpus = [(p.name, p.described) for p in found.gpu_partitions]
    without = [(p.name, p.described) for p in found.partitions if not p.gpus]
    account = [(name, "the default one" if n == 0 else "") for n, name in enumerate(found.accounts)]
    # No GPU type is proposed: a run that takes any type starts sooner.
    types = _choices("gpu_type", [(name, "") for name in found.gpu_types], n_taken=0)
    slurm = _choices("partition", with_gpus) + _choices("account", account)
    slurm += _choices("qos", [(name, "") for name in found.qos], n_taken=0)
    slurm += '# time = "04:00:00"\n# setup = ["module load ' + DEFAULT + "\"]   # what a job's script runs first\n"
    return SITE_TEMPLATE.format(
        cluster=found.cluster,
        slurm=slurm if with_gpus else f"# No partition has GPUs.\n{slurm}",
        merge=_choices("partition", without) or "# partition, account, qos and reservation are those of [slurm]\n",
        resources=types or '# gpu_type = "a100"\n',
        scratch=found.scratch,
    )


def _choices(key: str, values: Sequence[tuple[str, str]], n_taken: int = 1) -> str:
    """A line for each value with a remark; those after the first `n_taken` are commented out."""
    lines = []
    for n, (value, word) in enumerate(values):
        text = f'{"" if n < n_taken else "# "}{key} = "{value}"'
        lines.append(f"{text:<34} # {word}\n" if word else f"{text}\n")
    return "".join(lines)


def run_file_template(workload: str | None, stem: str = "slurmgpu") -> str:
    """A commented run file for a workload, or without one for a class of the user's own."""
    if workload is None:
        return _filled("my_workload.py:MyWorkload", Template('# field = "text"\n'), stem)
    return _filled(workload, template_of(workload, Path.cwd()), stem)


def _filled(use: str, proposed: Template, stem: str) -> str:
    settings = proposed.settings
    return TEMPLATE.format(
        title=runtime_named(DEFAULT).title,
        run_dir=f'# run_dir = "runs/{stem}"',
        use=use,
        settings=settings if isinstance(settings, str) else settings.read_text("utf-8"),
        input=f"input = {json.dumps(proposed.input)}" if proposed.input else '# input = "items.jsonl"',
        batch="# batch_size = 64                  # overrides the workload's own\n" if proposed.input else "",
        gpus=proposed.gpus,
        array="array = true" if proposed.array else "# array = true",
    )
