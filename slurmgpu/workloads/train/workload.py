"""Training, one configuration per item: `use = "train"`, as in docs/how-to/train-a-model.md.

Only `load` and later methods import torch and the user's class: settings are also checked on login nodes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.loader.settings import UnknownSettingError
from slurmgpu.util.packages import check_torch
from slurmgpu.workload import Item, Placement, Row, Share, TaskContext, Template
from slurmgpu.workloads.train.exports import write_csv, write_curves
from slurmgpu.workloads.train.items import Configuration, check_items, taken_over
from slurmgpu.workloads.train.rows import COLUMNS, RESULT
from slurmgpu.workloads.train.settings import HINTS, check_each, meant, typed
from slurmgpu.workloads.train.summary import summarize
from slurmgpu.workloads.train.training_class import TrainingClass, class_of, load_class, read_class, resolve_training

if TYPE_CHECKING:
    from slurmgpu.results import Merged
    from slurmgpu.training.settings import TrainingSettings

FOLDER = "checkpoints"


class Train:
    """Trains a user's class once for each configuration.

    `training` names the class, `arguments` go to its `__init__`; the other settings are described in
    `slurmgpu.training.settings.TrainingSettings` and docs/reference/training.md.
    """

    columns = COLUMNS
    batch_size = 1
    takes_one = True
    resumes = True
    template = Template(
        Path(__file__).with_name("template.toml"),
        input=None,
        array=False,  # one training uses all GPUs
        files={"my_training.py": Path(__file__).with_name("example") / "my_training.py"},
    )
    default_items: Sequence[Mapping[str, Any]] = ({},)

    def __init__(
        self,
        *,
        training: str,
        arguments: dict[str, Any] | None = None,
        batch_size: int | Literal["auto"] | None = None,
        **settings: Any,
    ) -> None:
        # A named parameter, so that planning distinguishes it from [workload] batch_size.
        settings |= {} if batch_size is None else {"batch_size": batch_size}
        self.training = training
        arguments = dict(arguments or {})
        own = {name: typed(name, value) for name, value in settings.items() if name in HINTS}
        for name, value in settings.items():
            if name not in HINTS:
                arguments[name] = self._argument(name, value, arguments)
        self._base = Configuration(own, arguments)
        self._n_processes = 1
        check_each(own)

    def _argument(self, name: str, value: Any, arguments: Mapping[str, Any]) -> Any:
        """The value of a name that is not a setting; SlurmGPUError unless it is an argument of the class.

        Names in `arguments` pass: a plan has all of them, and the class may have changed since.
        """
        if name in arguments:
            return value
        known = self._source.arguments if self._source is not None else {}
        if name not in known:
            takes_others = self._source is None or self._source.takes_any
            others = " Put arguments that its source does not name under [settings.arguments]." if takes_others else ""
            said = f"train has no setting {name!r}, and the class has no such argument.{meant(name, known)}{others}"
            raise SlurmGPUError(said) if "." in name else UnknownSettingError(said, name)
        return value

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """The arguments under one key, regardless of where they were given."""
        return {"arguments": dict(self._base.arguments)} if self._base.arguments else {}

    @functools.cached_property
    def _full_name(self) -> str:
        return resolve_training(self.training, Path.cwd())

    @functools.cached_property
    def _source(self) -> TrainingClass | None:
        return read_class(self._full_name)

    @property
    def paths(self) -> list[Path]:
        """The training class's file, which a task reads besides the input."""
        file = Path(self._full_name.rpartition(":")[0])
        return [file] if file.suffix == ".py" else []

    def place(self, share: Share) -> Placement:
        """A process for each GPU of a task; the lines describe how they train together."""
        n = share.slots
        if n > 1 and share.processes == "one":
            raise SlurmGPUError(
                f'[resources] has processes = "one", and a task has {n} {"GPUs" if share.gpus else "slots"}; DDP needs '
                f"a process for each. Remove processes, or give each task one GPU: gpus_per_task = 1, with array."
            )
        self._n_processes = n
        own = [] if self._source is None else self._source.optional
        with_own = f", with its {' and '.join(filter(None, (', '.join(own[:-1]), own[-1])))}" if own else ""
        how = _in_words(self._base.settings.get("strategy"), share)
        lines = [f"train: {Path(self.training).name}{with_own}, {how}"]
        for name in self._base.settings:
            if method := taken_over(name, self._source):
                lines.append(f"{name} has no effect: {self.training} has its own method {method}.")
        if self._source is None or not self._source.is_whole:
            lines.append(f"Code that {self.training} inherits or imports is only checked when tasks load it.")
        # Also for one GPU: a resubmission with the same plan may have more.
        is_group = share.processes == "per-gpu" or share.gpus > 0 or n > 1
        return Placement("one" if share.processes == "one" or not is_group else "per-gpu", tuple(lines))

    def check_here(self) -> None:
        """Refuse a machine without PyTorch."""
        check_torch("train needs")

    def check_input(self, files: Sequence[Path], n_items: int) -> list[str]:
        """Lines about values that no configuration uses, and about steps; SlurmGPUError for a wrong item."""
        sizes: dict[str, None] = {}
        unused = dict(self._base.shown)
        for checked, others in check_items(files, self._base, self._source):
            sizes[_step_size(checked, self._n_processes)] = None
            unused = {name: value for name, value in unused.items() if name in others}
        if not sizes:
            return []
        lines = [
            f"{name} = {json.dumps(value, default=str)} of [settings] has no effect: each configuration has another."
            for name, value in unused.items()
        ]
        if "" in sizes:
            return lines
        listed = ", ".join([*sizes][:3]) + (f" or another {len(sizes) - 3}" if len(sizes) > 3 else "")
        return [*lines, f"A step has {listed} samples."]

    def load(self, task: TaskContext) -> None:
        """Import the training class; SlurmGPUError if it or a method is missing."""
        if task.gpus > 1 and task.world_size == 1:
            raise SlurmGPUError(
                f"The run was planned for one process per task, and this task has {task.gpus} GPUs. Resubmit it with "
                f"--array, one GPU for each task, or plan a new run."
            )
        self._class = load_class(self._full_name)
        self._about = class_of(self._class)
        self._task = task

    def __call__(self, items: Sequence[Item]) -> list[Row | ItemError]:
        """The row of each configuration, which is trained unless it is finished."""
        return [self._row(item) for item in items]

    def _row(self, item: Item) -> Row:
        from slurmgpu.workloads.train import process

        try:
            found = self._base.over(item.data, self._about)
            settings = found.check(self._about)
            if settings.seed is None:
                settings = replace(settings, seed=item.seed)
            folder = self._task.run_dir / _folder_of(item.index)
            arguments = found.for_class(self._about, settings)
            return process.row(lambda: self._class(**arguments), settings, self._task, folder, found.shown)
        except SlurmGPUError as error:  # other configurations may be right
            raise ItemError(str(error)) from error

    def files_of_item(self, index: int) -> list[str]:
        """The files of a finished training, named in the row's `weights`, relative to the run directory."""
        return [f"{_folder_of(index)}/{name}" for name in ("best.pt", "last.pt", RESULT)]

    def summarize(self, merged: Merged) -> dict[str, Any]:
        """The configurations by their score, the best ones first."""
        return summarize(merged)

    @property
    def exports(self) -> Mapping[str, Callable[[Merged, IO[bytes]], str]]:
        """A table with a column for each setting, and the learning curves."""
        return {"csv": write_csv, "curves": write_curves}


def _folder_of(index: int) -> str:
    return f"{FOLDER}/{index:05d}"


def _step_size(settings: TrainingSettings, n_processes: int) -> str:
    """The samples of a step with their factors; "" if the batch size is found when training."""
    batch, n_times = settings.batch_size, settings.accumulation
    if settings.global_batch_size is not None:
        return str(settings.global_batch_size)
    if isinstance(batch, str):
        return ""
    factors = f"{batch} × {n_processes}" + (f" × {n_times}" if n_times > 1 else "")
    return f"{factors} = {batch * n_processes * n_times}" if n_processes * n_times > 1 else str(batch)


def _in_words(strategy: str | None, share: Share) -> str:
    n, kind = share.slots, "GPU" if share.gpus else "CPU process"
    over = f" on {share.nodes} nodes" if share.nodes > 1 else ""
    if n == 1:
        return f"one {kind}"
    how, by = ("FSDP" if strategy == "fsdp" else "DDP"), ("nccl" if share.gpus else "gloo")
    return f"{how} by {by} on {n} {kind}{'es' if kind.endswith('s') else 's'}{over}"
