"""The items of a run by their indices in its input, which a look has with gaps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.errors import ItemError
from slurmgpu.inputs.reader import Reader
from slurmgpu.inputs.spec import InputSpec
from slurmgpu.run.directory import Run
from slurmgpu.run.recompute import spans_of
from slurmgpu.util.process_wide import working_folder


@contextlib.contextmanager
def open_items(run: Run) -> Iterator[Callable[[Sequence[int]], list[Mapping[str, Any] | ItemError]]]:
    """A function that reads the data of a run's items, whose indices ascend; an ItemError in place of a malformed one.

    Works in the run file's folder, as paths of the input may be relative to it.
    """
    with working_folder(Path(run.plan.search_path)), Reader(InputSpec.from_json(run.input), run.index) as reader:

        def read(indices: Sequence[int]) -> list[Mapping[str, Any] | ItemError]:
            places = [run.plan.n_before(index) for index in indices]
            return [data for span in spans_of(places) for data in reader.read(*span)]

        yield read
