"""What the workloads with a language model share: their settings, where the model fits, and the engine."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engine import Engine, EngineOptions, Place
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.prompts import take
from slurmgpu.llm.settings import check_engine, check_max_tokens, engine_options
from slurmgpu.shards.columns import Column, Json
from slurmgpu.workload import Item, Placement, Share, TaskContext
from slurmgpu.workloads.progress import ToldEngine

BLOCK_ROWS = 1 << 16
"""Rows of a merged file that a summary looks at together."""


class LanguageModelWorkload:
    """A workload's half that is the same for all of them; `engine` is there once the model is loaded."""

    engine: Engine
    batch_size = 128
    texts = ("prompt", "system")

    def use_model(self, model: str, settings: Mapping[str, Any], *, max_tokens: int = 0) -> None:
        """Check the settings of the engine; `max_tokens` are those of an answer, 0 where none is generated.

        The model itself is looked for where it is needed: not by the merge, which may run when it is gone.
        """
        check_engine(settings)
        self._model, self._max_tokens = (model, dict(settings)), max_tokens

    @functools.cached_property
    def options(self) -> EngineOptions:
        """Which model and engine; SlurmGPUError if there is no such model."""
        return engine_options(*self._model)

    @property
    def frozen_settings(self) -> dict[str, Any]:
        """What the plan keeps more exactly: the commit that a branch of the hub stands for now; a folder's content."""
        from slurmgpu.llm.digests import digests_of

        model = self.options.model
        if model.repository is not None:
            return {"revision": model.revision}
        files = digests_of(model)
        return {} if files is None else {"model_files": files}

    @property
    def environ(self) -> dict[str, str]:
        """What workers find in their environment: the cache that planning found the model in, and no way out."""
        from slurmgpu.llm.models import cache_of

        cache = cache_of(self.options.model)
        found = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return found if cache is None else {**found, "HF_HUB_CACHE": str(cache)}

    @property
    def paths(self) -> list[Path]:
        """What a task reads beside the input: the folder of the model's files, and what they link to."""
        from slurmgpu.llm.models import files_of

        return files_of(self.options.model)

    def place(self, share: Share) -> Placement:
        """How the model is put on a task's GPUs; SlurmGPUError, with numbers, where it does not fit."""
        from slurmgpu.llm.decoders import check_decoder, check_tokenizer
        from slurmgpu.llm.placement import place

        check_decoder(self.options.model)
        check_max_tokens(self._max_tokens, self.options)
        if self.options.engine == "vllm" and share.gpus == 0:
            raise SlurmGPUError(
                'engine = "vllm" computes on GPUs, and these tasks compute on CPUs (gpus = 0, or device = "cpu"). '
                "Ask for GPUs, or leave engine out: transformers computes on CPUs, too."
            )
        placement = Placement(*place(self.options, share))
        check_tokenizer(self.options.model)  # of the hub's it comes with the weights
        return placement

    def fetch(self) -> str:
        """Download the model to where the tasks will look for it."""
        from slurmgpu.llm.models import fetch

        return fetch(self.options.model)

    def load(self, task: TaskContext) -> None:
        """Load the model on the task's GPUs; SlurmGPUError if it is not the one that the run was planned with."""
        from slurmgpu.llm.digests import check_unchanged

        if planned := self._model[1].get("model_files"):
            check_unchanged(self.options.model, planned)
        where = Place(task.device, task.gpus, task.rank, task.world_size, task.local_rank, task.note)
        self.engine = ToldEngine(open_engine(self.options, where), task.tell)


def keep_columns(keep: Sequence[str], columns: Mapping[str, Column]) -> dict[str, Column]:
    """The columns, and one for each field of the input that is kept; SlurmGPUError where the names meet."""
    for number, name in enumerate(keep):
        if name in columns or name in keep[:number]:
            whose = "a column of the workload's own" if name in columns else "named twice"
            raise SlurmGPUError(f"keep has {name!r}, which is {whose}; leave it out, or rename the field in the input.")
    return {**columns, **dict.fromkeys(keep, Json())}


def kept(item: Item, keep: Sequence[str]) -> dict[str, Any]:
    """The values of an item's fields that are kept; ItemError where it lacks one."""
    return {name: _json_value(take(item.data, name)) for name in keep}


def _json_value(value: Any) -> Any:
    """NumPy's values, which Parquet's and HDF5's columns hold, as JSON's; NaN and the infinities are null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    # Parquet's dates and decimals.
    return value if value is None or isinstance(value, str | int | float) else str(value)


def blocks(n_rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of the rows of a merged file, a block of bounded size each."""
    for start in range(0, n_rows, BLOCK_ROWS):
        yield start, min(start + BLOCK_ROWS, n_rows)
