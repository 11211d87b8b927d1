"""Inputs without random access, and items from Python: repacked at planning into the run directory."""

from __future__ import annotations

import bz2
import contextlib
import datetime
import gzip
import hashlib
import json
import lzma
import os
import random
import re
import resource
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import (
    InputSpec,
    Reader,
    check_input,
    databases,
    find,
    query_in,
    repack_query,
    repack_table,
    scan,
)
from slurmgpu.inputs.repack import GROUP_ITEMS
from slurmgpu.plan.planner import draft_run
from slurmgpu.run.creation import create_run
from slurmgpu.run.directory import Run
from tests.support.limited import memory_of_scan
from tests.support.nightly import by_night

ROWS: list[dict[str, Any]] = [
    {"id": i, "täxt": f"wörd {i}", "at": {"x": i / 7, "tags": ["a"] * (i % 3)}} for i in range(5000)
]
DATED: list[dict[str, Any]] = [{"id": i, "on": datetime.date(2024, 1, 1 + i % 9), "raw": b"\0" * i} for i in range(300)]

WORKLOAD = """
from slurmgpu import Text
class Texts:
    columns = {"text": Text()}
    batch_size = 4
    def load(self, task):
        pass
    def __call__(self, items):
        return [{"text": str(item.data)} for item in items]
"""


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: bytes(pa.Codec("zstd").compress(content, asbytes=True)),
}


def repacked(table: Any, folder: Path) -> InputSpec:
    folder.mkdir(exist_ok=True)
    return repack_table(table, folder, folder / "index", stride=4)


def all_items(spec: InputSpec, index: Path) -> list[Any]:
    with Reader(spec, index) as reader:
        return [
            item for start in range(0, spec.n_items, 7) for item in reader.read(start, min(start + 7, spec.n_items))
        ]


def read_plan(path: Path) -> tuple[Any, list[str]] | str:
    """The columns and the items of a file, with its path left out of errors; or why it is refused."""
    index = path.with_name("index")

    def words(text: object) -> str:
        return str(text).replace(str(path), "FILE")

    try:
        spec = scan([path], index, stride=4)
    except SlurmGPUError as error:
        return words(error)
    items = all_items(spec, index)
    return spec.columns, [words(item) if isinstance(item, ItemError) else item for item in items]


JSONL = [f'{{"id": {i}, "text": "tëxt {i % 9}"}}'.encode() for i in range(3000)]


CONTENTS = [
    ("jsonl", b"\n".join(JSONL)),
    ("jsonl", b"\xef\xbb\xbf" + b"\r\n".join(JSONL) + b"\r\n\n\n"),
    ("jsonl", b"\n".join([*JSONL[:2500], b"not json", *JSONL[2500:]]) + b"\n"),
    ("jsonl", b"\n".join([*JSONL[:20], b"not json"])),
    ("jsonl", b"\n".join([*JSONL, b'{"cut": '])),
    ("jsonl", (b'{"text": "' + b"x" * 200_000 + b'"}\n') * 3),
    ("jsonl", b"\n" * 100),
    ("jsonl", b""),
    ("csv", b'id,text\r\n1,"a\r\nb"\r\n2,"say ""x"""\r\n\r\n'),
    ("csv", b"id,text\n" + b'7,"two\nlines"\n' * 30_000 + b"8\n" + b"9,x\n" * 10_000),
    ("csv", b"id,text\n" + b"1,x\n" * 30_000 + b'2,x"y\n'),
    ("csv", b"id,text\n\n"),
    ("txt", b"a\n\nb\n\n"),
    ("txt", b"\n"),
    ("txt", b"x" * 3_000_000 + b"\n" + b"y" * 70_000 + b"\n"),
]


@pytest.mark.parametrize(
    ("suffix", "content", "compressed"),
    [
        *((*each, "gz") for each in CONTENTS),
        *((*each, "zst") for each in CONTENTS[:3]),
        *(by_night(*each, "zst") for each in CONTENTS[3:]),
        *(by_night(*each, other) for each in CONTENTS for other in ("bz2", "xz")),
    ],
)
def test_a_compressed_file_is_read_as_the_plain_one(
    tmp_path: Path, suffix: str, content: bytes, compressed: str
) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(content)
    half = len(content) // 2
    members = COMPRESSORS[compressed](content[:half]) + COMPRESSORS[compressed](content[half:])
    (tmp_path / f"a.{suffix}.{compressed}").write_bytes(members)
    assert read_plan(tmp_path / f"a.{suffix}.{compressed}") == read_plan(tmp_path / f"a.{suffix}")


