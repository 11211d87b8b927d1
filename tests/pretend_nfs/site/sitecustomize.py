"""Has the clock of a pretended node err by as many seconds as its file says, which may change at any time."""

import os
import time

_path = os.environ.get("PRETEND_CLOCK")
_true_time, _true_time_ns = time.time, time.time_ns


def _ahead():
    try:
        with open(_path) as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0


if _path:
    time.time = lambda: _true_time() + _ahead()
    time.time_ns = lambda: _true_time_ns() + int(_ahead() * 1e9)
