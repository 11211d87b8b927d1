"""The other side of a stream, for Python: a function that answers JSON lines."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

from slurmgpu.errors import Retry
from slurmgpu.util.broken_process import is_broken_cuda
from slurmgpu.util.exceptions import described, is_of_network, message_of, trace_of
from slurmgpu.util.json_values import check_keys
from slurmgpu.util.out_of_memory import is_out_of_gpu_memory


def serve(function: Callable[..., Mapping[str, Any]]) -> None:
    """Answer items from `use = "command"` with `stream = true`, until there are no more.

    `function` gets the data of an item, and `seed` if it has a parameter of that name. It returns the columns of the
    item's row. An exception is the item's error; after `Retry`, ConnectionError and TimeoutError the item is tried
    again. Load models before you call `serve`, and print only to standard error until then. Later prints of `function`
    go to standard error by themselves, since standard output is the pipe for answers; its standard input is empty.
    """
    pipe, requests = os.dup(1), os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    takes_seed = "seed" in inspect.signature(function).parameters
    with open(pipe, "w", encoding="utf-8") as answers, open(requests, "rb") as lines:
        _write(answers, json.dumps({"ready": True}))
        for line in lines:
            item = json.loads(line)
            try:
                seed = {"seed": item["seed"]} if takes_seed else {}
                row = {**function(item["data"], **seed), "index": item["index"]}
                answer = json.dumps(row, default=_plain)
                check_keys(row)
            except Exception as error:
                if is_broken_cuda(error) and not is_out_of_gpu_memory(error):
                    raise  # the GPU is lost to this process; in a new one it works
                sys.stderr.write(trace_of(error))
                said = message_of(error) if isinstance(error, Retry) else described(error)
                answer = json.dumps({"index": item["index"], "error": said or type(error).__name__, **_retry(error)})
            _write(answers, answer)


def _retry(error: Exception) -> dict[str, Any]:
    if isinstance(error, Retry) and error.after > 0:
        return {"retry": error.after}
    return {"retry": True} if isinstance(error, Retry) or is_of_network(error) else {}


def _write(answers: IO[str], answer: str) -> None:
    answers.write(answer + "\n")
    answers.flush()


def _plain(value: Any) -> Any:
    """Plain values for NumPy arrays and numbers, and for tensors."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no type for {type(value).__name__}")
