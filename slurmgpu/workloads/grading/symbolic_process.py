"""The process that math-verify runs in: `python -m slurmgpu.workloads.grading.symbolic_process CPU_SECONDS`.

A line of JSON on standard input is a question from `symbolic.Symbols`, and a line on standard output its answer.
SIGXCPU ends the process if a question needs more than CPU_SECONDS: some questions never end in SymPy, and math-verify's
own limit is an alarm, which interrupts only Python code.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import resource
import signal
import sys
import time
from typing import Any

MOST_BYTES = 4 << 30
"""Memory of the process: an expression that needs more raises MemoryError, and counts as not equal."""
GOES_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that Slurm may send to all processes of a job; this one ignores them, and ends with its standard input."""


@functools.lru_cache(4096)
def parsed(text: str) -> list[Any]:
    """The expression in a text and its source; or only the source; or nothing."""
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def answer_to(wanted: str, *texts: str) -> Any:
    """The answer to a question of `symbolic.Symbols`."""
    from math_verify import verify

    found = [parsed(text) for text in texts]
    if wanted == "equal":
        return bool(all(found) and verify(*found, timeout_seconds=None))
    if wanted == "written":
        return next((each for each in reversed(found[0]) if isinstance(each, str)), None)
    expression = next((each for each in found[0] if not isinstance(each, str)), None)
    return expression is not None if wanted == "exists" else None if expression is None else _simplest(expression)


def _simplest(expression: Any) -> str:
    """A text that is equal for most equal expressions; for an equation such as x = 3 it is the right side."""
    import sympy

    if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
        expression = expression.rhs
    try:
        return str(sympy.nsimplify(sympy.simplify(expression), rational=True))
    except Exception:  # SymPy raises any error for objects other than sums or products, such as a set
        return str(expression)


def main() -> None:
    """Answer questions until standard input ends."""
    for each in GOES_ON:
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    logging.disable()
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)  # noqa: T201
        return
    print(json.dumps({"ready": True}), flush=True)  # noqa: T201
    for line in sys.stdin:
        until_s = math.ceil(time.process_time()) + int(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_CPU, (until_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        print(json.dumps({"answer": answer_to(*json.loads(line))}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
