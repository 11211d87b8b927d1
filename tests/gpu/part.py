"""One part in its own process: `python -m tests.gpu.part PART FOLDER N_GPUS` runs the findings named on stdin.

It prepares what needs no GPU, such as imports, while the previous part may still run; then it reads the names of its
findings from one line. It writes a JSON line to standard output when a finding begins, and one when it ends. A finding
that breaks CUDA ends the process; the parent starts another one for the remaining findings.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from slurmgpu.util.broken_process import is_broken_cuda
from slurmgpu.util.out_of_memory import is_out_of_gpu_memory
from tests.gpu.findings import HELD, NOT_HELD, NOT_MEASURED, Finding, Machine, NotHeld, NotMeasured, findings_of

ENOUGH_BYTES = 20e9
"""With this much memory for its process no finding may run out of it."""


def main(argv: list[str]) -> None:
    """Run the findings that the parent names; none if the parent has ended."""
    part, folder, n_gpus = argv
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output, too
    machine = Machine("cuda:0" if int(n_gpus) else "cpu", int(n_gpus), Path(folder))
    module = importlib.import_module(f"tests.gpu.{part}")
    try:
        getattr(module, "prepare", lambda _: None)(machine)
    except Exception:  # findings that need it fail with the same error in their rows
        traceback.print_exc()
    names = sys.stdin.readline().split()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # processes that a finding starts must not wait for input
    for each in findings_of(module):
        if each.name in names:
            print(json.dumps({"begin": each.name, "log_bytes": os.lseek(2, 0, os.SEEK_END)}), file=told, flush=True)
            line, is_broken = run(each, machine)
            print(json.dumps({"end": each.name, **line}), file=told, flush=True)
            if is_broken:
                os._exit(1)


def run(each: Finding, machine: Machine) -> tuple[dict[str, Any], bool]:
    """The verdict and the figures of a finding, and whether CUDA is broken now."""
    try:
        return {"verdict": HELD, "figures": each.function(machine)}, False
    except NotHeld as failure:
        return {"verdict": NOT_HELD, "figures": str(failure), "trace": failure.details}, False
    except NotMeasured as reason:
        return {"verdict": NOT_MEASURED, "figures": str(reason)}, False
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        first_line = str(error).strip().partition("\n")[0]
        figures = f"{type(error).__name__}: {first_line} ({Path(last.filename).name}, line {last.lineno})"
        if is_out_of_gpu_memory(error) and (lack := _lack(machine)):
            return {"verdict": NOT_MEASURED, "figures": f"{lack}: {figures}"}, False
        line = {"verdict": NOT_HELD, "figures": figures, "trace": traceback.format_exc()}
        return line, is_broken_cuda(error)


def _lack(machine: Machine) -> str:
    """What a finding that ran out of memory lacks on a small GPU, a MIG instance, or one that others use; else ""."""
    if not machine.on_gpu:
        return ""
    import torch

    there = torch.cuda.mem_get_info(machine.device)[0] + torch.cuda.memory_reserved(machine.device)
    if there >= ENOUGH_BYTES:
        return ""
    return f"it needs {ENOUGH_BYTES / 1e9:.0f} GB, and {there / 1e9:.1f} are not used by others"


if __name__ == "__main__":
    main(sys.argv[1:])
