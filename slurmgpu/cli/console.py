"""Printing of lines and JSON, and the consoles of tables."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TextIO, TypeVar

from rich.console import Console
from rich.markup import escape

from slurmgpu.util.ansi import CONTROLS, harmless

PLAINER = str.maketrans("…–−×°↑↓→·━╸╺", "~--xo^v>.---")

P = ParamSpec("P")
T = TypeVar("T")


def plain_console(**options: Any) -> Console:
    """A Rich console that highlights nothing in a text, and replaces none of its words by pictures."""
    return Console(highlight=False, emoji=False, **options)


def complain(text: str) -> None:
    """Print an error on stderr."""
    plain_console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(harmless(text))}")


def say(text: str) -> None:
    """Print a line on stderr, beside the result."""
    plain_console(stderr=True, soft_wrap=True).print(escape(harmless(text)))


def result(text: str) -> None:
    """Print a line of the result on stdout."""
    plain_console(soft_wrap=True).print(escape(harmless(text)))


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
        return plain_console()
    return plain_console(file=_Rewritten(lambda text: re.sub(r" +(?=\n)", "", text)), width=200)


def screen_console() -> Console:
    """A Rich console of a whole screen on stdout, with one ASCII character for each of ours that its encoding lacks.

    An escape of six would move the columns of a screen.
    """
    encoding = sys.stdout.encoding

    def plainer(text: str) -> str:
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            return text.translate(PLAINER)
        return text

    return plain_console(file=_Rewritten(plainer))


class _Rewritten:
    """Standard output that gets each text as `rewrite` returns it."""

    def __init__(self, rewrite: Callable[[str], str]) -> None:
        self._rewrite = rewrite
        self._stdout = sys.stdout  # while it draws a screen, Rich puts another one in its place

    def write(self, text: str) -> int:
        """Write a text."""
        return self._stdout.write(self._rewrite(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)
