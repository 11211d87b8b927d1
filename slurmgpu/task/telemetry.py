"""Telemetry of an attempt: samples of its GPUs and of its worker's processes, and their means and peaks."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.run.directory import Run
from slurmgpu.run.records import Attempt, Usage
from slurmgpu.run.telemetry_log import HeadLine, SampleLine, telemetry_path
from slurmgpu.util.gpus import visible_ids
from slurmgpu.util.nvml import THROTTLE_REASONS, Cards, Reading, open_cards
from slurmgpu.util.process_tree import Tree, TreeWatch
from slurmgpu.util.regular_files import open_to_append

log = logging.getLogger(__name__)

TELEMETRY_FORMAT = "slurmgpu telemetry"
TELEMETRY_VERSION = 1
FIRST_S = 0.5
"""The delay of the first sample; the delays then double, so that short tasks have samples, too."""
PATIENCE_S = 2.0
"""How long a task waits at its end for a sample that hangs in the driver."""

GPU_VALUES = ("utilisation", "memory_used_bytes", "temperature_c", "power_w", "energy_j", "ecc_errors", "throttle")
HOST_VALUES = ("rss_bytes", "cpu_s", "n_processes")


class Sampler:
    """A thread that samples what an attempt uses, every `sample_s` seconds, into the file `path`; never if that is 0.

    `gpu_ids` are those of CUDA_VISIBLE_DEVICES: None for all GPUs that NVML shows, empty for a task on CPUs. `tree_of`
    returns the worker's first process, None if there is none. Errors do not harm the task: values that cannot be read
    are unknown, and samples that cannot be written are dropped.
    """

    def __init__(
        self, path: Path, gpu_ids: Sequence[str] | None, sample_s: float, tree_of: Callable[[], int | None]
    ) -> None:
        self._path = path
        self._sample_s = sample_s
        self._tree_of = tree_of
        self._thread = threading.Thread(target=self._work, daemon=True, name="telemetry")
        self._wake = threading.Event()
        self._ended = False
        # The attributes below are used under the lock. NVML, which may hang, is never called under it.
        self._lock = threading.Lock()
        self._wanted = gpu_ids
        self._ready: int | None = None
        self._n_samples = self._n_ready = 0
        self._gpus, self._host = _GPUUsage(), _HostUsage()

    def mark_ready(self) -> None:
        """The current worker has loaded its workload: its samples count as work."""
        with self._lock:
            self._ready = self._tree_of()
        self._wake.set()

    def use_gpus(self, uuids: Sequence[str]) -> None:
        """Sample the GPUs that the worker reports: CUDA's numbers and NVML's may differ."""
        with self._lock:
            self._wanted = list(uuids)
        self._wake.set()

    def usage(self) -> Usage:
        """Means and peaks so far; None is unknown. The keys are listed in docs/reference/files.md."""
        with self._lock:
            return {
                "n_samples": self._n_samples,
                "n_samples_ready": self._n_ready,
                **self._gpus.summary(),
                **self._host.summary(),
            }

    def __enter__(self) -> Sampler:
        if self._sample_s:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended = True
        self._wake.set()
        if self._sample_s:
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            log.warning("sampling the GPUs hangs; the task ends without waiting for it")

    def _work(self) -> None:
        trees, cards, named = TreeWatch(), None, object()
        pause_s = min(FIRST_S, self._sample_s)
        while True:
            with self._lock:
                wanted = self._wanted
            if wanted != named:
                cards, named = self._change(cards, wanted), wanted
            self._sample(trees, cards)
            if self._ended:
                break
            self._wake.wait(pause_s)
            self._wake.clear()
            pause_s = min(2 * pause_s, self._sample_s)
        if cards is not None:
            cards.close()

    def _change(self, cards: Cards | None, wanted: Sequence[str] | None) -> Cards | None:
        """The cards to sample from now on; `cards` are the previous ones."""
        had = {card.uuid for card in cards.cards} if cards else set()
        if cards is not None and wanted is not None and set(wanted) == had:
            return cards  # the same cards, found by their numbers
        found = open_cards(wanted) if wanted is None or wanted else None
        if cards is not None and found is None:
            return cards  # NVML does not know these names: keep the cards that were found by number
        if cards is not None:
            cards.close()
        with self._lock:
            self._gpus = _GPUUsage()
        self._append(
            {
                "format": TELEMETRY_FORMAT,
                "version": TELEMETRY_VERSION,
                "sample_s": self._sample_s,
                "driver": found.driver if found else None,
                "gpus": [{"name": card.name, "uuid": card.uuid} for card in found.cards] if found else [],
                "gpu_values": GPU_VALUES,
                "host_values": HOST_VALUES,
            }
        )
        return found

    def _sample(self, trees: TreeWatch, cards: Cards | None) -> None:
        root, at = self._tree_of(), time.monotonic()
        tree = trees.read(root) if root is not None else None
        readings = [card.read() for card in cards.cards] if cards else []
        xids = cards.xids() if cards else []
        with self._lock:
            ready = root is not None and root == self._ready and not self._ended
            self._n_samples += 1
            self._n_ready += ready
            self._gpus.add(readings, xids, ready=ready)
            if tree is not None and root is not None:
                self._host.add(tree, root, at, ready=ready)
        line: SampleLine = {
            "time": round(time.time(), 3),
            "ready": ready,
            "gpus": [[getattr(reading, name) for name in GPU_VALUES] for reading in readings],
            "host": [tree.rss_bytes, round(tree.cpu_s, 2), tree.n_processes] if tree else None,
        }
        if xids:
            line["xids"] = xids
        self._append(line)

    def _append(self, line: HeadLine | SampleLine) -> None:
        try:
            with open_to_append(self._path) as file:
                file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            log.debug("%s cannot be written: %s", self._path, error)


def sampler_of(run: Run, attempt: Attempt, tree_of: Callable[[], int | None], node: int = 0) -> Sampler:
    """The sampler of an attempt on one of its nodes; that of a task on CPUs samples no GPUs."""
    gpu_ids = visible_ids() if attempt.uses_gpus else []
    return Sampler(telemetry_path(run.folder, attempt.name, node), gpu_ids, run.plan.sample_s, tree_of)


class _Mean:
    def __init__(self) -> None:
        self.total, self.n = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.n = self.total + value, self.n + 1

    def value(self, digits: int) -> float | None:
        return round(self.total / self.n, digits) if self.n else None


class _GPUUsage:
    def __init__(self) -> None:
        self._utilisation, self._power_w = _Mean(), _Mean()
        self._memory: Reading | None = None
        self._temperature_c: int | None = None
        self._first: dict[tuple[str, int], float] = {}
        self._last: dict[tuple[str, int], float] = {}
        self._throttled: Counter[str] = Counter()
        self._n_throttle = 0
        self._xids: set[int] = set()

    def add(self, readings: Sequence[Reading], xids: Sequence[int], *, ready: bool) -> None:
        utilisations = _known(one.utilisation for one in readings)
        if ready and utilisations:
            self._utilisation.add(sum(utilisations) / len(utilisations))
        if powers := _known(one.power_w for one in readings):
            self._power_w.add(sum(powers))
        self._temperature_c = max(_known([self._temperature_c, *(one.temperature_c for one in readings)]), default=None)
        for one in readings:
            if one.memory_used_bytes is not None and (
                self._memory is None or one.memory_used_bytes > (self._memory.memory_used_bytes or 0)
            ):
                self._memory = one
        for place, one in enumerate(readings):
            for name in ("energy_j", "ecc_errors"):
                if (value := getattr(one, name)) is not None:
                    self._first.setdefault((name, place), value)
                    self._last[name, place] = value
        if masks := _known(one.throttle for one in readings):
            self._n_throttle += 1
            self._throttled.update(name for bit, name in THROTTLE_REASONS.items() if any(mask & bit for mask in masks))
        self._xids.update(xids)

    def summary(self) -> Usage:
        shares = {name: round(count / self._n_throttle, 3) for name, count in sorted(self._throttled.items())}
        return {
            "gpu_utilisation": self._utilisation.value(1),
            "gpu_memory_peak_bytes": self._memory.memory_used_bytes if self._memory else None,
            "gpu_memory_total_bytes": self._memory.memory_total_bytes if self._memory else None,
            "temperature_max_c": self._temperature_c,
            "power_mean_w": self._power_w.value(1),
            "energy_j": self._growth("energy_j"),
            "throttled": shares if self._n_throttle else None,
            "ecc_errors": self._growth("ecc_errors"),
            "xids": sorted(self._xids),
        }

    def _growth(self, name: str) -> float | None:
        grown = [last - self._first[key] for key, last in self._last.items() if key[0] == name]
        return round(sum(grown), 1) if grown else None


class _HostUsage:
    def __init__(self) -> None:
        self._rss_bytes: int | None = None
        self._before: tuple[int, float, float] | None = None
        self._cpu_s = self._wall_s = 0.0

    def add(self, tree: Tree, root: int, at: float, *, ready: bool) -> None:
        self._rss_bytes = max(self._rss_bytes or 0, tree.rss_bytes)
        if ready and self._before is not None and self._before[0] == root:
            # It shrinks when a process ends that no process of the tree has waited for.
            self._cpu_s += max(0.0, tree.cpu_s - self._before[1])
            self._wall_s += at - self._before[2]
        self._before = (root, tree.cpu_s, at) if ready else None

    def summary(self) -> Usage:
        return {
            "host_memory_peak_bytes": self._rss_bytes,
            "cpu_cores": round(self._cpu_s / self._wall_s, 2) if self._wall_s else None,
        }


def _known(values: Any) -> list[Any]:
    return [value for value in values if value is not None]
