"""The files that `init` writes: a commented run file, or the site file."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.cli.console import result
from slurmgpu.containers.runtime import DEFAULT_RUNTIME, runtime_named
from slurmgpu.errors import SlurmGPUError
from slurmgpu.loader.build import template_of, translator_of
from slurmgpu.plan.site_file import group_path, read_site, site_path
from slurmgpu.slurm import commands
from slurmgpu.slurm.survey import Survey, survey
from slurmgpu.util.atomic_files import write_new
from slurmgpu.workload import Template

TEMPLATE = """\
# A run file of slurmgpu; every key is in docs/reference/run-file.md.
{input:<33}  # a path, a list of paths or a glob: .jsonl, .csv, .parquet, .txt or .h5
{run_dir:<33}  # default: runs/<this file's stem>
# seed = 0
# shard_items = 1024               # default: by the input's size, and for a small one by the tasks
# auto_resubmit = 2                # how often the merge job may resubmit what is missing
# on_end = "mail -s $SLURMGPU_NAME:$SLURMGPU_STATE ada@example.org"   # run when the run ends, report.json on stdin

[workload]
use = {use}
{batch}
[settings]                         # what the workload's __init__ takes
{settings}
[resources]
{executor:<33}  # "slurm"; "local": this machine; "debug": this process, for breakpoint()
{gpus:<33}  # held at once; 0: on CPUs; "all": those of this machine
{array:<33}  # spread over tasks of one GPU; without it one task holds all of them
# gpus_per_task = 4                # with array: GPUs of each task
# gpu_type = "a100"                # as Slurm calls it
# processes = "per-gpu"            # a process for each GPU of a task; default: the workload's choice
# nodes_per_task = 2               # spread each task over nodes; needs processes = "per-gpu"
# tasks_per_node = 4               # tasks that share a job's node; where Slurm gives whole nodes, as many as fit
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

# [track]                          # where the merge job sends what task.log was given
# to = "tensorboard:tb"            # or "wandb:PROJECT", "mlflow:URI", "trackio:PROJECT"
"""


WORKLOAD = '''\
"""A workload of slurmgpu: a row for each item."""

from slurmgpu import Array, ItemError, Text


class {name}:
    """Counts the words of each text; replace this with your own model."""

    columns = {{"n_words": Array("int32"), "shout": Text()}}  # what a row has; also Json() and Ragged("float32")
    batch_size = 32  # items in a call, at most

    def __init__(self, *, field: str = "text") -> None:  # [settings] of the run file
        self.field = field

    def load(self, task) -> None:
        """Load the model on task.device; called once in each process."""

    def __call__(self, items):
        """A row for each item, in order."""
        return [self.row(item) for item in items]

    def row(self, item):
        """The row of one item, or ItemError, which costs this item alone."""
        if self.field not in item:
            return ItemError(f"no field {{self.field!r}}")
        return {{"n_words": len(item[self.field].split()), "shout": item[self.field].upper()}}
'''
EXAMPLES = [{"text": "a cat sleeps"}, {"text": "the bank lends money to farmers"}, {"text": "hello"}]

SITE_TEMPLATE = """\
# The site file: defaults for {whose} on this cluster.
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


def write_run_file(workload: str | None, path: Path) -> list[str]:
    """Write a run file and the examples with which it runs; return the lines to print. SlurmGPUError if it exists.

    `workload` is a workload's name, or a Python file, which is written with a class if it does not exist. Other
    existing files stay as they are.
    """
    _refuse_to_overwrite(path)
    own = workload is None or workload.endswith(".py")
    use, proposed, files = _own(Path(workload or "my_workload.py"), path) if own else _built_in(str(workload), path)
    written, left = _write_new({**files, path: _filled(use, proposed, path.stem)})
    lines = [f"written: {', '.join(written)}"]
    lines += (
        [f"unchanged: {', '.join(left)}. Check that it fits the run file, in particular [settings]."] if left else []
    )
    named = shlex.quote(str(path))
    firsts = [proposed.first.format(run_file=named)] if proposed.first else []
    return [*lines, "Look at the run file, then:", *(f"  {each}" for each in (*firsts, f"slurmgpu submit {named}"))]


def _built_in(use: str, path: Path) -> tuple[str, Template, dict[Path, str]]:
    proposed = template_of(use, Path.cwd())
    files = {path.with_name(name): source.read_text("utf-8") for name, source in proposed.files.items()}
    if proposed.input and proposed.items:
        files[path.with_name(proposed.input)] = _as_lines(proposed.items)
    return use, proposed, files


def _own(source: Path, path: Path) -> tuple[str, Template, dict[Path, str]]:
    """The same as `_built_in` for the user's own class: the one in `source`, or a new one."""
    if source.exists():
        name = _class_in(source)
    else:
        name = "".join(word.capitalize() for word in re.split(r"\W|_", source.stem)) or "MyWorkload"
        if not name.isidentifier():
            raise SlurmGPUError(f"{source.name}: {name} is no name for a class; begin the file's name with a letter.")
    proposed = Template('# field = "text"\n')
    files = {source: WORKLOAD.format(name=name), path.with_name("items.jsonl"): _as_lines(EXAMPLES)}
    return f"{os.path.relpath(source, path.parent)}:{name}", proposed, files