NUMBERED = [f'{{"id": {i:6}}} \n'.encode() for i in range(200)]  # of 16 bytes, so that chunks begin with a line


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        ("jsonl", NUMBERED[0] + b"\n" * 300 + NUMBERED[1] + b"\r\n" * 300),
        ("txt", b"a\n" + b"\n" * 300 + b"b" + b"\n" * 300),
        ("txt", b"\n" * 300),
        ("jsonl", b"".join([*NUMBERED[:151], b"not json       \n", *NUMBERED[152:]])),
    ],
)
def test_chunks_of_newlines_and_bad_lines_behind_the_first_chunk_are_those_of_the_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, content: bytes
) -> None:
    monkeypatch.setattr("slurmgpu.inputs.repack.CHUNK_BYTES", 128)
    (tmp_path / f"a.{suffix}").write_bytes(content)
    (tmp_path / f"a.{suffix}.gz").write_bytes(gzip.compress(content))
    found = read_plan(tmp_path / f"a.{suffix}.gz")
    assert found == read_plan(tmp_path / f"a.{suffix}")
    assert (b"not json" in content) == ("FILE, line 152: " in found)


@pytest.mark.parametrize("compressed", COMPRESSORS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda members: members[:-9],
        lambda members: members[: len(members) // 4],
        lambda members: members + b"junk of twenty bytes",
        lambda members: members[:60] + bytes(40) + members[100:],  # Arrow's zstd writes no checksum of the content
        lambda members: b'{"text": "not compressed"}\n',
    ],
    ids=["cut", "cut early", "with junk behind it", "altered", "plain"],
)
def test_a_damaged_archive_is_refused(tmp_path: Path, compressed: str, damage: Callable[[bytes], bytes]) -> None:
    content = b"\n".join(JSONL)
    path = tmp_path / f"a.jsonl.{compressed}"
    path.write_bytes(damage(COMPRESSORS[compressed](content) + COMPRESSORS[compressed](content)))
    with pytest.raises(SlurmGPUError, match=re.escape(str(path))):
        scan([path], tmp_path / "index", stride=4)


MEMBER = gzip.compress(b'{"text": "a"}\n' * 4000)


@pytest.mark.parametrize(
    ("members", "is_whole"),
    [
        (MEMBER, True),
        (MEMBER + MEMBER, True),
        (gzip.compress(b"") + MEMBER, True),
        (MEMBER + MEMBER[:5], False),
        (MEMBER[:-8] + b"abcd" + MEMBER[-4:], False),  # the checksum
        (MEMBER[:-4] + b"abcd", False),  # the length
        (MEMBER + b"x", False),
        (MEMBER + MEMBER[:-8] + b"abcd" + MEMBER[-4:], False),
    ],
)
def test_gzip_is_read_alike_with_isal_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: bytes, is_whole: bool
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(members)
    found = [read_plan(tmp_path / "a.jsonl.gz")]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal", None)
        found.append(read_plan(tmp_path / "a.jsonl.gz"))
    if is_whole:
        assert found[0] == found[1]
        assert not isinstance(found[0], str)
    else:
        assert all("FILE is not a complete .gz file" in refusal for refusal in found)


def test_files_of_several_compressions_are_one_input(tmp_path: Path) -> None:
    contents = [b"\n".join(JSONL[i : i + 600]) for i in range(0, 3000, 600)]
    for number, (content, suffix) in enumerate(zip(contents, [*COMPRESSORS, ""], strict=True)):
        packed = COMPRESSORS[suffix](content) if suffix else content
        (tmp_path / f"{number}.jsonl{suffix and '.'}{suffix}").write_bytes(packed)
    paths = find("*.jsonl*", tmp_path)
    spec = scan(paths, tmp_path / "index", stride=4)
    assert [item["id"] for item in all_items(spec, tmp_path / "index")] == list(range(3000))
    assert [file.sha256 for file in spec.files] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert [file.source and file.source.path for file in spec.files] == [*map(str, paths)]


def test_repacking_300_mb_takes_less_than_150_mb_of_memory(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 998}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 10_000, 1) * 30)
    assert memory_of_scan(tmp_path / "a.jsonl.gz", tmp_path / "index") < 150


def test_tables_and_data_frames_are_read_as_their_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(DATED)
    spec = repacked(table, tmp_path / "table")
    assert (spec.columns, all_items(spec, tmp_path / "table" / "index")) == (("id", "on", "raw"), DATED)
    again = repacked(table, tmp_path / "again")
    assert again.digest == spec.digest, "the same table planned twice is the same input"
    assert Path(again.files[0].path).read_bytes() == Path(spec.files[0].path).read_bytes()
    pieces = [table.slice(i, 17) for i in range(0, 300, 17)]
    assert repacked(pa.concat_tables(pieces), tmp_path / "pieces").digest == spec.digest
    assert repacked(table.slice(0, 299), tmp_path / "less").digest != spec.digest
    assert spec.files[0].mtime_ns % 10**9 == 0, "a copy may keep whole seconds only"
    frame = repacked(pd.DataFrame(DATED), tmp_path / "frame")
    assert all_items(frame, tmp_path / "frame" / "index") == DATED


