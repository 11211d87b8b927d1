"""The best weights of a training: held in memory, and written with checkpoints."""

from __future__ import annotations

import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slurmgpu.training import states
from slurmgpu.training.checkpoint_files import Checksum, checksum_of, save_weights
from slurmgpu.training.ranks import Place, on_rank_zero
from slurmgpu.training.strategy import Strategy

log = logging.getLogger(__name__)

NAME = re.compile(r"best-(\d{10,})\.pt")


class BestWeights:
    """The weights of the best evaluation, which become `best.pt` at the end.

    Writing them at each improvement could cost more than a short training. So they are copied to rank 0's memory, which
    must have room for a second model, and written as `best-<step>.pt` with the next checkpoint. A sharded model may not
    fit there: its weights are written at once.
    """

    def __init__(self, folder: Path, place: Place, strategy: Strategy) -> None:
        self._folder, self._place, self._strategy = folder, place, strategy
        self._step = -1
        self._held: dict[str, Any] | None = None
        self._written: Checksum | None = None
        self._is_whole = False  # whether the file was verified

    def hold(self, step: int) -> None:
        """Keep the model's present weights as the best ones; called by all ranks."""
        weights = states.weights(self._strategy.model, sharded=self._strategy.sharded)
        # Weights from a GPU are copies already.
        own = not self._strategy.sharded and self._strategy.device.type == "cpu"
        self._step, self._held, self._written = step, _copied(weights) if own else weights, None
        if self._strategy.sharded:
            self.write()

    def write(self) -> None:
        """Write the held weights; called by all ranks."""
        if self._held is not None:
            held, path = self._held, self._path()
            self._written = on_rank_zero(self._place, lambda: save_weights(path, held))
            self._held, self._is_whole = None, True

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; call `write` first."""
        return {"step": self._step, "written": self._written and asdict(self._written)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state`, and remove newer files of a lost attempt."""
        self._step, written = state["step"], state["written"]
        self._written, self._is_whole = Checksum(**written) if written else None, False
        on_rank_zero(self._place, lambda: self._keep(0, self._step))

    def clear(self) -> None:
        """Remove what lost attempts left; called by all ranks of a training that begins."""
        on_rank_zero(self._place, lambda: self._keep(0, -1))

    def prune(self, oldest: int) -> None:
        """Remove weights older than those of the oldest checkpoint's step; called by rank 0."""
        self._keep(max((step for step in self._steps() if step < oldest), default=0))

    def weights_file(self) -> Path | None:
        """The path of the weights, on all ranks; None, with a warning, if the file is damaged."""
        return on_rank_zero(self._place, self._find)

    def finish(self) -> None:
        """Rename the weights to `best.pt` if intact, and remove all others; called by all ranks."""
        self.write()
        on_rank_zero(self._place, self._finish)

    def _finish(self) -> None:
        best = self._folder / "best.pt"
        found = self._find()
        if found is None:
            best.unlink(missing_ok=True)
        elif found != best:
            found.replace(best)
        self._keep(0, -1)

    def _find(self) -> Path | None:
        if self._written is None:
            return None
        # An attempt that died at the very end may have renamed it already.
        for path in (self._path(), self._folder / "best.pt"):
            if path.exists() and (self._is_whole or checksum_of(path) == self._written):
                self._is_whole = True
                return path
        log.warning("%s is damaged: keeping only the last weights", self._path())
        return None

    def _keep(self, first: int, last: int | None = None) -> None:
        for step in self._steps():
            if step < first or (last is not None and step > last):
                self._path(step).unlink(missing_ok=True)

    def _steps(self) -> list[int]:
        return sorted(int(match[1]) for path in self._folder.glob("best-*.pt") if (match := NAME.fullmatch(path.name)))

    def _path(self, step: int | None = None) -> Path:
        return self._folder / f"best-{self._step if step is None else step:010d}.pt"


def _copied(weights: dict[str, Any]) -> dict[str, Any]:
    """Copies of tensors, also sparse ones, which `copy.deepcopy` refuses; a tensor with two names is copied once."""
    copies: dict[int, torch.Tensor] = {}
    for value in weights.values():
        if isinstance(value, torch.Tensor) and id(value) not in copies:
            copies[id(value)] = value.clone()
    return {name: copies.get(id(value), value) for name, value in weights.items()}
