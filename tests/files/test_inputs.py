"""Finding an input's files, planning over them, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader, check_input, find, reader, records, scan, scanner
from slurmgpu.inputs.lines import LineRows
from slurmgpu.inputs.repack import hash_file


def put(folder: Path, **files: str | bytes) -> None:
    """Write files named like keyword arguments: a_jsonl="..." makes a.jsonl."""
    for name, content in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def plan(folder: Path, pattern: str = "*", stride: int = 2) -> InputSpec:
    index = folder.with_name("index")
    return scan(find(pattern, folder), index, stride=stride)


def read_all(folder: Path, pattern: str = "*", stride: int = 2) -> list[object]:
    spec = plan(folder, pattern, stride)
    with Reader(spec, folder.with_name("index")) as reader:
        return list(reader.read(0, spec.n_items))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


# Finding


def test_a_path_a_list_and_a_glob_name_files_relative_to_the_base(folder: Path) -> None:
    put(folder, b_txt="1", a_txt="2")
    (folder / "deep").mkdir()
    put(folder / "deep", c_txt="3")
    a, b, c = folder / "a.txt", folder / "b.txt", folder / "deep/c.txt"
    assert find("a.txt", folder) == [a]
    assert find(["b.txt", "a.txt"], folder) == [b, a]
    assert find("*.txt", folder) == [a, b]
    assert find("**", folder) == [a, b, c]
    assert find("data/*.txt", folder.parent) == [a, b]
    assert find(str(folder / "*.txt"), Path("/")) == [a, b]
    assert find(["deep/*.txt", str(a)], folder) == [c, a]


def test_a_tilde_is_the_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, a_txt="1")
    monkeypatch.setenv("HOME", str(folder))
    assert find("~/a.txt", Path("/")) == [folder / "a.txt"]
    assert find("~/*.txt", Path("/")) == [folder / "a.txt"]


def test_a_file_with_glob_characters_in_its_name_is_found_by_it(folder: Path) -> None:
    (folder / "a[1].txt").write_text("x")
    assert find("a[1].txt", folder) == [folder / "a[1].txt"]


def test_paths_are_absolute_even_if_the_base_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, a_txt="1")
    monkeypatch.chdir(folder.parent)
    assert find("a.txt", Path("data")) == [folder / "a.txt"]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ("https://lab.edu/a.jsonl", r"Input 'https://lab.edu/a.jsonl' is a URL; .* Download it"),
        ("s3://bucket/*.parquet", r"Input 's3://bucket/\*.parquet' is a URL"),
        ("gone.jsonl", r"Input .*/gone.jsonl does not exist. Relative paths are relative to /.*/data\."),
        ("clips-{000..127}.tar", r"does not exist.* Braces are not expanded: write \* instead\."),
        ("gone*.jsonl", r"'gone\*.jsonl' matches no file"),
        ("parts.csv", r"parts.csv is a directory.*'.*/parts.csv/\*.jsonl'"),
        ("*.csv", "parts.csv is a directory"),
        (
            "de*",
            r"'de\*' matches no file\. It matches 1 folder, such as .*/data/deep\. .* `ls -d .*/de\* > folders.txt`",
        ),
        ("a.pdb", r"a.pdb has the suffix '.pdb'; expected .jsonl, .json, .csv, .txt,"),
        ("a.hdf5", r"'.hdf5'; expected .* np\.savez\('items\.npz', .* If it is the merged file of a run, name it \.h5"),
        ("a.tsv", r"'.tsv'; expected .* separated by tabs. Write it with commas, .* If each"),
        ("a.db", r"'.db'; expected .* For a database write a query: 'sqlite:.*/a.db\?SELECT … ORDER BY …'\."),
        ("a.parquet.gz", "compressed as a whole"),
        (["a.txt", "b.jsonl"], r"mixes formats, txt \(.*a.txt\) and jsonl \(.*b.jsonl\)"),
        (["a.txt", "a.txt"], "the same file twice"),
        (["a.txt", "*.txt"], "the same file twice"),
        (["a.txt", "link.txt"], r"the same file twice, as .*/a.txt and .*/link.txt"),
        ("pipe.txt", "pipe.txt is not a regular file"),
        ("dangling.txt", "dangling.txt does not exist"),
        ("a.txt/b.txt", "cannot be read: Not a directory"),
        ([], "an empty list"),
    ],
)
def test_what_cannot_be_an_input_is_refused(folder: Path, patterns: str | list[str], words: str) -> None:
    put(folder, a_txt="1", b_jsonl="{}", a_db="", a_tsv="", a_fa="", a_pdb="", a_hdf5="")
    (folder / "a.parquet.gz").write_bytes(b"")
    (folder / "parts.csv").mkdir()
    (folder / "deep").mkdir()
    (folder / "link.txt").symlink_to("a.txt")
    (folder / "dangling.txt").symlink_to("nowhere.txt")
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(SlurmGPUError, match=words):
        find(patterns, folder)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_an_input_that_cannot_be_read_is_named_to_the_end(folder: Path, name: str) -> None:
    (folder / name).symlink_to("/proc/self/mem")  # its first bytes cannot be read: EIO
    with pytest.raises(SlurmGPUError) as refused:
        scan([folder / name], folder.with_name("index"), stride=2)
    assert isinstance(refused.value.__cause__, OSError)
    assert (refused.value.__cause__.errno, refused.value.__cause__.filename) == (errno.EIO, str(folder / name))


def test_the_refusal_of_a_fasta_file_has_the_command_that_makes_it_an_input(folder: Path) -> None:
    put(folder, a_fasta=">P1 first\r\nACD\r\nAA\r\n>P2\nDD")
    with pytest.raises(SlurmGPUError) as caught:
        find("*.fasta", folder)
    [command] = re.findall(r"awk .* > items\.csv", str(caught.value))
    subprocess.run(["bash", "-c", command.replace("FILE", "a.fasta")], cwd=folder, check=True)
    assert read_all(folder, "items.csv") == [{"id": "P1", "sequence": "ACDAA"}, {"id": "P2", "sequence": "DD"}]


# Planning


def test_the_spec_says_what_was_read_and_survives_json(folder: Path) -> None:
    put(folder, a_csv="id,text\n1,x\n2,y\n", b_csv="id,text\n3,z")
    spec = plan(folder, stride=16)
    assert (spec.format, spec.n_items, spec.stride, spec.columns) == ("csv", 3, 16, ("id", "text"))
    assert [(Path(file.path).name, file.n_items, file.size_bytes) for file in spec.files] == [
        ("a.csv", 2, 16),
        ("b.csv", 1, 11),
    ]
    assert all(file.mtime_ns == Path(file.path).stat().st_mtime_ns for file in spec.files)
    assert InputSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    put(folder, a_jsonl="{}")
    spec = plan(folder, "*.jsonl")
    assert spec.columns is None
    assert InputSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_digest_is_what_sha256sum_says(folder: Path) -> None:
    put(folder, a_txt=b"\xef\xbb\xbf1\n\n" * 700_000, b_txt="3")
    command = "cat a.txt > both; sha256sum a.txt b.txt | cut -c-64 | tee sums | sha256sum | cut -c-64"
    digest = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
    spec = plan(folder, "*.txt")
    assert spec.digest == digest.stdout.strip()
    assert [file.sha256 for file in spec.files] == (folder / "sums").read_text().split()


def test_progress_counts_every_byte(folder: Path) -> None:
    put(folder, a_txt="x" * 3_000_000, b_txt="y")
    seen: list[tuple[int, int]] = []
    scan(find("*", folder), folder.with_name("index"), stride=1, progress=lambda *pair: seen.append(pair))
    assert seen == sorted(seen)
    assert len(seen) >= 3
    assert seen[-1] == (3_000_001, 3_000_001)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", "\n\r\n\n", "a.jsonl is empty"),
        ("a.txt", "", "a.txt is empty"),
        ("a.txt", b"\xef\xbb\xbf", "a.txt is empty"),
        ("a.csv", "\n" * 200_000, "a.csv is empty"),
        ("a.csv", "id,text\r\n", "a.csv is empty"),
        ("a.jsonl", "{}\n[1]\n", "a.jsonl, line 2: expected a JSON object, found an array"),
        ("a.jsonl", "null\n", "line 1: expected a JSON object, found null"),
        ("a.jsonl", '"x"', "line 1: expected a JSON object, found a string"),
        ("a.jsonl", "1.5", "line 1: expected a JSON object, found a number"),
        ("a.jsonl", "true", "line 1: expected a JSON object, found a boolean"),
        ("a.jsonl", "{}\n\n{}\n", "line 2: expected a JSON object, found an empty line"),
        ("a.jsonl", "{}\r\n\r\n{}\r\n", "line 2: expected a JSON object, found an empty line"),
        ("a.jsonl", '{"a"\n: 1}\n', r"line 1: expected a JSON object, found text that is not JSON \(.* column 5\)"),
        ("a.jsonl", '{\n "a": 1\n}\n', "found an object over several lines: jq -c . OLD > NEW writes"),
        ("a.jsonl", '[\n {"a": 1}\n]\n', r"found a list over several lines: name the file \.json\. "),
        ("a.jsonl", b'{"a": "\xe4"}\n', "line 1: expected UTF-8, found 0xe4 at byte 8"),
        ("a.jsonl", '{"a": 1}\n' * 5000 + '{"a": ', "line 5001: expected a JSON object"),
        ("a.jsonl", "[" * 100_000, r"line 1: .* found text that is not JSON \(.*(recursion|overflow)"),
        ("a.jsonl", '{"a": ' + "1" * 5000 + "}", r"line 1: expected a JSON object, found text that is not JSON \(Exc"),
        ("a.jsonl", b'{}\n\xef\xbb\xbf{}\n', r"line 2: .* byte order mark, .* removes it\. Correct it and plan"),
        ("a.txt", b"x\n\xff\xfe\n", "a.txt, line 2: expected UTF-8, found 0xff at byte 1"),
        ("a.csv", "a,b\n1,2\n3\n", "a.csv, record 2: expected 2 fields, as in the header; found 1"),
        ("a.csv", "a,b\n1,2,3\n", "record 1: expected 2 fields, as in the header; found 3"),
        ("a.csv", "a,b\n1,2\n\n3,4", "record 2: expected a CSV record, found an empty line"),
        ("a.csv", "a,b\n1,\"x\"y\n", r"record 1: expected a CSV record as in RFC 4180: "),
        ("a.csv", "\na,b\n1,2\n", "a.csv, header: expected a CSV record, found an empty line"),
        ("a.csv", "a,b,a\n1,2,3\n", "header: two columns are named 'a'"),
        ("a.csv", "a;b\n1;2\n", "header: expected names separated by commas, found 'a;b'.*sep=';'"),
        ("a.csv", b"\xff\n1", r"header: expected UTF-8, found 0xff .* to UTF-8 with `iconv -f LATIN1 -t UTF-8 "),
        ("a.csv", 'a,b\n"x\ny",1\n5" disk,"z"\n', "a.csv, line 4: expected CSV .* a quote in a field"),
        ("a.csv", 'a,b\n1,"2\n3,4\n', "a.csv, line 2: expected CSV .* a quote that is opened .* and never closed"),
        ("a.csv", 'a,b\n1,"2\n' + "3,4\n" * 100_000, "line 2: expected CSV .* never closed"),
        ("a.csv", "a,b\n" + '"1\n","2"\n' * 500_000 + '1,2"\n' + '"1","2"\n', "line 1000002: .* in a field"),
    ],
)  # fmt: skip
def test_what_is_not_the_format_is_refused_and_leaves_nothing(
    folder: Path, name: str, content: str | bytes, words: str
) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SlurmGPUError, match=words) as caught:
        plan(folder)
    assert str(folder / name) in str(caught.value)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_malformed_line_amid_a_large_file_is_met_by_the_sample(folder: Path) -> None:
    good = b'{"text": "0123456789012345678901234567890123456789"}\n' * 100_000
    put(folder, a_jsonl=good + b"{oops\n" * 30_000 + good)
    with pytest.raises(SlurmGPUError, match=r"a.jsonl, line 1\d\d\d\d\d: expected a JSON object, found text that"):
        plan(folder)


def test_files_of_other_columns_are_refused(folder: Path) -> None:
    put(folder, a_csv="id,text\n1,x\n", b_csv="id,words\n2,y\n", c_csv="text,id\nx,1\n")
    with pytest.raises(
        SlurmGPUError, match=r"b.csv has the columns 'id', 'words'; expected those of .*a.csv, 'id', 't"
    ):
        plan(folder, "[ab].csv")
    with pytest.raises(SlurmGPUError, match=r"c.csv has the columns 'text', 'id'; .* in that order"):
        plan(folder, "[ac].csv")


def test_a_jsonl_file_without_a_common_key_is_refused(folder: Path) -> None:
    put(folder, a_jsonl='{}\n{"id": 1, "text": "x"}\n', b_jsonl='{"id": 2}\n{"other": 1}\n', c_jsonl='{"meta": 1}\n')
    assert plan(folder, "[ab].jsonl").n_items == 4
    with pytest.raises(
        SlurmGPUError, match=r"c.jsonl has the keys 'meta'; expected at least one .*/a.jsonl, 'id', 'text'"
    ):
        plan(folder)


def test_a_record_longer_than_the_limit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 3 << 20)
    put(folder, a_txt=b"x\n" * 2_000_000 + b"y" * (3 << 20) + b"\nz\n")
    assert plan(folder).n_items == 2_000_002
    put(folder, a_txt=b"x\n" * 2_000_000 + b"y" * (5 << 20) + b"\nz\n")
    with pytest.raises(SlurmGPUError, match=r"a.txt, line 2000001: .* one record on each line; .* more than 3 MiB"):
        plan(folder)


def test_a_file_that_cannot_be_opened_is_refused(folder: Path) -> None:
    put(folder, a_txt="x")
    paths = find("*", folder)
    paths[0].unlink()
    with pytest.raises(SlurmGPUError, match=r"a.txt cannot be read: No such file"):
        scan(paths, folder.with_name("index"), stride=1)


def test_a_file_that_grows_while_it_is_planned_is_refused(folder: Path) -> None:
    put(folder, a_txt="x\n" * 1_000_000)

    def grow(done: int, total: int) -> None:
        with open(folder / "a.txt", "a") as file:
            file.write("y\n")

    with pytest.raises(SlurmGPUError, match=r"a.txt changed while it was read"):
        scan(find("*", folder), folder.with_name("index"), stride=1, progress=grow)
    assert not folder.with_name("index").exists()


MEMORY = """
import sys
from pathlib import Path
from slurmgpu.inputs import Reader, scan
spec = scan([Path(sys.argv[1])], Path(sys.argv[2]), stride=16)
with Reader(spec, Path(sys.argv[2])) as reader:
    assert len(reader.read(spec.n_items - 16, spec.n_items)) == 16
