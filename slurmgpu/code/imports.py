"""Refuse calls that would submit a run whenever slurmgpu imports the module that makes them."""

from __future__ import annotations

import inspect
from types import FrameType

from slurmgpu.errors import SlurmGPUError

OWN = "slurmgpu"
BODY = "<module>"
"""The name of the code of a module's body."""


def refuse_if_importing(call: str) -> None:
    """Raise SlurmGPUError if `call` is made by the body of a module that slurmgpu imports.

    Tasks, merges and planning import the user's modules: a run that is submitted there would submit the next one, whose
    tasks import the same module, and so on. All frames are looked at, so that it does not matter which part of
    slurmgpu imports, or calls a function that does. A function that a task calls may submit a run.
    """
    frame, importing = inspect.currentframe(), None
    while frame is not None:
        package = frame.f_globals.get("__package__")
        is_own = isinstance(package, str) and (package == OWN or package.startswith(f"{OWN}."))
        if importing is None:
            if not is_own and frame.f_code.co_name == BODY and frame.f_globals.get("__name__") != "__main__":
                importing = frame
        elif is_own:
            raise SlurmGPUError(_refusal(importing, call))
        frame = frame.f_back


def _refusal(body: FrameType, call: str) -> str:
    return (
        f"{body.f_code.co_filename}, line {body.f_lineno}, calls {call} when it is imported, and each task imports it: "
        f"put the call under `if __name__ == '__main__':`."
    )
