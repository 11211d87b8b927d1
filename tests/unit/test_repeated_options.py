"""Options that are given again: which add up, which are refused, and of which the last counts."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from slurmgpu.cli.app import app
from slurmgpu.errors import SlurmGPUError

LISTS = {"--columns", "--items", "--keep"}


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    context = group.make_context("slurmgpu", ["-"], resilient_parsing=True)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        if hasattr(command, "list_commands"):
            yield from commands(command, f"{each} ")
        else:
            yield f"{name}{each}", command


COMMANDS = dict(commands(get_command(app)))


def options(command: Any) -> Iterator[Any]:
    context = command.make_context("x", [], resilient_parsing=True)
    for param in command.get_params(context):
        if param.param_type_name == "option" and not (param.is_flag or param.multiple):
            yield param


def parsed(command: Any, *arguments: str) -> dict[str, Any]:
    program = ["--", "./x"] if command.name == "run" else []
    params: dict[str, Any] = command.make_context("x", [*arguments, *program]).params
    return params


@pytest.mark.parametrize("name", COMMANDS)
def test_two_values_of_an_option_that_would_both_be_meant_are_refused(name: str) -> None:
    command = COMMANDS[name]
    for param in options(command):
        if param.opts[0] == "--item":
            for option in param.opts:
                with pytest.raises(SlurmGPUError, match=r"^--[a-z]+ takes one value, and is given 3 times: 2 and 3"):
                    parsed(command, option, "2", option, "3", param.opts[0], "3")


def test_of_other_options_the_last_value_counts() -> None:
    submit = parsed(
        COMMANDS["submit"], "run.toml", "--gpus", "2", "--executor", "slurm", "--gpus", "4", "--executor=local"
    )
    assert (submit["gpus"], submit["executor"]) == (4, "local")


def test_lists_add_up_and_conditions_are_all_to_be_met() -> None:
    show = parsed(
        COMMANDS["show"], "r", "--items", "3", "--columns", "b,a", "--item", "1:2", "--columns=c", "--items", "3"
    )
    assert (show["items"], show["columns"]) == ("3,1:2", "b,a,c")
    assert parsed(COMMANDS["submit"], "--items", "0", "--items", "2")["items"] == "0,2"
    both = parsed(
        COMMANDS["export"], "r", "-o", "x.csv", "--where", "a > 1 or b", "--where", "c < 2", "--output", "x.csv"
    )
    assert both["where"] == "(a > 1 or b) and (c < 2)"
    run = parsed(
        COMMANDS["run"], "--each", "f", "--each", "g", "--keep", "a", "--keep", "b", "--limit", "1", "--limit", "1"
    )
    assert (run["keep"], list(run["each"]), run["limit"]) == ("a,b", ["f", "g"], 1)