print(spec.n_items, next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_planning_300_mb_takes_less_than_150_mb_of_memory(folder: Path) -> None:
    block = b'{"text": "0123456789012345678901234567890123456789"}\n' * 20_000
    with open(folder / "a.jsonl", "wb") as file:
        for _ in range(300_000_000 // len(block) + 1):
            file.write(block)
    command = [sys.executable, "-c", MEMORY, str(folder / "a.jsonl"), str(folder.with_name("index"))]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    n_items, peak_kb = map(int, output.split())
    (folder / "a.jsonl").unlink()
    assert n_items * 53 > 300_000_000
    assert peak_kb < 150_000


def test_importing_inputs_needs_neither_h5py_nor_pyarrow() -> None:
    code = "import sys, slurmgpu.inputs; sys.exit(bool({'h5py', 'pyarrow'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# Reading what was planned


def test_a_malformed_line_met_later_is_an_item_error_in_the_words_of_planning(folder: Path) -> None:
    lines = [b'{"id": %d}' % i for i in range(20_000)]
    lines[150:152] = [b"[]", b'{"\xff": 1}']
    put(folder, a_jsonl=b"\n".join(lines))
    put(folder, b_csv="a,b\n" + "".join(f'"{i}\n",x\n' for i in range(150)) + "1,2,3\n" + "".join(["1,2\n"] * 9999))
    put(folder, c_txt=b"x\n" * 150 + b"\xff\n" + b"x\n" * 9999)
    data = read_all(folder, "*.jsonl", stride=16)
    bad = {i: item for i, item in enumerate(data) if isinstance(item, ItemError)}
    assert {i: str(item) for i, item in bad.items()} == {
        150: f"{folder}/a.jsonl, line 151: expected a JSON object, found an array",
        151: f"{folder}/a.jsonl, line 152: expected UTF-8, found 0xff at byte 3",
    }
    assert [item for i, item in enumerate(data) if i not in bad] == [{"id": i} for i in range(20_000) if i not in bad]
    data = read_all(folder, "*.csv", stride=16)
    assert str(data[150]) == f"{folder}/b.csv, record 151: expected 2 fields, as in the header; found 3"
    assert data[149:152:2] == [{"a": "149\n", "b": "x"}, {"a": "1", "b": "2"}]
    data = read_all(folder, "*.txt", stride=16)
    assert str(data[150]) == f"{folder}/c.txt, line 151: expected UTF-8, found 0xff at byte 1"


def test_lines_count_in_their_own_file(folder: Path) -> None:
    put(folder, a_jsonl='{"a": 1}\n' * 7, b_jsonl='{"a": 1}\n' * 150 + "{\n" + '{"a": 1}\n' * 999)
    assert f"{folder}/b.jsonl, line 151:" in str(read_all(folder, stride=4)[157])


@pytest.mark.parametrize("stride", [1, 3, 16, 100])
def test_reading_a_shard_reads_nothing_before_it_and_nothing_behind(folder: Path, stride: int) -> None:
    put(folder, a_csv="a,b\n" + "".join(f'{i},"\n"\n' for i in range(90)), b_csv="a,b\n" + "1,2\n" * 777)
    spec = plan(folder, stride=stride)
    start = 300 // stride * stride
    stop = start + 2 * stride
    with Reader(spec, folder.with_name("index")) as reader:
        expected = reader.read(start, stop)
    path = Path(spec.files[1].path)
    begin, end = 4 + (start - 90) * 4, 4 + (stop - 90) * 4
    path.write_bytes(b'"' * begin + path.read_bytes()[begin:end] + b"\xff" * (path.stat().st_size - end))
    os.utime(path, ns=(0, spec.files[1].mtime_ns))
    os.truncate(spec.files[0].path, 0)
    os.truncate(spec.files[0].path, spec.files[0].size_bytes)
    os.utime(spec.files[0].path, ns=(0, spec.files[0].mtime_ns))
    with Reader(spec, folder.with_name("index")) as reader:
        assert reader.read(start, stop) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_text("x\ny\nz\n"), "a.txt had 4 bytes, written .*; it has 6"),
        (lambda path: path.write_text("y\nx\n"), "a.txt had 4 bytes, written .*; it has 4"),
        (lambda path: path.unlink(), r"a.txt cannot be read \(No such file or directory\)"),
    ],
)
def test_an_input_that_changed_is_refused(folder: Path, change: Callable[[Path], object], words: str) -> None:
    put(folder, a_txt="x\ny\n")
    os.utime(folder / "a.txt", ns=(0, 1_700_000_000_123_456_789))
    spec = plan(folder)
    with Reader(spec, folder.with_name("index")) as reader:
        reader.read(0, 1)
        change(folder / "a.txt")
        with pytest.raises(SlurmGPUError, match=f"The input has changed since the run was planned: .*{words}"):
            reader.read(1, 2)
    with Reader(spec, folder.with_name("index")) as reader:
        with pytest.raises(SlurmGPUError, match=f"The input has changed since the run was planned: .*{words}"):
            reader.check_some_files()
        with pytest.raises(SlurmGPUError, match=f"The input has changed since the run was planned: .*{words}"):
            reader.read(0, 1)