def _class_in(source: Path) -> str:
    """The first class of a Python file that has columns."""
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise SlurmGPUError(
            f"{source} cannot be parsed as Python: {error}. Correct it, or name a file that does not exist."
        ) from error
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef) and "columns" in {
            target.id
            for line in cls.body
            for target in (line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)])
            if isinstance(target, ast.Name)
        }:
            return cls.name
    raise SlurmGPUError(f"{source} has no class with `columns`. To have init write one, name a file that is not there.")


def _as_lines(items: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(item, ensure_ascii=False)}\n" for item in items)


def write_translated(use: str | None, arguments: str, path: Path) -> None:
    """Write the run file that corresponds to the arguments of a TracIn script, and print what each became."""
    translate = translator_of(use, path.parent) if use else None
    if use is None or translate is None:
        raise SlurmGPUError("--from-args works with tracin only: `slurmgpu init tracin --from-args ARGS`.")
    found = translate(arguments, path.parent, path.stem)
    items = path.with_name(f"{path.stem}.tests.jsonl")
    settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in found.settings.items())
    proposed = Template(settings, found.input, **found.resources)
    files = {path: _filled(use, proposed, path.stem, takes_all=False)}
    if found.items is not None:
        files[items] = _as_lines(found.items)
    _refuse_to_overwrite(*files)
    written, _ = _write_new(files)
    width = max(len(flag) for flag, _ in found.lines)
    for flag, said in found.lines:
        result(f"{flag:<{width}}  {said}")
    result(f"{' and '.join(written)}: written. Look at it, then: slurmgpu submit {shlex.quote(str(path))} --dry-run")


def _write_new(files: Mapping[Path, str]) -> tuple[list[str], list[str]]:
    """Write the files that do not exist; return the written and the existing ones.

    If one cannot be written completely, all are removed: the next `init` would keep half a script as it is.
    """
    written: list[Path] = []
    try:
        for path, content in files.items():
            if write_new(path, content.encode()):
                written.append(path)
    except BaseException:
        for path in written:
            with contextlib.suppress(OSError):  # on a file system that fails
                path.unlink()
        raise
    return [str(path) for path in written], [str(path) for path in files if path not in written]


def _refuse_to_overwrite(*paths: Path) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise SlurmGPUError(f"{path} exists; name another file with -o, or remove it.")


def write_site_file(path: Path | None) -> Path:
    """Write the site file, by default where every run looks for it. SlurmGPUError if the file exists."""
    path = path or site_path()
    exists = SlurmGPUError(f"{path} exists; edit it, or write a new proposal elsewhere with -o FILE.")
    if os.path.lexists(path):
        raise exists
    is_group = path.resolve() == group_path().resolve()
    text = site_file_template(survey(), is_group=is_group)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not write_new(path, text.encode()):  # somebody wrote it since the check
        raise exists
    return path


def site_file_template(found: Survey, *, is_group: bool) -> str:
    """A commented site file: proposed values, with the alternatives in comments.

    A group's has no account: it would be the one of whoever wrote it, and override SBATCH_ACCOUNT of all others.
    """
    with_gpus = [(p.name, p.described) for p in found.gpu_partitions]
    without = [(p.name, p.described) for p in found.partitions if not p.gpus]
    mine = "your default one" if is_group else "the default one"
    account = [(name, mine if n == 0 else "") for n, name in enumerate(found.accounts)]
    # No GPU type is proposed: a run that takes any type starts sooner.
    types = _choices("gpu_type", [(name, "") for name in found.gpu_types], n_taken=0)
    slurm = _choices("partition", with_gpus) + _choices("account", account, n_taken=0 if is_group else 1)
    slurm += _choices("qos", [(name, "") for name in found.qos], n_taken=0)
    slurm += (
        '# time = "04:00:00"\n# setup = ["module load ' + DEFAULT_RUNTIME + "\"]   # what a job's script runs first\n"
    )
    return SITE_TEMPLATE.format(
        whose="the runs of all who share this Python environment," if is_group else "all of your runs",
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


def _filled(use: str, proposed: Template, stem: str, *, takes_all: bool = True) -> str:
    settings = proposed.settings
    is_here, is_settled = not _finds_slurm(), "executor" in read_site().get("resources", {})
    return TEMPLATE.format(
        title=runtime_named(DEFAULT_RUNTIME).title,
        run_dir=f'# run_dir = "runs/{stem}"',
        use=json.dumps(use, ensure_ascii=False),
        settings=settings if isinstance(settings, str) else settings.read_text("utf-8"),
        input=f"input = {json.dumps(proposed.input)}" if proposed.input else '# input = "items.jsonl"',
        batch="# batch_size = 64                  # overrides the workload's own\n" if proposed.input else "",
        executor=f'{"# " if is_settled else ""}executor = "{"local" if is_here else "slurm"}"',
        gpus=f"gpus = {json.dumps('all' if takes_all and is_here and not is_settled else proposed.gpus)}",
        array="array = true" if proposed.array else "# array = true",
    )


def _finds_slurm() -> bool:
    """Whether this machine belongs to a Slurm cluster."""
    try:
        commands.run("sbatch", "--version")
    except commands.SlurmUnavailableError:
        return False
    return True
