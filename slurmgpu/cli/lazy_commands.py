"""Typer commands that are built on demand, read their arguments without pydantic, and join options given again.

Typer reads every argument with pydantic, even those that were not given. Importing pydantic takes as long as Typer and
Rich together, most of the start time of a command such as `status` on a login node.
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

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.shared_files import BRIEF_PATIENCE_S, is_transient, may
from slurmgpu.util.users import expanded

_LISTS = ("--columns", "--items", "--keep")
"""Options with values such as A,B: given again, they add up."""
_CONDITION = "--where"
_SINGLE = ("--item",)
"""Options that take one value; a user who gives two different ones may expect both to count."""


class App(typer.Typer):
    """An app that builds only the command that is called; Typer builds all."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the command line in `args`, by default sys.argv."""
        argv: Sequence[str] = args[0] if args else sys.argv[1:]
        if argv and argv[0].startswith("--install-completion") and str(expanded("~")) == "~":
            raise SlurmGPUError("Completion is installed into your home directory, which is not known here: set HOME.")
        return typer.Typer.__call__(self.with_only(argv[0] if argv else None), *args, **options)

    def with_only(self, name: str | None) -> App:
        """The app with only the command of that name; the whole app if it has no such command."""
        names = [info.name or getattr(info.callback, "__name__", None) for info in self.registered_commands]
        if names.count(name) != 1:
            return self
        alone = copy.copy(self)
        alone.registered_commands, alone.registered_groups = [self.registered_commands[names.index(name)]], []
        return alone


class Commands(TyperGroup):
    """Commands whose texts, paths and absent arguments are read here, and others by Typer."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options before the command's name."""
        return _read_here(super().get_params, ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; None if there is none."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            command.get_params = functools.partial(_read_here, functools.partial(type(command).get_params, command))
        return command


def _read_here(params_for: Callable[[Any], list[Any]], ctx: Any) -> list[Any]:
    """A command's parameters, with our reader."""
    params = params_for(ctx)
    for param in params:
        if param.param_type_name == "option" and not (param.multiple or param.is_flag or param.count):
            param.add_to_parser = functools.partial(_collect, param)
            param.handle_parse_result = functools.partial(_handle_all, param, param.handle_parse_result)
        if param.param_type_name == "argument" and param.metavar == "RUN":
            param.get_missing_message = _name_runs
        # Older versions of Typer have no such method: click reads their arguments.
        if hasattr(param, "get_runtime_param"):
            param.get_runtime_param = functools.partial(
                _Reader, functools.partial(type(param).get_runtime_param, param)
            )
    return params


def _name_runs(ctx: Any = None) -> str:
    """What follows "Missing argument 'RUN'."; click before 8.1.8 calls it without a context."""
    return "`slurmgpu list` shows the runs here."


def _collect(param: Any, parser: Any, ctx: Any) -> None:
    """Make the parser keep all values of an option; by itself it keeps the last of them."""
    parser.add_option(obj=param, opts=param.opts, dest=param.name, action="append", nargs=param.nargs)


def _handle_all(param: Any, handle: Callable[..., Any], ctx: Any, opts: dict[str, Any], args: list[str]) -> Any:
    """Handle the one value that all values of an option make."""
    given = opts.get(param.name)
    if isinstance(given, list):
        opts = {**opts, param.name: given[-1] if ctx.resilient_parsing else _one_of(param.opts, given)}
    return handle(ctx, opts, args)


def _one_of(names: Sequence[str], given: Sequence[Any]) -> Any:
    """The value of a repeated option: usually the last, as in Slurm, so that it overrides the one in a script.

    SlurmGPUError if the values differ and the user would expect each of them to count.
    """
    values = list(dict.fromkeys(given))
    if len(values) == 1:
        return values[0]
    if _CONDITION in names:
        return " and ".join(f"({value})" for value in values)
    if names[0] in _LISTS:
        return ",".join(values)
    if names[0] not in _SINGLE:
        return given[-1]
    name = names[0]
    raise SlurmGPUError(
        f"{name} takes one value, and is given {len(given)} times: {' and '.join(map(str, values))}. Keep one of them."
    )


class _Reader:
    """Reads simple arguments as Typer does, and makes Typer's reader, `theirs()`, only for others."""

    def __init__(self, theirs: Callable[[], Any]) -> None:
        self._theirs = theirs

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value for the command's function."""
        is_one = not param.multiple and param.nargs == 1
        if is_one and value is None:
            return None
        kind = param.type_descriptor.annotation
        # Typer rejects what is not UTF-8.
        if is_one and isinstance(value, str) and value.encode(errors="replace").decode() == value:
            if kind is str and value.isascii():
                return value
            if kind is Path and _may_be_read(value):
                return Path(value)
        if is_one and kind is Path and type(value) is type(Path()):
            return value
        return self._theirs().coerce(value, param=param, ctx=ctx)


def _may_be_read(path: str) -> bool:
    """Whether Typer would accept a path: it does not exist, or it can be read.

    A path whose file system fails is accepted as well: the command's own error says why.
    """
    try:
        return may(path, os.R_OK, BRIEF_PATIENCE_S)
    except OSError as error:
        return is_transient(error) or not os.path.lexists(path)