@pytest.mark.parametrize("size", [0, 1 << 30])
def test_a_file_with_another_time_is_compared_with_the_plan_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """Copies and files out of an archive may lose their times, or the fractions of their seconds."""
    put(folder, a_txt="x\ny\n", b_txt="z\n")
    spec, index = plan(folder), folder.with_name("index")
    monkeypatch.setattr(reader, "_TOLD_BYTES", size)
    compared: list[str] = []
    monkeypatch.setattr(reader, "hash_file", lambda path: compared.append(path.name) or hash_file(path))
    os.utime(folder / "a.txt", ns=(0, spec.files[0].mtime_ns - 123))
    check_input(spec, index)
    with Reader(spec, index) as opened:
        opened.check_some_files()
        assert opened.read(0, 3) == [{"text": "x"}, {"text": "y"}, {"text": "z"}]
        os.utime(folder / "a.txt", ns=(0, 10**18))
        put(folder, b_txt="Z\n")
        assert opened.read(0, 2) == [{"text": "x"}, {"text": "y"}]
        with pytest.raises(SlurmGPUError, match=r"b\.txt had 2 bytes, written .*; it has 2"):
            opened.read(2, 3)
    with pytest.raises(SlurmGPUError, match=r"b\.txt had 2 bytes, written .*; it has 2"):
        check_input(spec, index)
    assert compared == ["a.txt"] * 3 + ["b.txt", "a.txt", "b.txt"]
    told = [record.message for record in caplog.records if "has another time than planned" in record.message]
    assert len(told) == (0 if size else len(compared))


