"""Files with a counter that their process increments while it lives: claims, heartbeats and the run's lock."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SIZE = 1024


def encode(value: Mapping[str, object]) -> bytes:
    """A value as bytes, always of one length: a shorter text in place would leave the end of the longer one."""
    return json.dumps(dict(value)).encode().ljust(SIZE - 1) + b"\n"


def decode(content: bytes) -> dict[str, Any] | None:
    """The value; None while it is written for the first time, or if it is damaged."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def counting(count: Callable[[], object], pause_s: float, name: str) -> Iterator[None]:
    """Call `count` every `pause_s` seconds while the block lasts, in a thread of this name; OSErrors are ignored."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(pause_s):
            with contextlib.suppress(OSError):
                count()

    thread = threading.Thread(target=go_on, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
