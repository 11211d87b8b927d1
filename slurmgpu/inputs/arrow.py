"""Arrow files: .arrow and .feather, and those in a folder that `save_to_disk` of Hugging Face's datasets writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.tables import Groups, Tables, damage, raise_if_disk_failed
from slurmgpu.util.packages import check_pyarrow

MOST_BYTES = 1 << 31
"""The most memory for a compressed stream, which must be unpacked from its beginning."""

_FILE_MAGIC = b"ARROW1"
_FEATHER_1 = b"FEA1"
_END = b"\xff\xff\xff\xff\0\0\0\0"


class ArrowRows(Groups):
    """The rows of an Arrow file, by record batches, which are mapped into memory rather than read."""

    unit, kind = "record batch", "Arrow"

    def __init__(self, path: str) -> None:
        check_pyarrow(f"Reading {path} needs")
        import pyarrow as pa

        try:
            self._source = pa.memory_map(os.fsencode(path))  # it may have bytes that are no UTF-8
        except damage() as error:  # an empty file cannot be mapped
            raise_if_disk_failed(error)
            raise SlurmGPUError(f"{path} is not an Arrow file: {error}.") from error
        try:
            self._open(path)
        except damage() as error:
            self._source.close()
            raise_if_disk_failed(error)
            raise SlurmGPUError(f"{path} is not an Arrow file, or was truncated: {error}.") from error
        except BaseException:
            self._source.close()
            raise

    def _open(self, path: str) -> None:
        import pyarrow as pa

        magic = self._source.read(len(_FILE_MAGIC))
        self._source.seek(0)
        if magic.startswith(_FEATHER_1):
            raise SlurmGPUError(f"{path} is a Feather file of version 1. Write it again as version 2.")
        if magic == _FILE_MAGIC:
            self._reader = pa.ipc.open_file(self._source)
            schema, n_batches = self._reader.schema, self._reader.num_record_batches
            # Unpacks only the first column of a compressed file.
            first = pa.ipc.open_file(self._source, options=pa.ipc.IpcReadOptions(included_fields=[0]))
            sizes = [first.get_batch(number).num_rows for number in range(n_batches)]
        else:
            self._reader, before = None, pa.total_allocated_bytes()
            stream = pa.ipc.open_stream(self._source)
            schema, self._batches = stream.schema, []
            for batch in stream:
                self._batches.append(batch)  # takes no memory unless it is compressed: it refers to the mapped file
                if pa.total_allocated_bytes() - before > MOST_BYTES:
                    raise SlurmGPUError(
                        f"{path} is a compressed stream of more than {MOST_BYTES >> 30} GiB, in which finding a row "
                        f"means reading all rows before it. Write it as an Arrow file, or as Parquet."
                    )
            self._check_end(path)
            sizes = [batch.num_rows for batch in self._batches]
        super().__init__(path, sizes, schema.names)

    def _check_end(self, path: str) -> None:
        """SlurmGPUError unless the file ends with the end mark of its stream."""
        end, size = self._source.tell(), self._source.size()
        self._source.seek(max(0, end - len(_END)))
        if self._source.read(len(_END)) != _END:
            raise SlurmGPUError(f"{path} has no end mark: it was truncated. Copy it again, or write it again.")
        if end != size:
            raise SlurmGPUError(f"{path} has {size - end} bytes after its end; expected one stream. Write it again.")

    def load(self, group: int) -> Any:
        """A record batch. Its offsets and texts are checked, because Arrow has no checksums."""
        batch = self._batches[group] if self._reader is None else self._reader.get_batch(group)
        batch.validate(full=True)
        return batch

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._batches = []
        self._source.close()


class Arrow(Tables, format="arrow"):
    """Arrow's file and stream formats, read by pyarrow."""

    def recognises(self, path: Path) -> bool:
        """Whether a file name is one of Arrow's."""
        return path.suffix.lower() in (".arrow", ".feather")

    def table(self, path: str, *, verify: bool = False) -> ArrowRows:
        """The rows of a file."""
        return ArrowRows(path)
