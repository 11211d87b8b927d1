"""Arguments that are read without pydantic are what Typer makes of them, and so is what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from slurmgpu.cli.app import app

TEXTS = ["a100", "", "-", ".", "no/such/file", "größe", "\udcff", " x ", "~", "/"]


def test_every_argument_is_what_typer_makes_of_it():
    group = typer.main.get_command(app)
    if not hasattr(group.params[0], "get_runtime_param"):
        pytest.skip("click reads the arguments of this version of Typer")
    context, n = typer.Context(group), 0

    def read(reader, value, param):
        try:
            return reader.coerce(value, param=param, ctx=context)
        except Exception as error:
            return type(error), str(error)

    for name in [None, *group.list_commands(context)]:
        command = group if name is None else group.get_command(context, name)
        for param in command.get_params(context):
            theirs = type(param).get_runtime_param(param)
            for value in [None, Path("x"), *([[], ["a=b"], ()] if param.multiple else TEXTS)]:
                here = read(param.get_runtime_param(), value, param)
                assert here == read(theirs, value, param), (name, param.name, value)
                assert type(here) is type(read(theirs, value, param))
                n += 1
    assert n > 500


def test_a_path_that_may_not_be_read_is_refused_by_typer(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Typer puts its own there
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit) as raised:
        app(["status", "/tmp"])
    assert raised.value.code == 2


@pytest.mark.parametrize("name", ["status", "list", "export", "image", "list_runs", "nothing", "--help", None])
def test_a_command_alone_is_the_command_among_the_others(name):
    full, alone = (typer.main.get_command(each) for each in (app, app.with_only(name)))
    assert app.with_only(name).registered_callback is app.registered_callback
    if name in ("status", "list", "export"):
        assert list(alone.commands) == [name]
        assert [p.opts for p in alone.commands[name].params] == [p.opts for p in full.commands[name].params]
    else:
        assert list(alone.commands) == list(full.commands)


def test_a_command_that_is_not_there_is_refused_with_the_closest_ones():
    done = subprocess.run([sys.executable, "-m", "slurmgpu", "statu"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "status" in done.stderr


def test_the_help_of_each_command_has_lines_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    group = typer.main.get_command(app)
    with typer.Context(group, info_name="slurmgpu") as context:
        helps = [group.get_help(context)]
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            with typer.Context(command, info_name=name, parent=context) as inner:
                helps.append(command.get_help(inner))
    assert len(helps) > 10
    assert [line for text in helps for line in text.splitlines() if len(line) > 80] == []
