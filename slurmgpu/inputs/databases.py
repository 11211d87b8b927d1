"""Queries of SQLite and DuckDB databases as inputs: `sqlite:PATH?QUERY` and `duckdb:PATH?QUERY`."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slurmgpu.errors import SlurmGPUError
from slurmgpu.inputs.formats import Preview, first_doubled, refuse_changed
from slurmgpu.inputs.repack import FOLDER, RowGroups, even, hash_file, publish
from slurmgpu.inputs.spec import InputFile, InputSpec, Source
from slurmgpu.inputs.tables import Parquet
from slurmgpu.util.json_values import is_utf8
from slurmgpu.util.packages import check_pyarrow
from slurmgpu.util.users import expanded

PREFIXES = ("sqlite:", "duckdb:")
"""Prefixes of queries in `input`."""

_BATCH_ROWS = 64
_NOT_SQL = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | \$(\w*)\$.*?\$\1\$ | --[^\n]* | /\*.*?\*/""", re.DOTALL | re.VERBOSE
)
_ORDER = re.compile(r"[()\[\]]|\border\s+by\b", re.IGNORECASE)
_NULL = type(None)
_CHANGED = {"UHUGEINT", "BIGNUM", "BIT", "TIME WITH TIME ZONE"}
"""DuckDB's types whose values Arrow gets as other ones: as -1, as bytes, or without the time zone."""


@dataclass(frozen=True)
class Query:
    """A query of a database file."""

    kind: str
    path: Path
    sql: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}?{self.sql}"


def query_in(named: str | Sequence[str], base: Path) -> Query | None:
    """The query that an input names; None for files. SlurmGPUError for a query without ORDER BY, or beside others."""
    names = [named] if isinstance(named, str) else named
    found = next((name for name in names if name.startswith(PREFIXES)), None)
    if found is None:
        return None
    kind, _, rest = found.partition(":")
    path, _, sql = rest.partition("?")
    if len(names) > 1:
        raise SlurmGPUError(f"The input {found!r} is one of {len(names)}; a query must be alone. Use UNION ALL in it.")
    if not path or not sql.strip():
        raise SlurmGPUError(
            f"The input {found!r} is not a query; expected a path, a question mark and the query, such as "
            f'"{kind}:data.db?SELECT id, text FROM documents ORDER BY id".'
        )
    if not _has_order(sql):
        raise SlurmGPUError(
            f"The query of the input has no ORDER BY: {' '.join(sql.split())!r}. Rows would come in any order, so item "
            f"numbers would mean nothing. Add ORDER BY at its end, with columns that are unique in each row."
        )
    return Query(kind, base.absolute() / expanded(path), sql.strip())


