"""`submit --probe`: the forecast, and the question whether to queue the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from slurmgpu.cli.console import say, wide_console
from slurmgpu.util.amounts import about, count_of, digits, size_of, slurm_size, time_words

WORTH_SAYING = 0.2
"""The first batch is reported as slower if it takes longer by more than this share of a batch's time."""

INTERRUPTED = "interrupted; the probe is cancelled, and nothing of the run is queued."


def show_failure(forecast: Mapping[str, Any]) -> None:
    """Print why the probe failed."""
    failure = forecast["failure"]
    say(f"The probe failed: {failure['class']}: {failure['message']}")
    say(f"Its log: {failure['log']}")
    say("Nothing of the run is queued.")


def show_forecast(forecast: Mapping[str, Any]) -> None:
    """Print the forecast with its notes and assumptions."""
    probe, table = forecast["probe"], Table.grid(padding=(0, 2))
    batches = count_of(probe["n_batches"], "batch").replace("batchs", "batches")
    table.add_row("probe", escape(f"{count_of(probe['n_items'], 'item')} in {batches}, {forecast['probe_dir']}"))
    started = [f"{about(probe['start_s'])} to the first batch"]
    if probe["load_s"] is not None:
        started.append(f"{about(probe['load_s'])} of them loading")
    if probe["first_s"] > WORTH_SAYING * forecast["batch_s"]["expected"]:
        started.append(f"the first batch took {about(probe['first_s'])} longer")
    table.add_row("start", ", ".join(started))
    table.add_row("batch", _spread(forecast["batch_s"]))
    table.add_row("shard", f"{_spread(forecast['shard_s'])}, {forecast['n_shards']:,} in all")
    table.add_row("memory", _memory(probe))
    n_tasks, at_once = forecast["n_tasks"], forecast["n_concurrent"]
    many = count_of(n_tasks, "task") + (f", {at_once} at once" if at_once < n_tasks else "")
    table.add_row(
        "run", f"{_spread(forecast['run_s'])} on {many}; {forecast['starting_share']:.0%} of it starting tasks"
    )
    if forecast["gpus_per_task"]:
        hours = forecast["gpu_hours"]
        low, expected, high = (digits(hours[name]) for name in ("low", "expected", "high"))
        table.add_row("cost", f"about {expected} GPU-hours ({low} to {high})")
    if forecast["shards_per_task"] is not None:
        n_fitting = forecast["shards_per_task"]
        fitting = count_of(n_fitting, "shard") if n_fitting < forecast["n_shards"] else "all shards"
        table.add_row("walltime", f"{fitting} in a task's {time_words(forecast['walltime_s'])}")
    for error in forecast["errors"]:
        table.add_row("failed", escape(f"item {error['index']}: {error['class']}: {error['message']}"))
    for note in forecast["notes"]:
        table.add_row("note", escape(note))
    for text in forecast["assumptions"]:
        table.add_row("assumed", escape(text))
    wide_console().print(table)


def shall_queue(*, yes: bool, as_json: bool) -> bool:
    """Whether to queue the run: by --yes, or by the answer on a terminal."""
    if yes or (not as_json and sys.stdin.isatty() and sys.stderr.isatty() and _asked()):
        return True
    say(f"Nothing is queued. To queue it: {without_probe(sys.argv[1:])}")
    return False


def _asked() -> bool:
    sys.stderr.write("queue it? [y/N] ")
    sys.stderr.flush()
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        say("\ninterrupted; the probe is over, and nothing of the run is queued.")
        raise
    if not answer.endswith("\n"):  # Ctrl-D
        say("")
    return answer.strip().lower() in ("y", "yes")


def without_probe(argv: Sequence[str]) -> str:
    """The typed command without --probe."""
    kept, words = [], iter(argv)
    for word in words:
        if word == "--probe":
            next(words, None)
        elif not word.startswith("--probe="):
            kept.append(word)
    return shlex.join(["slurmgpu", *kept])


def _memory(probe: Mapping[str, Any]) -> str:
    parts = []
    for what, peak, total, in_words in (
        ("GPU", probe["gpu_peak_bytes"], probe["gpu_total_bytes"], size_of),
        ("host", probe["host_peak_bytes"], probe["host_total_bytes"], slurm_size),
    ):
        if peak:
            parts.append(f"{what} {in_words(peak)}{f' of {in_words(total)}' if total else ''}")
    return ", ".join(parts) or "not known"


def _spread(values: Mapping[str, float]) -> str:
    expected, low, high = (about(values[name]) for name in ("expected", "low", "high"))
    return f"about {expected}" + ("" if low == high else f" ({low} to {high})")