def test_an_index_that_tasks_cannot_use_is_refused_with_the_input(folder: Path) -> None:
    put(folder, a_txt="x\ny\n")
    spec, index = plan(folder), folder.with_name("index")
    check_input(spec, index)
    os.truncate(index, 99)
    with pytest.raises(SlurmGPUError, match=r"The input's index .* cannot be used: it is damaged"):
        check_input(spec, index)
    index.unlink()
    with pytest.raises(SlurmGPUError, match=r"The input's index .* cannot be read: No such file"):
        check_input(spec, index)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, None),
        ({"ranges": [[0, 1], [1, 3]]}, None),
        ({"n_items": 4}, "its files and ranges have 3"),
        ({"ranges": [[0, 2]]}, "its files and ranges have 2"),
        ({"ranges": [[0, 4]], "n_items": 4}, "its ranges are not in order within the 3 items of its files"),
        ({"ranges": [[1, 3], [0, 1]]}, "its ranges are not in order within the 3 items of its files"),
        ({"ranges": [[0, 2], [1, 2]]}, "its ranges are not in order within the 3 items of its files"),
    ],
)
def test_an_input_whose_numbers_of_items_do_not_agree_is_refused(
    folder: Path, change: dict[str, Any], found: str | None
) -> None:
    put(folder, a_txt="x\ny\n", b_txt="z\n")
    value: Any = {**plan(folder).to_json(), **change}
    if found is None:
        assert InputSpec.from_json(value).n_items == 3
    else:
        with pytest.raises(SlurmGPUError, match=f", but {found}. It was edited or is damaged"):
            InputSpec.from_json(value)


