"""Standard input, output and error of a process that was started without them, as by `<&-`."""

from __future__ import annotations

import os


def open_missing() -> None:
    """Open /dev/null for each stream that is closed, before another file gets its number and is taken for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least number that is free
