"""Notes for the user about traced code: what the snapshot lacks, and how calls may disturb each other."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurmgpu.code.files_in_source import FilesInSource
from slurmgpu.code.snapshots import ReadFile
from slurmgpu.util.amounts import some_of

ARRAY_ID = "SLURM_ARRAY_TASK_ID"
_MANY_NAMED = 5
_STEP = re.compile(
    r"(?m)(?:^|[;&|(`]|\b(?:if|while|then|else|do|exec|env|time|nohup)\b)[ \t]*(?:\w+=[^\s;&|(`]*[ \t]+)*"
    r"srun[ \t]+[-./\w$\"']"
)
"""srun where a command begins; prose has other words before it."""
_READS_ARRAY_ID = re.compile(rf"(?m)\$\{{?{ARRAY_ID}\b|^{ARRAY_ID}$|[\"']{ARRAY_ID}[\"']")
_FOR_EXAMPLE = (
    ", for example --out fits/{id}. Where a call has many items, give it its own working folder, for example with "
    "bash -c 'cd \"$(mktemp -d)\" && …'."
)
_OVERLAPS = re.compile(r"--overlap|SLURM_OVERLAP")


@dataclass
class TraceNotes:
    """What tracing has noticed; `sentences` puts it into words."""

    left_out: list[str] = field(default_factory=list)
    """Sentences on modules that are not in the snapshot."""
    choosing_gpus: list[str] = field(default_factory=list)
    """Places that set CUDA_VISIBLE_DEVICES."""
    outputs: dict[str, Sequence[str]] = field(default_factory=dict)
    """The files that scripts write under the same name in each call, by script."""
    output_folders: dict[str, Sequence[str]] = field(default_factory=dict)
    """The folders into which they write in each call."""
    reading_array_id: dict[str, None] = field(default_factory=dict)
    """Scripts that read SLURM_ARRAY_TASK_ID."""
    sets_array_id: bool = False
    """Whether the command sets it for each call."""
    waiting_steps: dict[str, None] = field(default_factory=dict)
    """Scripts that call srun without --overlap."""

    def leave_out(self, sentence: str) -> None:
        """Note once what is not in the snapshot."""
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    def look_for_slurm(self, script: str, text: str) -> None:
        """Note a script that reads SLURM_ARRAY_TASK_ID or calls srun, as scripts for sbatch do.

        `text` is its code without comments, which often show how the script is started.
        """
        if _STEP.search(text) and not _OVERLAPS.search(text):
            self.waiting_steps[script] = None
        if f"{ARRAY_ID}=" in text:
            self.sets_array_id = True
        elif _READS_ARRAY_ID.search(text):
            self.reading_array_id[script] = None

    def look_for_outputs(
        self, script: str, named: FilesInSource, options: Collection[str] | None, *, is_started: bool
    ) -> None:
        """Note what a Python file writes in each call, if the command starts it, and the GPUs that it chooses.

        `options` on its command line may change its default output folders; None: any of them may be there.
        """
        if named.gpus_line:
            self.choosing_gpus.append(f"{script} in line {named.gpus_line}")
        left_out = set[str]() if options is None else named.output_options.keys() - options
        defaults = {f"{named.output_options[name]} (--{name})" for name in left_out}
        if is_started and named.outputs:
            self.outputs[script] = sorted(named.outputs)
        if is_started and (into := named.output_folders | defaults):
            self.output_folders[script] = sorted(into)

    def leave_out_folder(self, error: OSError) -> None:
        """Note a folder that cannot be listed; one that does not exist has no modules."""
        if not isinstance(error, FileNotFoundError):
            self.leave_out(
                f"{error.filename} cannot be listed ({error.strerror}), so its modules are not in the snapshot."
            )

    def sentences(
        self, read: Iterable[ReadFile], compiled: Collection[str], elsewhere: Mapping[str, str]
    ) -> tuple[str, ...]:
        """The notes, in words, with the files that are `read`, and packages `elsewhere` than in the image.

        `compiled` are the paths of compiled modules among the files that are read.
        """
        found = list(self.left_out)
        if compiled:
            found.append(
                f"Compiled modules are not in the snapshot of the code; tasks import the files on disk: "
                f"{_some(compiled)}."
            )
        if names := [file.name for file in read if file.path not in compiled]:
            found.append(
                f"Tasks read these files when they run, not as they are now: {_some(names)}. "
                f"If one of them changes, the report counts later rows as computed by unknown code."
            )
        if self.choosing_gpus:
            found.append(
                f"{some_of(self.choosing_gpus, _MANY_NAMED)} sets CUDA_VISIBLE_DEVICES, perhaps to GPUs of another "
                "task, or to none. Remove that: a task sees only its own GPUs, as cuda:0 and so on."
            )
        found += [
            f"{script} writes {some_of(names, _MANY_NAMED)} under the same name in each call, so calls that run at the "
            f"same time overwrite each other's files. Take a part of the name from the command line{_FOR_EXAMPLE}"
            for script, names in self.outputs.items()
        ]
        found += [
            f"{script} writes into {some_of(names, _MANY_NAMED)} in each call, so calls that run at the same time "
            f"overwrite each other's files there, unless the files' names differ. If these do not, take a part of the "
            f"folder's name from the command line{_FOR_EXAMPLE}"
            for script, names in self.output_folders.items()
        ]
        if self.reading_array_id and not self.sets_array_id:
            scripts = some_of(list(self.reading_array_id), _MANY_NAMED)
            found.append(
                f"{scripts} reads {ARRAY_ID}, which calls do not have: it would be the number of the task. For calls "
                f"of one item set it to a field, for example -- env {ARRAY_ID}={{id}} ./run.sh. A call with {{in}} and "
                f"{{out}} has a slice, of which the script should take all: if it needs the variable, write env "
                f"{ARRAY_ID}=0 {ARRAY_ID.replace('ID', 'COUNT')}=1."
            )
        if self.waiting_steps:
            callers = some_of(list(self.waiting_steps), _MANY_NAMED)
            found.append(
                f"{callers} calls srun without --overlap: in a Slurm job that step waits for resources that the task "
                f"itself holds, until the walltime ends. Write srun --overlap --mem=0 -n N."
            )
        if elsewhere:
            found.append(
                f"The code imports from folders that are not bound into the image; tasks import the image's versions, "
                f"if any: {_some(f'{name} ({path})' for name, path in elsewhere.items())}. Put them next to the run "
                f"file, or install them in the image."
            )
        return tuple(found)


def _some(names: Iterable[str]) -> str:
    return some_of(sorted(names), _MANY_NAMED)
