"""Printing of lines and JSON, and the consoles of tables."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TextIO, TypeVar, cast

from rich.console import Console
from rich.markup import escape

from slurmgpu.util.ansi import CONTROLS, harmless

PLAINER = str.maketrans("…–−×°↑↓→·━╸╺", "~--xo^v>.---")

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
    """Decorate a command: with `as_json`, stdout gets what it passes to `result_json`, and nothing else."""

    @functools.wraps(command)
    def called(*given: P.args, **options: P.kwargs) -> T:
        with stdout_for_json(bool(options.get("as_json"))):
            return command(*given, **options)

    return called


@contextlib.contextmanager
def stdout_for_json(as_json: bool) -> Iterator[None]:
    """With `as_json`, send what the user's modules print in the block to stderr; only `result_json` writes to stdout.

    The modules print when planning imports them, and with the executor debug while they compute.
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
"""The stream of `result_json` while stdout is redirected to stderr."""


def result_json(value: Any) -> None:
    """Print the result as JSON on stdout."""
    _results().write(f"{json_text(value, indent=2)}\n")


def json_text(value: Any, *, indent: int | None = None) -> str:
    """The value as JSON for stdout; in ASCII if stdout is not UTF-8, which JSON has to be.

    Control characters, and those that change the order of text on a terminal, are always escaped.
    """
    is_utf8 = codecs.lookup(_results().encoding or "utf-8").name == "utf-8"
    text = json.dumps(value, indent=indent, ensure_ascii=not is_utf8)
    return CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _results() -> TextIO:
    return _stdout[0] if _stdout else sys.stdout


def bar_console() -> Console | None:
    """A Rich console on stderr for a progress bar; None if stderr is no terminal, or one that cannot draw."""
    console = Console(stderr=True)
    return console if sys.stderr.isatty() and not console.is_dumb_terminal else None


def wide_console() -> Console:
    """A Rich console on stdout; in a pipe, wide enough that no table breaks, and no line ends with blanks."""
    if sys.stdout.isatty():
        return Console(highlight=False, emoji=False)
    return Console(file=cast(TextIO, _Trimmed()), highlight=False, emoji=False, width=200)


def screen_console() -> Console:
    """A Rich console of a whole screen on stdout."""
    return Console(file=cast(TextIO, _Plainer()), highlight=False, emoji=False)


class _Plainer:
    """Standard output, with one ASCII character for each of our own that its encoding lacks.

    An escape of six would move the columns of a screen.
    """

    def __init__(self) -> None:
        self._stdout = sys.stdout  # Rich puts another one in its place meanwhile

    def write(self, text: str) -> int:
        """Write a text."""
        try:
            text.encode(self._stdout.encoding)
        except UnicodeEncodeError:
            text = text.translate(PLAINER)
        return self._stdout.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)


class _Trimmed:
    """Standard output without the blanks with which Rich fills the lines of a table."""

    def write(self, text: str) -> int:
        """Write a text."""
        return sys.stdout.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)