def test_chunks_are_hashed_in_order_and_to_the_end_whatever_thread_hashes_them() -> None:
    class Late:
        """A thread that does nothing until it is waited for."""

        def submit(self, update: Callable[[bytes], None], chunk: bytes) -> SimpleNamespace:
            return SimpleNamespace(result=lambda: update(chunk))

    chunks = [bytes([number]) * size for number, size in enumerate((100_000, 70_000, 9, 70_000, 100_000, 8, 7, 70_000))]
    for some in (chunks, chunks[:3]):
        checksum = hashlib.sha256()
        late: Any = Late()
        assert list(scanner._hashed(some, checksum, late)) == some
        assert checksum.hexdigest() == hashlib.sha256(b"".join(some)).hexdigest()


def test_nothing_is_read_from_a_file_that_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file that was truncated would kill the process."""
    put(folder, a_txt="x\ny\n")
    spec = plan(folder)
    with Reader(spec, folder.with_name("index")) as reader:
        reader.read(0, 1)
        put(folder, a_txt="x\n")
        monkeypatch.setattr(LineRows, "read", lambda *given: pytest.fail("it was read"))
        with pytest.raises(SlurmGPUError, match="The input has changed since the run was planned"):
            reader.read(1, 2)


def test_rows_of_a_file_that_changed_while_it_was_read_are_not_returned(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, a_txt="x\ny\n")
    spec, read = plan(folder), LineRows.read

    def changing(rows: LineRows, start: int, stop: int) -> object:
        put(folder, a_txt="other\nlines\n")
        return read(rows, start, stop)

    monkeypatch.setattr(LineRows, "read", changing)
    with (
        Reader(spec, folder.with_name("index")) as reader,
        pytest.raises(SlurmGPUError, match="The input has changed since the run was planned"),
    ):
        reader.read(0, 2)


def test_a_reader_of_many_files_asks_for_those_that_it_reads_and_for_a_few_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, **{f"{number:03}_txt": "x\ny\n" for number in range(300)})
    spec, asked = plan(folder), list[str]()
    look = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: asked.append(path.name) or look(path, **options))
    with Reader(spec, folder.with_name("index")) as reader:
        assert reader.read(241, 244) == [{"text": "y"}, {"text": "x"}, {"text": "y"}]
        assert set(asked) == {"120.txt", "121.txt"}
        asked.clear()
        reader.check_some_files()
    assert asked[:2] == ["000.txt", "005.txt"]
    assert len(asked) == 60


def test_a_range_beyond_the_input_is_a_bug(folder: Path) -> None:
    put(folder, a_txt="x\ny\n")
    with Reader(plan(folder), folder.with_name("index")) as reader:
        assert reader.read(2, 2) == []
        for start, stop in ((-1, 1), (1, 0), (1, 3)):
            with pytest.raises(ValueError, match="of an input of 2"):
                reader.read(start, stop)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda index: b"", "is not an index"),
        (lambda index: b"X" + index[1:], "is not an index"),
        (lambda index: index[:8] + b"\1" + index[9:], "has version 1; this slurmgpu reads version 2"),
        (lambda index: index[:-1], "is damaged"),
        (lambda index: index + b"\0" * 8, "is damaged"),
        (lambda index: index[:16] + b"\7" + index[17:], "belongs to another plan"),
        (lambda index: index[:40] + b"\0\0" + index[42:], "belongs to another plan"),
    ],
)
def test_an_index_that_is_not_the_plans_is_refused(folder: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    put(folder, a_txt="x\ny\n")
    spec = plan(folder)
    index = folder.with_name("index")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(SlurmGPUError, match=f"index .* {words}.* Plan the run again"):
        Reader(spec, index)
    index.unlink()
    with pytest.raises(SlurmGPUError, match=r"index .* cannot be read: No such file"):
        Reader(spec, index)


def test_the_index_has_the_layout_of_its_page(folder: Path) -> None:
    put(folder, a_txt="x\n\nyy\n", b_txt=b"\xef\xbb\xbf1\r\n2\r\n3")
    spec = plan(folder)
    content = folder.with_name("index").read_bytes()
    assert content[:8] == b"slgpuidx"
    numbers = [int.from_bytes(content[at : at + 8], "little") for at in (8, 16, 24, 32)]
    assert numbers == [2, 2, 2, 3]  # version, stride, files, offsets
    assert content[40:72].hex() == spec.digest
    entries = [int.from_bytes(content[at : at + 8], "little") for at in range(72, len(content), 8)]
    offsets = [entry & (1 << 48) - 1 for entry in entries]
    assert offsets == [0, 3, *(0, 3, 6)]  # each file's first item; items 0, 2 and 4
    k = 0x9E3779B97F4A7C15
    checks = [(offset + i * k) * k % (1 << 64) >> 48 for i, offset in enumerate(offsets, 1)]
    assert [entry >> 48 for entry in entries] == checks


def test_any_flipped_bit_of_an_index_is_found(folder: Path) -> None:
    lines = [f"{i:07}\n" for i in range(28)]  # of eight bytes: a bit more or less is the beginning of another line
    put(folder, a_txt="".join(lines[:18]), b_txt="".join(lines[18:]))
    spec, index = plan(folder, stride=4), folder.with_name("index")
    content = index.read_bytes()
    for place, items in ((1, (18, 19)), (5, (12, 16)), (7, (20, 21))):  # b.txt's first item, and items 12 and 20
        for bit in range(64):
            flipped = bytearray(content)
            flipped[72 + 8 * place + bit // 8] ^= 1 << bit % 8
            index.write_bytes(flipped)
            words = f"index .* offset {place} is not what was written. Plan the run again"
            with Reader(spec, index) as reader, pytest.raises(SlurmGPUError, match=words):
                reader.read(*items)


def test_offsets_on_a_page_that_never_reached_the_disk_are_refused(folder: Path) -> None:
    put(folder, a_txt="x\n" * 999)
    spec, index = plan(folder, stride=1), folder.with_name("index")
    content = index.read_bytes()
    index.write_bytes(content[:4096] + bytes(len(content) - 4096))
    with Reader(spec, index) as reader:
        assert reader.read(0, 500)
        with pytest.raises(SlurmGPUError, match="offset 600 is not what was written"):
            reader.read(599, 601)


def test_an_index_whose_handle_is_stale_is_opened_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, a_txt="x\ny\n")
    index = folder.with_name("index")
    with Reader(plan(folder, stride=1), index) as reader:
        stale = {int(name) for name in os.listdir("/proc/self/fd") if _leads_to(name, index)}
        assert stale

        def unless_stale(real: Callable[..., Any]) -> Callable[..., Any]:
            def read(fd: int, *given: Any) -> Any:
                if fd in stale:
                    raise OSError(errno.ESTALE, "Stale file handle")
                return real(fd, *given)

            return read

        for name in ("preadv", "pread"):
            monkeypatch.setattr(os, name, unless_stale(getattr(os, name)))
        monkeypatch.setattr(os, "dup2", lambda new, old, inheritable=True: stale.discard(old))
        assert reader.read(1, 2) == [{"text": "y"}]


def _leads_to(name: str, path: Path) -> bool:
    try:
        return Path(f"/proc/self/fd/{name}").readlink() == path
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("left", ["x\nyy\nz", "x\n"])
def test_a_file_that_was_cut_behind_attributes_of_a_cache_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    put(folder, a_txt="x\nyy\nzzz\n")
    spec = plan(folder)
    (folder / "a.txt").write_text(left)
    monkeypatch.setattr("slurmgpu.inputs.reader._Planned.check", lambda planned, file: None)
    words = r"has changed since .*a\.txt lacks items behind byte"
    with Reader(spec, folder.with_name("index")) as reader, pytest.raises(SlurmGPUError, match=words):
        reader.read(0, 3)