def test_row_groups_are_bounded_in_rows_and_in_bytes(tmp_path: Path) -> None:
    about = pq.ParquetFile(repacked(pa.Table.from_pylist(ROWS), tmp_path / "rows").files[0].path).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [GROUP_ITEMS, GROUP_ITEMS, 904]
    wide = pa.table({"x": ["a" * 200_000] * 600})
    about = pq.ParquetFile(repacked(wide, tmp_path / "wide").files[0].path).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [256, 256, 88]


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            repacked(pa.table({"x": [os.urandom(9000) for _ in range(5000)]}), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "input" / "00000.parquet")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"x": []}), "The table has no rows"),
        (pa.table([[1], [2]], names=["x", "x"]), "two columns are named 'x'"),
    ],
)
def test_tables_that_cannot_be_an_input_are_refused(tmp_path: Path, table: Any, words: str) -> None:
    with pytest.raises(SlurmGPUError, match=words):
        repacked(table, tmp_path)


def test_a_turned_bit_of_a_repacked_table_is_its_items_error(tmp_path: Path) -> None:
    """Compression keeps numbers at random as they are, so only the checksums of pages can notice it."""
    numbers_at_random = random.Random(1)
    numbers = [numbers_at_random.getrandbits(62) for _ in range(10)]
    spec = repacked(pa.table({"n": numbers}), tmp_path)
    path, middle = Path(spec.files[0].path), numbers[5].to_bytes(8, "little")
    content = path.read_bytes()
    assert content.count(middle) == 1
    path.write_bytes(content.replace(middle, (numbers[5] ^ 1).to_bytes(8, "little")))
    os.utime(path, ns=(0, spec.files[0].mtime_ns))
    assert all(isinstance(item, ItemError) for item in all_items(spec, tmp_path / "index"))


def test_repacked_items_move_with_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text(WORKLOAD)
    (tmp_path / "run.toml").write_text('[workload]\nuse = "texts.py:Texts"\n')
    with draft_run(tmp_path / "run.toml", records=pa.Table.from_pylist(ROWS)) as draft:
        plan = create_run(draft.run_dir, draft.plan, draft.items.files).plan
    assert plan.input["files"][0]["path"] == "input/00000.parquet"
    (tmp_path / "runs" / "run").rename(tmp_path / "moved")
    run = Run.open(tmp_path / "moved")
    assert all_items(InputSpec.from_json(run.input), run.index) == ROWS
    packed = tmp_path / "moved" / "input" / "00000.parquet"
    os.utime(packed, ns=(0, 10**18))  # as `cp -r` leaves it
    check_input(InputSpec.from_json(run.input), run.index)
    assert all_items(InputSpec.from_json(run.input), run.index) == ROWS
    assert not list(tmp_path.glob(".*.partial")), "nothing else is left"


def make_sqlite(path: Path, rows: list[tuple[Any, ...]]) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE docs (id INTEGER, text, score, raw)")
        database.executemany("INSERT INTO docs VALUES (?, ?, ?, ?)", rows)


def plan_query(named: str, folder: Path, progress: Callable[[int, int], None] | None = None) -> InputSpec:
    query = query_in(named, folder)
    assert query is not None
    return repack_query(query, folder, folder / "index", stride=4, progress=progress)


