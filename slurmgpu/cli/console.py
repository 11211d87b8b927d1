"""Printing of JSON, plain lines, and the plan of a dry run; `views/tables` prints status and report."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TextIO, TypeVar, cast

from rich.console import Console
from rich.markup import escape

from slurmgpu.util.amounts import count_of, size_of
from slurmgpu.util.ansi import CONTROLS, harmless
from slurmgpu.util.redact import hidden, hide_in

DIGESTS = ("planned", "model_files", "adapter_files")
"""Settings that planning writes, of which people need nothing."""

P = ParamSpec("P")
T = TypeVar("T")


def complain(text: str) -> None:
    """Print an error on stderr."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(
        f"[bold red]error:[/] {escape(harmless(text))}"
    )


def say(text: str) -> None:
    """Print a line on stderr, beside the result."""
    Console(stderr=True, soft_wrap=True, highlight=False, emoji=False).print(escape(harmless(text)))


def result(text: str) -> None:
    """Print a line of the result on stdout."""
    Console(soft_wrap=True, highlight=False, emoji=False).print(escape(harmless(text)))


def json_alone(command: Callable[P, T]) -> Callable[P, T]:
    """A command that, called with `as_json`, prints on stdout what it gives to `result_json`, and nothing else."""

    @functools.wraps(command)
    def called(*given: P.args, **options: P.kwargs) -> T:
        with stdout_for_json(bool(options.get("as_json"))):
            return command(*given, **options)

    return called


@contextlib.contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """With `as_json`, let in the block what the user's modules print go to stderr, and `result_json` alone to stdout.

    They print when planning imports them, and with the executor debug while they compute.
    """
    if not as_json or _stdout:
        yield
        return
    _stdout.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.clear()


_stdout: list[TextIO] = []
"""The stream of `result_json` while stderr is in the place of stdout."""


def result_json(value: Any) -> None:
    """Print the result as JSON on stdout."""
    _results().write(f"{json_text(value, indent=2)}\n")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """The value as JSON for stdout; in ASCII if that is not UTF-8, which JSON has to be.

    What a terminal would obey, or would show in another order, is escaped in any case.
    """
    is_utf8 = codecs.lookup(_results().encoding or "utf-8").name == "utf-8"
    text = json.dumps(value, indent=indent, ensure_ascii=not is_utf8)
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _results() -> TextIO:
    return _stdout[0] if _stdout else sys.stdout


def bar_console() -> Console | None:
    """A Rich console on stderr for a progress bar; None where that is no terminal, or a dumb one, which draws none."""
    console = Console(stderr=True)
    return console if sys.stderr.isatty() and not console.is_dumb_terminal else None


def wide_console() -> Console:
    """A Rich console on stdout; in a pipe, wide enough that no table breaks, and no line ends with blanks."""
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False)
    return Console(file=cast(TextIO, _Trimmed()), highlight=False, emoji=False, width=200)


class _Trimmed:
    """Standard output without the blanks with which Rich fills the lines of a table."""

    def write(self, text: str) -> int:
        """Write a text."""
        return sys.stdout.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def show_plan(
    plan: Mapping[str, Any],
    submission: Mapping[str, Any],
    run_dir: str,
    notes: Sequence[str],
    items: Sequence[str],
) -> None:
    """Print the plan of `submit --dry-run` without secrets; `items` are lines on the items of a run without input."""
    from rich.table import Table

    console = wide_console()
    table = Table.grid(padding=(0, 2))
    files = plan["input"]["files"]
    size = sum(max(0, file["size_bytes"]) for file in files)
    table.add_row("run", escape(f"{run_dir} (not made)"))
    in_files = f"{count_of(plan['n_items'], 'item')} in {count_of(len(files), 'file')}, {size_of(size)}"
    for number, line in enumerate(items or [in_files]):
        table.add_row("" if number else "input", escape(hide_in(line)))
    # Digests that planning found in files are long; `--json` has them.
    settings = hidden({name: value for name, value in plan["settings"].items() if name not in DIGESTS})
    table.add_row("workload", escape(f"{plan['workload']} {json.dumps(settings, ensure_ascii=False)}"))
    columns = ", ".join(f"{name} ({_kind(column)})" for name, column in plan["columns"].items())
    table.add_row("columns", escape(columns))
    n_shards = -(-plan["n_items"] // plan["shard_items"])
    items = count_of(plan["shard_items"], "item")
    parts = f", each in {plan['parts']} parts" if plan["parts"] > 1 else ""
    table.add_row("shards", f"{n_shards:,} of {items}, in batches of {plan['batch_size']}{parts}")
    if plan["container"]:
        image = plan["container"]["identity"]
        table.add_row("image", escape(f"{plan['container']['image']} (sha256 {image['sha256'][:12]})"))
    table.add_row("tasks", _tasks(submission))
    if submission["inject"]:
        table.add_row("faults", f"{', '.join(submission['inject'])}: a rehearsal with injected faults")
    if plan["on_end"]:
        table.add_row("on_end", escape(hide_in(plan["on_end"])))
    for line in plan["placement"]:
        table.add_row("placement", escape(line))
    for note in notes:
        table.add_row("note", escape(note))
    console.print(table)


def show_resubmitted(run_dir: str, computes: str, submission: Mapping[str, Any], notes: Sequence[str]) -> None:
    """Print what `resubmit --dry-run` would submit."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, text in (("run", run_dir), ("computes", computes), ("tasks", _tasks(submission))):
        table.add_row(name, escape(text))
    for note in notes:
        table.add_row("note", escape(hide_in(note)))
    wide_console().print(table)


def show_origins(origins: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print every value that was set, by table of the run file, with its origin."""
    for name, values in origins.items():
        if not values:
            continue
        result(f"\n[{name}]")
        shown = {key: hidden(entry["value"], key) for key, entry in values.items()}
        texts = {key: f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in shown.items()}
        width = min(40, max(map(len, texts.values())))
        for key, entry in values.items():
            result(f"{texts[key]:<{width}}  # {entry['from']}")


def show_scripts(scripts: Mapping[str, str]) -> None:
    """Print the sbatch scripts of `submit --dry-run` without secrets."""
    for job, text in scripts.items():
        result(f"\n# ---- {job}.sbatch ----")
        sys.stdout.write(hide_in(text))


def _tasks(submission: Mapping[str, Any]) -> str:
    n, per_task = submission["n_tasks"], submission["gpus_per_task"]
    what = count_of(per_task, "GPU") if per_task else "CPUs only"
    what += f" on {submission['nodes_per_task']} nodes" if submission["nodes_per_task"] > 1 else ""
    at_once = "" if submission["n_concurrent"] == n else f", {submission['n_concurrent']} at once"
    return f"{n} of {what}{at_once}, executor {submission['executor']}, device {submission['device']}"


def _kind(column: Mapping[str, Any]) -> str:
    shape = f"{column['shape']}" if column.get("shape") else ""
    return f"{column['kind']} {column.get('dtype', '')}{shape}".strip()
