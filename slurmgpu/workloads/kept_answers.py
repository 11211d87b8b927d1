"""Answers from a worker whose engine broke, kept for the next worker of its attempt.

Rows are published a shard at a time, so a worker that ends in the middle of a call would lose its answers; the next
worker computes the items in flight one by one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmgpu.errors import WorkerBrokenError
from slurmgpu.llm.interface.engine import Output, Request
from slurmgpu.llm.interface.exchange import digest_of_request, from_json, to_json
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.exceptions import message_of
from slurmgpu.util.shared_files import make_folder, read_bytes

log = logging.getLogger(__name__)

MOST_ANSWERS = 2048
"""The most answers that are kept, the latest ones: a call has `batch_size` items of `n` answers, or several rounds."""
MOST_BYTES = 1 << 30


class KeptAnswers:
    """The latest answers of a worker, written to `path` when its engine breaks, and read by the next worker.

    An answer depends on its prompt, sampling and key, not on its batch. `path` must belong to one attempt, so that
    all its workers have the same settings and code.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._latest: deque[tuple[str, Output]] = deque(maxlen=MOST_ANSWERS)
        self._former = _read(path)
        if self._former:
            log.info("found %d answers from a worker whose engine broke", len(self._former))

    def each(
        self, requests: Sequence[Request], generate: Callable[[Sequence[Request]], Iterable[Output]]
    ) -> Iterator[Output]:
        """Each request's output, kept or from the engine's `generate`."""
        names = {request.id: digest_of_request(dataclasses.replace(request, id=0)) for request in requests}
        for request in requests:
            if (value := self._former.get(names[request.id])) is not None:
                yield dataclasses.replace(from_json(Output, value), id=request.id)
        left = [request for request in requests if names[request.id] not in self._former]
        if not left:
            return
        try:
            for output in generate(left):
                if output.error is None:  # an error may be the engine's last output
                    self._latest.append((names[output.id], output))
                yield output
        except WorkerBrokenError:
            self._write()
            raise

    def _write(self) -> None:
        kept = {**self._former, **{name: to_json(output) for name, output in self._latest}}
        if not kept:
            return
        try:
            content = json.dumps(kept).encode()
            if len(content) > MOST_BYTES:
                raise ValueError(f"they have {len(content):,} bytes; at most {MOST_BYTES:,} are kept")
            make_folder(self._path.parent)
            # No fsync: if the machine crashes, the attempt is lost as well.
            write_bytes(self._path, content, durable=False)
        except Exception as error:  # any error: the worker must report the engine's
            log.warning("cannot keep %d answers, which will be computed again: %s", len(kept), message_of(error))
        else:
            log.info("kept %d answers for the next worker", len(kept))


def _read(path: Path) -> Mapping[str, dict[str, Any]]:
    try:
        found = json.loads(read_bytes(path, max_bytes=MOST_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so its answers are computed again: %s", path, error)
        return {}
    return found
