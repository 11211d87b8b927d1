"""The row of a finished training: its columns, and its file `result.json` next to the weights."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmgpu.shards.columns import Array, Column, Json, Ragged, Text
from slurmgpu.util.atomic_files import write_json
from slurmgpu.util.json_values import json_value

if TYPE_CHECKING:
    from slurmgpu.training.outcome import Outcome

log = logging.getLogger(__name__)

NUMBER, COUNT = Array("float64"), Array("int64")
MEASURE = Array("float64", nan_is_unknown=True)

MEASURED: Mapping[str, Column] = {
    "resumed": COUNT,
    **dict.fromkeys(("wall_s", "start_s", "data_s", "compute_s", "communication_s"), MEASURE),
    **dict.fromkeys(("evaluation_s", "checkpoint_s", "samples_per_s", "tokens_per_s", "mfu"), MEASURE),
    "peak_memory_bytes": COUNT,
    "energy_j": MEASURE,
}
"""The columns that differ between runs of the same configuration."""

COLUMNS: Mapping[str, Column] = {
    "config": Json(),
    "metric": Text(),
    "score": NUMBER,
    "final": Json(),
    "best": Json(),
    "best_step": COUNT,
    "steps": COUNT,
    "epochs": NUMBER,
    "samples": COUNT,
    "ended": Text(),
    "curve_steps": Ragged("int64"),
    "curve": Ragged("float32"),
    "eval_steps": Ragged("int64"),
    "eval_curve": Ragged("float32"),
    "weights": Text(),
    **dict.fromkeys(("n_parameters", "batch_size", "world_size", "seed"), COUNT),
    **MEASURED,
}

RESULT = "result.json"


def row_of(outcome: Outcome, **others: Any) -> dict[str, Any]:
    """The row of a training; `others` are columns that the outcome lacks."""
    row = {field.name: getattr(outcome, field.name) for field in fields(outcome) if field.name in COLUMNS}
    row |= {name: json_value(dict(row[name])) for name in ("final", "best")}
    return {**row, **others}


def write_result(folder: Path, row: Mapping[str, Any], code: str | None) -> None:
    """Write a finished row to `result.json`, for another task with the same item and the same code digest."""
    write_json(folder / RESULT, {"code": code, **json_value(dict(row))})


def read_result(folder: Path, code: str | None) -> dict[str, Any] | None:
    """The row in `result.json`, unless other code trained it; `code` None accepts any."""
    path = folder / RESULT
    try:
        found = json.loads(path.read_bytes())
        row = {name: _as_column(column, found[name]) for name, column in COLUMNS.items()}
        if code not in (None, found["code"]):
            log.info("training again: %s is from the code %s, and the code is now %s", path, found["code"], code)
            return None
        return row
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged and ignored: %s: %s", path, type(error).__name__, error)
        return None


def _as_column(column: Column, value: Any) -> Any:
    """A value from the file as its column's: null becomes NaN again."""
    if isinstance(column, Ragged):
        return [math.nan if each is None else each for each in value]
    return math.nan if value is None and isinstance(column, Array) else value
