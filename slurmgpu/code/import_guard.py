"""Refuse a call that would submit a run every time that slurmgpu imports the module."""

from __future__ import annotations

import importlib._bootstrap
import inspect
from types import FrameType

from slurmgpu.errors import SlurmGPUError

OWN = "slurmgpu"
BODY = "<module>"
"""The name of the code of a module's body, and of text that exec() or runpy executes."""
_IMPORT_SYSTEM = vars(importlib._bootstrap)
"""The globals of the frames that import a module."""


def refuse_if_importing(call: str) -> None:
    """Raise SlurmGPUError if the body of a module that slurmgpu imports makes `call`.

    Tasks, merges and planning import the user's modules. A run submitted by such an import would start tasks that
    import the module and submit again, without end. The whole stack is checked, because any part of slurmgpu may be the
    one that imports. A function that a task calls may submit a run, also from text that it passes to exec(): the import
    system does not run that text.
    """
    frame, body, importing = inspect.currentframe(), None, None
    while frame is not None:
        package = frame.f_globals.get("__package__")
        is_own = isinstance(package, str) and (package == OWN or package.startswith(f"{OWN}."))
        if importing is not None:
            if is_own:
                raise SlurmGPUError(_refusal(importing, call))
        elif is_own:
            body = None
        elif frame.f_globals is _IMPORT_SYSTEM:
            importing = body
        elif frame.f_code.co_name == BODY and frame.f_globals.get("__name__") != "__main__":
            body = frame
        frame = frame.f_back


def _refusal(body: FrameType, call: str) -> str:
    return (
        f"{body.f_code.co_filename}, line {body.f_lineno}, calls {call} when it is imported, but each task imports it. "
        f"Put the call under `if __name__ == '__main__':`."
    )
