"""Standard input, output and error of a process that was started without them, as by `<&-`."""

from __future__ import annotations

import os


def open_missing() -> None:
    """Open /dev/null in place of those that are closed, before a file gets the number of one, and is taken for it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the least number that is free