def repack_query(
    query: Query, folder: Path, index: Path, *, stride: int, progress: Callable[[int, int], None] | None = None
) -> InputSpec:
    """Write the rows of a query to `folder`, and their index to `index`; return their spec.

    The database is only read. SlurmGPUError if the query fails, gives no rows, or if a column has several types.
    """
    check_pyarrow(f"A query of {query.path} is repacked, which needs", in_tasks=True)
    try:
        status = query.path.stat()
    except OSError as error:
        raise SlurmGPUError(f"The input's database {query.path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise SlurmGPUError(f"The input's database {query.path} is not a regular file. Name the file of a database.")
    found = Preview(str(query.path), status.st_size, status.st_mtime_ns)
    sha256 = hash_file(query.path, lambda done: progress(done, status.st_size) if progress else None)
    path = folder / FOLDER / "00000.parquet"
    columns, file = _pack_sqlite(query, path) if query.kind == "sqlite" else _pack_duckdb(query, path)
    refuse_changed(found, query.path.stat())
    file = replace(file, source=Source(str(query), status.st_size, status.st_mtime_ns, sha256))
    return publish(InputSpec(Parquet.name, (file,), file.n_items, stride, columns, repacked=True), index)


def _has_order(sql: str) -> bool:
    """Whether the query has ORDER BY outside of parentheses, texts and comments."""
    depth = 0
    for found in _ORDER.finditer(_NOT_SQL.sub(" ", sql)):
        if found[0] in "([":
            depth += 1
        elif found[0] in ")]":
            depth -= 1
        elif depth == 0:
            return True
    return False


def _pack_sqlite(query: Query, path: Path) -> tuple[tuple[str, ...], InputFile]:
    """The columns, and the file of the rows. They are read twice, because any value may change its column's type."""
    import pyarrow as pa

    try:
        with closing(sqlite3.connect(f"file:{quote(os.fsencode(query.path))}?mode=ro", uri=True)) as database:
            database.execute("BEGIN")  # both readings see the same rows
            cursor = database.execute(query.sql)
            columns = _checked_columns(query, [each[0] for each in cursor.description or ()])
            types: list[set[type]] = [set() for _ in columns]
            for rows in iter(lambda: cursor.fetchmany(_BATCH_ROWS), []):
                for kinds, values in zip(types, zip(*rows, strict=True), strict=True):
                    kinds.update(map(type, values))
            names = zip(columns, types, strict=True)
            schema = pa.schema([(name, _arrow_type(query, name, kinds)) for name, kinds in names])
            cursor = database.execute(query.sql)
            with RowGroups(path, schema) as groups:
                for rows in iter(lambda: cursor.fetchmany(_BATCH_ROWS), []):
                    typed = zip(schema, zip(*rows, strict=True), strict=True)
                    groups.add(pa.table([_array(query, *each) for each in typed], schema=schema))
                return columns, _finished(query, groups)
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:  # the last for the name of a column
        raise _failed(query, error) from error


def _pack_duckdb(query: Query, path: Path) -> tuple[tuple[str, ...], InputFile]:
    import pyarrow as pa

    if not is_utf8(str(query.path)):
        raise SlurmGPUError(f"DuckDB cannot open {query.path}, whose path is not UTF-8. Rename it.")
    try:
        import duckdb
    except ImportError as error:
        raise SlurmGPUError(f"Reading {query.path} needs duckdb: pip install 'slurmgpu[duckdb]'.") from error
    try:
        with closing(duckdb.connect(str(query.path), read_only=True)) as database:
            if len(database.extract_statements(query.sql)) != 1 or (rows := database.sql(query.sql)) is None:
                raise SlurmGPUError(f"The input's query is not a single SELECT: {' '.join(query.sql.split())!r}.")
            for name, kind in zip(rows.columns, rows.types, strict=True):
                if _has_changed(kind):
                    raise SlurmGPUError(
                        f"Column {name!r} of the query of {query.path} has the type {kind}, whose values would change. "
                        f"Convert it in the query, for example CAST({name} AS TEXT) AS {name}."
                    )
            reader = rows.to_arrow_reader(_BATCH_ROWS)
            columns = _checked_columns(query, reader.schema.names)
            with RowGroups(path, reader.schema) as groups:
                for table in even(reader):
                    groups.add(table.replace_schema_metadata(None))
                return columns, _finished(query, groups)
    except (duckdb.Error, pa.ArrowException) as error:
        raise _failed(query, error) from error


def _has_changed(kind: Any) -> bool:
    """Whether a type of DuckDB is, or has within it, one whose values Arrow gets as other ones."""
    if kind.id in ("list", "array", "struct", "map", "union"):  # an array's size is among its children
        return any(_has_changed(inner) for _, inner in kind.children if not isinstance(inner, int))
    return str(kind) in _CHANGED


def _checked_columns(query: Query, names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise SlurmGPUError(f"The input's query is not a SELECT, so it gives no rows: {' '.join(query.sql.split())!r}.")
    if (doubled := first_doubled(names)) is not None:
        raise SlurmGPUError(f"The input's query has two columns named {doubled!r}. Rename one with AS.")
    return tuple(names)


def _arrow_type(query: Query, name: str, kinds: set[type]) -> Any:
    """The type of a column in which SQLite found values of these kinds."""
    import pyarrow as pa

    kinds = kinds - {_NULL}
    if kinds == {int, float}:
        kinds = {float}
    if len(kinds) > 1:
        found = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise SlurmGPUError(
            f"Column {name!r} of the query of {query.path} has values of several types, {found}; expected one. "
            f"Convert them in the query, for example CAST({name} AS TEXT) AS {name}."
        )
    [kind] = kinds or {_NULL}
    return {int: pa.int64(), float: pa.float64(), str: pa.large_string(), bytes: pa.large_binary(), _NULL: pa.null()}[
        kind
    ]


def _array(query: Query, field: Any, values: Sequence[Any]) -> Any:
    """Values of SQLite in the type of their column."""
    import pyarrow as pa

    try:
        return pa.array(values, field.type)
    except pa.ArrowInvalid as error:
        raise SlurmGPUError(
            f"Column {field.name!r} of the query of {query.path} has floats and a large integer, which a float may "
            f"not hold exactly: {error}. Convert them in the query: CAST({field.name} AS TEXT) AS {field.name}, or AS "
            f"REAL to round them."
        ) from error


def _finished(query: Query, groups: RowGroups) -> InputFile:
    if not groups.n_items:
        raise SlurmGPUError(f"The input's query gives no rows of {query.path}: {' '.join(query.sql.split())!r}.")
    return groups.close()


def _failed(query: Query, error: Exception) -> SlurmGPUError:
    said = " ".join(str(error).split())
    return SlurmGPUError(f"The query of {query.path} failed: {said}. It was {' '.join(query.sql.split())!r}.")