SQL_ROWS = [(i, None if i % 7 == 0 else f"täxt\0 {i}", [i, i / 3, None][i % 3], bytes([i % 256])) for i in range(5000)]


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_the_rows_of_a_query_are_items_in_its_order(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a b%20#.db"
    if kind == "sqlite":
        make_sqlite(path, SQL_ROWS)
    else:
        with contextlib.closing(duckdb.connect(str(path))) as database:
            database.execute("CREATE TABLE docs (id INTEGER, text VARCHAR, score DOUBLE, raw BLOB)")
            database.from_arrow(
                pa.table([*zip(*SQL_ROWS, strict=True)], names=["id", "text", "score", "raw"])
            ).insert_into("docs")
    sql = "SELECT id, text, score, raw FROM docs WHERE id >= 10 -- not the first (\nORDER BY id DESC"
    spec = plan_query(f"{kind}:{path.name}?{sql}", tmp_path)
    expected = [
        {"id": i, "text": text, "score": None if score is None else float(score), "raw": raw}
        for i, text, score, raw in reversed(SQL_ROWS[10:])
    ]
    before = path.read_bytes()
    assert spec.columns == ("id", "text", "score", "raw")
    assert all_items(spec, tmp_path / "index") == expected
    source = spec.files[0].source
    assert source is not None
    assert source.path == f"{kind}:{path}?{sql}"
    assert source.sha256 == hashlib.sha256(before).hexdigest()
    assert plan_query(f"{kind}:{path.name}?{sql}", tmp_path).digest == spec.digest
    assert InputSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("sqlite:a.db", "is not a query; expected a path, a question mark"),
        ("sqlite:?SELECT id FROM docs ORDER BY id", "is not a query; expected a path, a question mark"),
        ("sqlite:a.db?SELECT id FROM docs", "has no ORDER BY"),
        ("sqlite:a.db?SELECT id FROM (SELECT id FROM docs ORDER BY id)", "has no ORDER BY"),
        ("sqlite:a.db?SELECT 'ORDER BY id' FROM docs -- ORDER BY id", "has no ORDER BY"),
        ("sqlite:none.db?SELECT id FROM docs ORDER BY id", "none.db cannot be read: No such file"),
        ("sqlite:pipe.db?SELECT id FROM docs ORDER BY id", "pipe.db is not a regular file"),
        ("sqlite:a.db?SELECT absent FROM docs ORDER BY 1", "failed: no such column: absent"),
        ("sqlite:a.db?SELECT id, raw AS id FROM docs ORDER BY 1", "two columns named 'id'"),
        ("sqlite:a.db?SELECT id FROM docs WHERE id > 5 ORDER BY id", "gives no rows"),
        ("sqlite:a.db?SELECT text FROM docs ORDER BY id", "values of several types, int and str"),
        ("sqlite:a.db?CREATE TABLE more AS SELECT id FROM docs ORDER BY id", "failed: attempt to write a readonly"),
        ("sqlite:a.db?CREATE TEMP TABLE more AS SELECT id FROM docs ORDER BY id", "is not a SELECT"),
        ("sqlite:a.db?SELECT score FROM docs ORDER BY id", "failed: Could not decode to UTF-8"),
        ("sqlite:latin.db?SELECT * FROM docs ORDER BY id", "failed: 'utf-8' codec can't decode"),
        ("sqlite:text.db?SELECT score FROM docs ORDER BY id", "failed: file is not a database"),
        ("duckdb:text.db?SELECT score FROM docs ORDER BY id", "text.db failed: "),
        ("duckdb:a.duckdb?CREATE TABLE more AS SELECT 1 AS id ORDER BY id", "failed: .* in read-only mode"),
        ("duckdb:a.duckdb?SELECT 1; SELECT 1 AS id ORDER BY id", "is not a single SELECT"),
    ],
)
def test_a_query_that_cannot_be_an_input_is_refused(tmp_path: Path, named: str, words: str) -> None:
    make_sqlite(tmp_path / "a.db", [(1, "a", 1, b""), (2, 5, None, b"")])
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as database, database:
        database.execute("UPDATE docs SET score = CAST(x'ff' AS TEXT)")
    (tmp_path / "latin.db").write_bytes((tmp_path / "a.db").read_bytes().replace(b"raw", b"r\xe4w"))
    (tmp_path / "text.db").write_text("nothing but text, and long enough to be looked at" * 100)
    if "a.duckdb" in named:
        duckdb.connect(str(tmp_path / "a.duckdb")).close()
    os.mkfifo(tmp_path / "pipe.db")
    with pytest.raises(SlurmGPUError, match=words):
        plan_query(named, tmp_path)


