"""Errors in the user's own code, with file and line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.exceptions import described
from slurmgpu.util.out_of_memory import is_out_of_memory

OURS = str(Path(__file__).parents[1])


@contextmanager
def located(what: str, file: str, advice: str) -> Iterator[None]:
    """Turn any error in the user's code into a SlurmGPUError with its line, except when memory ran out.

    `file` is the user's file, or the name of a module.
    """
    try:
        yield
    except SlurmGPUError:
        raise
    except Exception as error:  # the user's code may raise any error
        if is_out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {error.msg}" if isinstance(error, SyntaxError) else described(error)
        raise SlurmGPUError(f"{_place(file, error)}: {what} raised {said}. {advice}") from error


def _place(file: str, error: Exception) -> str:
    """The last line of the file in the traceback; for a module the last line of neither slurmgpu nor importlib."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = list(traceback.extract_tb(error.__traceback__))
    if file.endswith(".py"):
        frames = [frame for frame in frames if frame.filename == file]
    else:
        frames = [each for each in frames if OURS not in each.filename and "importlib" not in each.filename]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else file
