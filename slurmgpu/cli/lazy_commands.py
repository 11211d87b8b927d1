"""The commands as Typer finds them: made when they are called, with arguments that need no pydantic.

Typer has pydantic read every argument, also those that were not given. To import that takes as long as Typer and Rich
together, and is most of what a command such as `status` waits for on a login node.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_transient, may


class App(typer.Typer):
    """An app that makes, of its commands, only the one that is called: Typer makes all that it is given."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run what `args` say, or else sys.argv."""
        argv: Sequence[str] = args[0] if args else sys.argv[1:]
        return typer.Typer.__call__(self.with_only(argv[0] if argv else None), *args, **options)

    def with_only(self, name: str | None) -> App:
        """The app with the one command of that name, and all of it where there is none of its own."""
        names = [info.name or getattr(info.callback, "__name__", None) for info in self.registered_commands]
        if names.count(name) != 1:
            return self
        alone = copy.copy(self)
        alone.registered_commands, alone.registered_groups = [self.registered_commands[names.index(name)]], []
        return alone


class Commands(TyperGroup):
    """A group of commands whose texts, paths and absent arguments are read here, and all others by Typer."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options before the command's name."""
        return _read_here(super().get_params, ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, None if there is none."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.get_params = functools.partial(_read_here, functools.partial(type(command).get_params, command))
        return command


def _read_here(params_for: Callable[[Any], list[Any]], ctx: Any) -> list[Any]:
    """The parameters of a command, `--help` among them, that are read here."""
    params = params_for(ctx)
    for param in params:
        # Older versions of Typer have no such method, nor need it: click reads their arguments.
        if hasattr(param, "get_runtime_param"):
            param.get_runtime_param = functools.partial(
                _Reader, functools.partial(type(param).get_runtime_param, param)
            )
    return params


class _Reader:
    """Reads an argument as what Typer has for it would, `theirs()`, and makes that only if it is needed."""

    def __init__(self, theirs: Callable[[], Any]) -> None:
        self._theirs = theirs

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value for the command's function."""
        is_one = not param.multiple and param.nargs == 1
        if is_one and value is None:
            return None
        kind = param.type_descriptor.annotation
        # What is no UTF-8 is refused in Typer's words.
        if is_one and isinstance(value, str) and _is_utf8(value):
            if kind is str and value.isascii():
                return value
            if kind is Path and _may_be_read(value):
                return Path(value)
        if is_one and kind is Path and type(value) is type(Path()):
            return value
        return self._theirs().coerce(value, param=param, ctx=ctx)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _may_be_read(path: str) -> bool:
    """Whether Typer, too, would take a path: whatever is not there, or can be read.

    And what a file system fails to tell of: Typer would say that it is not readable, the command says why.
    """
    try:
        return may(path, os.R_OK, BRIEF_PATIENCE_S)
    except OSError as error:
        return is_transient(error) or not os.path.lexists(path)
