"""The parameters of a model of the user's own, at planning: its class is built without numbers, in another process.

In another process, since user code of one planning must not stay imported for the next, and as PyTorch takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from slurmgpu.util.exceptions import described
from slurmgpu.util.packages import own_python_path

TIMEOUT_S = 120


@dataclass(frozen=True)
class OwnParameters:
    """The trainable parameters by name, in the model's order, with their sizes; `others` says what else a name is."""

    trainable: Mapping[str, int]
    others: Mapping[str, str]


def own_parameters(architecture: str, n_entities: int, n_relations: int) -> OwnParameters | str:
    """The parameters of the class `architecture`, "file.py:Class"; a phrase if it cannot be built here."""
    if "torch" not in sys.modules and find_spec("torch") is None:
        return "PyTorch is not installed"
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", code, architecture, str(n_entities), str(n_relations)]
    environ = {**os.environ, "PYTHONPATH": own_python_path(), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT_S} seconds"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:]
        return last[0] if last else f"its process ended with {done.returncode}"
    return OwnParameters(**found) if isinstance(found, dict) else str(found)


def main() -> None:
    """Write the parameters of a class as JSON, or an error as a JSON string; the arguments are those of `built`."""
    architecture, *sizes = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):  # user code may print
        found = built(architecture, *map(int, sizes))
    sys.stdout.write(json.dumps(found if isinstance(found, str) else asdict(found)))


def built(architecture: str, n_entities: int, n_relations: int) -> OwnParameters | str:
    """As `own_parameters`, in this process."""
    try:
        import torch

        from slurmgpu.workloads.tracin.own_class import class_of

        cls, _ = class_of(architecture)
        with torch.device("meta"):  # shapes without memory
            module = cls(n_entities=n_entities, n_relations=n_relations)
    except Exception as error:  # user code may raise any, and a task may have what is missing here
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
    return OwnParameters(trainable, others)