def test_a_database_may_have_a_path_that_is_not_utf8_unless_it_is_duckdbs(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff %41")
    folder.mkdir()
    make_sqlite(folder / "a.db", SQL_ROWS[:9])
    spec = plan_query("sqlite:a.db?SELECT id FROM docs ORDER BY id", folder)
    assert all_items(spec, folder / "index") == [{"id": number} for number in range(9)]
    with pytest.raises(SlurmGPUError, match=r"DuckDB cannot open .*a\.db, whose path is not UTF-8"):
        plan_query("duckdb:a.db?SELECT id FROM docs ORDER BY id", folder)


def test_a_column_of_sqlite_has_no_rounded_integers(tmp_path: Path) -> None:
    """Beside floats they would be floats, which may be other numbers."""
    make_sqlite(tmp_path / "a.db", [(1, "a", 2**53 + 1, b""), (2, "b", 0.5, b"")])
    with pytest.raises(SlurmGPUError, match=r"'score' .* has floats and a large integer, .* 9007199254740993 is"):
        plan_query("sqlite:a.db?SELECT score FROM docs ORDER BY id", tmp_path)
    spec = plan_query("sqlite:a.db?SELECT CAST(score AS TEXT) AS score FROM docs ORDER BY id", tmp_path)
    assert all_items(spec, tmp_path / "index") == [{"score": "9007199254740993"}, {"score": "0.5"}]


def test_a_database_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    make_sqlite(tmp_path / "a.db", SQL_ROWS[:9])
    with pytest.raises(SlurmGPUError, match=r"a\.db changed while it was read"):
        plan_query("sqlite:a.db?SELECT id FROM docs ORDER BY id", tmp_path, lambda *_: os.utime(tmp_path / "a.db"))


def test_both_readings_of_a_query_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a log of writes, the database's file does not show that somebody writes to it."""
    make_sqlite(tmp_path / "a.db", SQL_ROWS[:9])
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")

        def written_in_between(query: databases.Query, name: str, kinds: set[type]) -> Any:
            other.execute("UPDATE docs SET id = 'a text'")
            return arrow_type(query, name, kinds)

        arrow_type = databases._arrow_type
        monkeypatch.setattr(databases, "_arrow_type", written_in_between)
        spec = plan_query("sqlite:a.db?SELECT id FROM docs ORDER BY id", tmp_path)
    assert all_items(spec, tmp_path / "index") == [{"id": number} for number in range(9)]


@pytest.mark.parametrize(
    "value", ["340282366920938463463374607431768211455::UHUGEINT", "['101'::BIT]", "'12:00:00+02'::TIMETZ", "5::BIGNUM"]
)
def test_types_of_duckdb_that_arrow_would_change_are_refused(tmp_path: Path, value: str) -> None:
    with contextlib.closing(duckdb.connect(str(tmp_path / "a.duckdb"))) as database:
        database.execute("CREATE TABLE docs (id INTEGER)")
        database.execute("INSERT INTO docs VALUES (1)")
    with pytest.raises(SlurmGPUError, match=r"'odd' .* whose values would change"):
        plan_query(f"duckdb:a.duckdb?SELECT {value} AS odd FROM docs ORDER BY id", tmp_path)
    with pytest.raises(SlurmGPUError, match=r"'odd' .* whose values would change"):
        plan_query(f"duckdb:a.duckdb?SELECT MAP{{'a': {{'b': {value}}}}} AS odd FROM docs ORDER BY id", tmp_path)
    named = "{'BIT': 'BIT'::ENUM('BIT'), 'BIGNUM': [7]::INTEGER[1]}"
    spec = plan_query(f"duckdb:a.duckdb?SELECT {named} AS even FROM docs ORDER BY id", tmp_path)
    assert all_items(spec, tmp_path / "index") == [{"even": {"BIT": "BIT", "BIGNUM": [7]}}]


def test_a_run_file_may_name_a_query(tmp_path: Path) -> None:
    make_sqlite(tmp_path / "a.db", SQL_ROWS)
    (tmp_path / "texts.py").write_text(WORKLOAD)
    (tmp_path / "run.toml").write_text(
        'input = "sqlite:a.db?SELECT * FROM docs ORDER BY id"\n[workload]\nuse = "texts.py:Texts"\n'
    )
    with draft_run(tmp_path / "run.toml") as draft:
        create_run(draft.run_dir, draft.plan, draft.items.files)
    run = Run.open(tmp_path / "runs" / "run")
    assert [item["id"] for item in all_items(InputSpec.from_json(run.input), run.index)] == list(range(5000))


def test_a_query_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(SlurmGPUError, match="is one of 2; a query must be alone"):
        query_in(["a.jsonl", "sqlite:a.db?SELECT 1 ORDER BY 1"], tmp_path)
    assert query_in(["a.jsonl"], tmp_path) is None


def test_a_table_without_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SlurmGPUError, match=r"The table has no columns; expected at least one\."):
        repack_table(pd.DataFrame({"a": [1, 2]})[[]], tmp_path, tmp_path / "index", stride=4)


def test_a_bz2_with_an_empty_member_has_all_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt.bz2").write_bytes(bz2.compress(b"a\n") + bz2.compress(b"") + bz2.compress(b"b\n"))
    spec = scan(find("a.txt.bz2", tmp_path), tmp_path / "index", stride=1, room=lambda: tmp_path)
    with Reader(spec, tmp_path / "index") as reader:
        assert reader.read(0, spec.n_items) == [{"text": "a"}, {"text": "b"}]
