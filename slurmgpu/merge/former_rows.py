"""Read the verified rows of an earlier merged file, by shard: a newer merge must not lose them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slurmgpu.code.versions import Stretch, within
from slurmgpu.errors import ItemError
from slurmgpu.shards.columns import Column
from slurmgpu.shards.numbers import OFFSET_DTYPE
from slurmgpu.shards.piece_table import Pieces, lead_bytes
from slurmgpu.shards.shard_file import Directory, rows_from
from slurmgpu.shards.userblock import MERGED, DamagedShardError, Reader, read_userblock
from slurmgpu.util.exceptions import described


class FormerRows:
    """A merged file of the plan with this fingerprint; DamagedShardError for any other file.

    Its bytes are damaged only if two readings say so.
    """

    def __init__(self, path: Path, columns: Mapping[str, Column], fingerprint: str, patience_s: float) -> None:
        self._reader = Reader(path, patience_s=patience_s)
        try:
            directory, table, _ = self._reader.twice(lambda: read_userblock(self._reader))
            attributes = directory["attributes"]
            if attributes["format"] != MERGED or attributes["fingerprint"] != fingerprint:
                raise DamagedShardError("it is not a merged file of this plan")
            self._pieces = Pieces(directory, table)
            self._table = self._pieces.table
            self._code = [Stretch(*each) for each in directory["code"]]
        except BaseException as error:
            self._reader.close()
            if isinstance(error, (KeyError, TypeError, ValueError)):
                raise DamagedShardError(f"its directory is invalid ({described(error)})") from error
            raise
        self._columns = columns
        self._numbers = {region.path: number for number, region in enumerate(self._pieces.regions)}
        self.shards = {int(row["shard"]): place for place, row in enumerate(self._table)}
        """The shards in the file, each with its position in the piece table."""

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    def code(self, shard: int) -> list[Stretch]:
        """The code that computed a shard's rows."""
        place = self.shards[shard]
        start, stop = (int(self._table[name][place]) for name in ("start", "stop"))
        return within(self._code, start, stop)

    def without_failures(self) -> set[int]:
        """The shards in the file whose items are all good, by the piece table alone."""
        message_bytes = self._table["n_bytes"][:, self._numbers["error/values"]]
        return set(self._table["shard"][message_bytes == 0].tolist())

    def failed(self, shard: int) -> set[int]:
        """The indices of a shard's failed items."""
        start = int(self._table["start"][self.shards[shard]])
        offsets = np.frombuffer(self._offsets("error/offsets", shard), OFFSET_DTYPE)
        return {start + int(row) for row in np.flatnonzero(np.diff(offsets))}

    def rows(self, shard: int) -> list[dict[str, Any] | ItemError]:
        """The rows of a shard as `write_shard` takes them; DamagedShardError if a byte differs."""
        place = self.shards[shard]
        n_rows = int(self._table["stop"][place] - self._table["start"][place])
        contents = {
            region.path: self._offsets(region.path, shard) if lead_bytes(region) else self._piece(region.path, shard)
            for region in self._pieces.regions
        }
        return rows_from(contents, self._columns, n_rows)

    def are_of(self, shard: int, directory: Directory) -> bool:
        """Whether a shard's rows are those of a file with this directory, by the checksums of both."""
        place = self.shards[shard]
        for region in directory.datasets:
            if (number := self._numbers.get(region.path)) is None:
                return False
            if lead_bytes(region):
                crc32 = zlib.crc32(self._offsets(region.path, shard))
            else:
                crc32 = int(self._table["crc32"][place, number])
            if crc32 != region.crc32:
                return False
        return True

    def _offsets(self, path: str, shard: int) -> bytes:
        """A shard's offsets as in its own file."""
        values = path.removesuffix("/offsets") + "/values"
        number = self._numbers[values]
        size = np.dtype(self._pieces.regions[number].dtype).itemsize
        base = int(self._pieces.before[self.shards[shard], number]) // size
        moved = np.frombuffer(self._piece(path, shard), OFFSET_DTYPE) - base
        return bytes(OFFSET_DTYPE.itemsize) + moved.tobytes()

    def _piece(self, path: str, shard: int) -> bytes:
        name, begin, n_bytes, crc32 = self._pieces.piece(self.shards[shard], self._numbers[path])

        def read() -> bytes:
            content = self._reader.read(begin, begin + n_bytes)
            if zlib.crc32(content) != crc32:
                raise DamagedShardError(f"the checksum of {name} differs")
            return content

        return self._reader.twice(read)
