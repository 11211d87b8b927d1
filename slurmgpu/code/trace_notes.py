"""What a user is told about code that was traced: what the snapshot lacks, and what calls may do to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurmgpu.code.snapshots import ReadFile
from slurmgpu.util.amounts import some_of

_MANY_NAMED = 5


@dataclass
class TraceNotes:
    """Notes that gather while code is traced; `sentences` words them."""

    left_out: list[str] = field(default_factory=list)
    """Sentences on modules that are not in the snapshot."""
    compiled: set[str] = field(default_factory=set)
    """Compiled modules, which are in no snapshot."""
    choosing_gpus: list[str] = field(default_factory=list)
    """Places that set CUDA_VISIBLE_DEVICES."""
    outputs: dict[str, Sequence[str]] = field(default_factory=dict)
    """The files that scripts write by a name which is the same in each call, by the script."""

    def leave_out(self, sentence: str) -> None:
        """Note once what is not in the snapshot."""
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    def leave_out_folder(self, error: OSError) -> None:
        """Note a folder that cannot be listed; one that does not exist has no modules."""
        if not isinstance(error, FileNotFoundError):
            self.leave_out(
                f"{error.filename} cannot be listed: modules in it are not in the snapshot: {error.strerror}."
            )

    def sentences(self, read: Iterable[ReadFile], elsewhere: Mapping[str, str]) -> tuple[str, ...]:
        """The notes, in words, with the files that are `read`, and packages `elsewhere` than in the image."""
        found = list(self.left_out)
        if self.compiled:
            found.append(
                f"Compiled modules are not in the snapshot of the code; tasks import the files on disk: "
                f"{_some(self.compiled)}."
            )
        if names := [file.name for file in read if file.path not in self.compiled]:
            found.append(
                f"Tasks read these files when they run, not as they are now: {_some(names)}. "
                f"After a change of one of them, the report counts further rows as by unknown code."
            )
        if self.choosing_gpus:
            found.append(
                f"CUDA_VISIBLE_DEVICES is set by {some_of(self.choosing_gpus, _MANY_NAMED)}, to GPUs that may be "
                f"another task's, or none. Leave that out: a task sees its own GPUs alone, as cuda:0 and so on."
            )
        found += [
            f"{script} writes {some_of(names, _MANY_NAMED)} by the same name in each call: calls that run at once "
            f"overwrite each other's, and one may read what another has left. Take a part of the name from the command "
            f"line, as in --out fits/{{id}}, unless each call has a working folder of its own."
            for script, names in self.outputs.items()
        ]
        if elsewhere:
            found.append(
                f"The code imports from folders that are not bound into the image; tasks import the image's versions, "
                f"if any: {_some(f'{name} ({path})' for name, path in elsewhere.items())}. Put them beside the run "
                f"file, or install them in the image."
            )
        return tuple(found)


def _some(names: Iterable[str]) -> str:
    return some_of(sorted(names), _MANY_NAMED)
