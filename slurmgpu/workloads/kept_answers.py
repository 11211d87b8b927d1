"""Answers that a worker had when its engine broke, for the next worker of its attempt.

Rows are published by the shard, so a worker that ends in the middle of a call loses the answers that it has, and the
next one computes what was in flight item by item.
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
"""The most answers that are kept, the latest ones: a call has `batch_size` items of `n` each, or several rounds."""
MOST_BYTES = 1 << 30


class KeptAnswers:
    """The latest answers of a worker, which are written to `path` when its engine breaks, and read by the next worker.

    An answer belongs to its prompt, sampling and key, whatever else is in its batch. `path` must be of one attempt:
    its workers have the same settings and the same code.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._latest: deque[tuple[str, Output]] = deque(maxlen=MOST_ANSWERS)
        self._former = _read(path)
        if self._former:
            log.info("%d answers of a worker whose engine broke are there", len(self._former))

    def each(
        self, requests: Sequence[Request], generate: Callable[[Sequence[Request]], Iterable[Output]]
    ) -> Iterator[Output]:
        """Each request's output: one that is kept, or what the engine's `generate` gives."""
        names = {request.id: digest_of_request(dataclasses.replace(request, id=0)) for request in requests}
        for request in requests:
            if (value := self._former.get(names[request.id])) is not None:
                yield dataclasses.replace(from_json(Output, value), id=request.id)
        left = [request for request in requests if names[request.id] not in self._former]
        if not left:
            return
        try:
            for output in generate(left):
                if output.error is None:  # an error may be the engine's last
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
            # Nothing is fsynced: with the machine, the attempt is lost as well.
            write_bytes(self._path, content, durable=False)
        except Exception as error:  # whatever it is, the worker's own error is that of its engine
            log.warning("%d answers are not kept, and will be computed again: %s", len(kept), message_of(error))
        else:
            log.info("%d answers are kept for the next worker", len(kept))


def _read(path: Path) -> Mapping[str, dict[str, Any]]:
    try:
        found = json.loads(read_bytes(path, max_bytes=MOST_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it is no object of JSON")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, and what it has is computed again: %s", path, error)
        return {}
    return found
