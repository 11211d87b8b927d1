"""The parameters of the user's own model, at planning: its class is built without data, in another process.

Checkpoints are loaded into it without data, too, so that one that does not fit is found before anything is queued.

In another process, because user code must not stay imported for the next planning, and because importing PyTorch takes
seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util.exceptions import described, message_of
from slurmgpu.util.packages import own_python_path

TIMEOUT_S = 120

MISMATCHES = ("size mismatch", "Missing key", "Unexpected key")
"""What PyTorch says of a state dict that does not fit, whatever the values are."""

States = Mapping[str, Mapping[str, tuple[list[int], str]]]
"""The shape and the dtype of each tensor in the state dicts of checkpoints, by their paths."""


@dataclass(frozen=True)
class OwnParameters:
    """The sizes of trainable parameters by name, in the model's order; `others` says why a name is not one of them."""

    trainable: Mapping[str, int]
    others: Mapping[str, str]


def own_parameters(architecture: str, n_entities: int, n_relations: int, states: States) -> OwnParameters | str:
    """The parameters of the class `architecture`, "file.py:Class"; or the reason why it cannot be built here.

    SlurmGPUError if it can be imported, but cannot be a model on any machine, or if one of the `states` does not fit.
    """
    if "torch" not in sys.modules and find_spec("torch") is None:
        return "PyTorch is not installed"
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _of_process(Path(folder), architecture, n_entities, n_relations, states)
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT_S} seconds"
    except OSError as error:
        return described(error)


def _of_process(folder: Path, *asked: Any) -> OwnParameters | str:
    """Like `own_parameters`, in a process with files in `folder`; raises OSError and TimeoutExpired."""
    question, answer, printed = folder / "question.json", folder / "answer.json", folder / "printed"
    question.write_text(json.dumps(asked), encoding="utf-8")
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", code, str(question), str(answer)]
    environ = {**os.environ, **own_python_path(), "CUDA_VISIBLE_DEVICES": ""}
    with printed.open("wb") as file:  # not a pipe: processes started by the class would keep it open
        started = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        ended = started.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left, or none of this user
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    try:
        found = json.loads(answer.read_bytes())
    except (FileNotFoundError, ValueError):
        last = printed.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return last[0] if last else f"its process ended with {ended}"
    if isinstance(found, dict) and "refused" in found:
        raise SlurmGPUError(found["refused"])
    return OwnParameters(**found) if isinstance(found, dict) else str(found)


def main() -> None:
    """Call `built` with what the first argument's file has as JSON, and write its result to the second's."""
    question, answer = map(Path, sys.argv[1:])
    try:
        found = built(*json.loads(question.read_bytes()))
        told = found if isinstance(found, str) else asdict(found)
    except SlurmGPUError as error:
        told = {"refused": str(error)}
    answer.write_text(json.dumps(told), encoding="utf-8")
    os._exit(0)  # do not wait for threads and processes of the class


def built(architecture: str, n_entities: int, n_relations: int, states: States) -> OwnParameters | str:
    """Like `own_parameters`, in this process."""
    try:
        import torch

        from slurmgpu.workloads.tracin.own_class import NotAModelError, class_of
    except Exception as error:  # a library may be broken here, and not where tasks run
        return described(error)
    try:
        cls, _ = class_of(architecture)
        with torch.device("meta"):  # shapes without memory
            module = cls(n_entities=n_entities, n_relations=n_relations)
    except NotAModelError as error:
        if error.without is None:
            raise
        return f"{error.without} is not installed, and without it {architecture} is no model"
    except Exception as error:  # user code may raise any error, and a task may have what is missing here
        return described(error)
    others = {name: "a buffer" for name, _ in module.named_buffers()}
    trainable: dict[str, int] = {}
    first: dict[object, str] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        if first.setdefault(value, name) != name:
            others[name] = f"the same tensor as {first[value]}"
        elif value.requires_grad:
            trainable[name] = value.numel()
        else:
            others[name] = "frozen: its requires_grad is False"
    for path, state in states.items():
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype, None), device="meta")
            for name, (shape, dtype) in state.items()
        }
        try:
            module.load_state_dict(tensors)
        except Exception as error:
            # Other errors come from user code that needs the values, which only a task has.
            said = message_of(error)
            if isinstance(error, RuntimeError) and any(what in said for what in MISMATCHES):
                raise SlurmGPUError(f"{path} does not fit {architecture}: {said}") from error
    return OwnParameters(trainable, others)
