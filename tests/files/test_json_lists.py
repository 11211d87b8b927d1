"""Inputs that are one list of JSON objects."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader, find, json_lists, scan
from slurmgpu.inputs.formats import named
from tests.support.limited import memory_of_scan

ODD = [
    '{"long": ' + "7" * 5000 + "}",
    '{"big": 123456789012345678901234567890, "small": -0.0, "huge": 1e400, "none": null}',
    '{"a": NaN, "b": [-Infinity, true, {"c": []}], "a": "twice"}',
    r'{"lone": "\ud800", "escaped": "\n\"\\\u00e4]}[", "": "{"}',
    '{"tëxt": "wörd\u2028\u0085 \U0001f600", "blanks": "a  b"}',
    "{}",
]
"""Objects as they are written; the first one is an item's error."""

ROWS: list[dict[str, Any]] = [{"id": i, "text": f"wörd {i}\n", "at": {"tags": ["a"] * (i % 3)}} for i in range(3000)]


def items_of(path: Path) -> list[Any]:
    """The items of a file, with what says where an error was found left out."""
    index = path.with_name("index")
    spec = scan([path], index, stride=4)
    with Reader(spec, index) as reader:
        return [
            str(item).partition(": ")[2] if isinstance(item, ItemError) else item for item in read_all(reader, spec)
        ]


def read_all(reader: Reader, spec: InputSpec) -> list[Any]:
    return [row for start in range(0, spec.n_items, 700) for row in reader.read(start, min(start + 700, spec.n_items))]


def planned(path: Path, content: str | bytes) -> InputSpec:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return scan([path], path.with_name("index"), stride=4)


@pytest.mark.parametrize("suffix", ["json", "JSON", "json.gz"])
@pytest.mark.parametrize("form", [{}, {"indent": 4}, {"indent": 0, "separators": (",", ":"), "ensure_ascii": False}])
def test_the_elements_of_a_list_are_items_in_its_order(tmp_path: Path, form: dict[str, Any], suffix: str) -> None:
    content = json.dumps(ROWS, **form).encode()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert items_of(path) == ROWS
    assert list(named("json").items(path)) == ROWS
    [file] = scan([path], tmp_path / "index", stride=4).files
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "joined",
    ["[{}]", "[\r\n  {},\n\t\r\n]", "\ufeff [{}]\n\n", "{}\n", "\ufeff{}"],
    ids=["a line", "lines", "with a byte order mark", "no list", "no list, with a mark"],
)
@pytest.mark.parametrize("chunk", [1, 64, 1 << 20])
def test_objects_are_read_as_those_of_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: str, chunk: int
) -> None:
    """Their text is kept: a number, a repeated key or half of a surrogate pair is what a line would give."""
    good = ['{"id": 0}'] * 200  # so that none of the odd ones is in a sample
    objects = [*good, *ODD, *good]
    between = " ,\n " if "[" in joined else "\n"
    text = joined.replace("{}", between.join(objects)).replace(",\n\t", "\n\t")
    (tmp_path / "a.json").write_bytes(text.replace("]}[", r"\u005d}[").encode())
    (tmp_path / "a.jsonl").write_bytes("\n".join(objects).encode())
    monkeypatch.setattr(json_lists, "CHUNK_BYTES", chunk)
    assert repr(items_of(tmp_path / "a.json")) == repr(items_of(tmp_path / "a.jsonl"))


def test_an_object_of_several_lines_is_one_item(tmp_path: Path) -> None:
    indented = json.dumps(ROWS[:9], indent="\t").replace("\n", "\r\n")
    (tmp_path / "a.json").write_text(indented, newline="")
    assert items_of(tmp_path / "a.json") == ROWS[:9]


def test_lists_in_several_files_are_one_input(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text(json.dumps(ROWS[:100], indent=1))
    (tmp_path / "1.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[100:]).encode()))
    spec = scan(find("*.json*", tmp_path), tmp_path / "index", stride=4)
    with Reader(spec, tmp_path / "index") as reader:
        assert read_all(reader, spec) == ROWS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", r"Input FILE is empty; expected at least one item"),
        ("\ufeff \n", r"Input FILE is empty; expected at least one item"),
        ("[ ]", r"Input FILE is an empty list; expected at least one object\."),
        ("[{},\n[1]]", r"FILE, element 2 \(line 2\): expected a JSON object, found an array\. Write each"),
        ('["x"]', "element 1 .* expected a JSON object, found a string. Write each element as an object and"),
        ("[{}, 1]", "element 2 .* found a number"),
        ("[{}, -1]", "element 2 .* found a number"),
        ("[{}, null]", "element 2 .* found null"),
        ("[false]", "element 1 .* found a boolean"),
        ("[{}, ]", r"element 2 .* expected a JSON object, found ']'\. Correct it and plan again"),
        ("[{} {}]", "element 2 .* expected a comma or the end of the list, found '{'"),
        ("[{}]\n[{}]", r"element 2 \(line 2\): expected nothing after the list, found an array"),
        ("[{}]\0", r"expected nothing after the list, found '\\x00'"),
        ("[{}]\u00a0", "expected nothing after the list, found 0xc2"),
        ("{}\n{},\n{}", r"element 3 \(line 2\): expected a JSON object, found ','"),
        ("oops", r"element 1 \(line 1\): expected a JSON object, found 'o'"),
        ('[\n{"a": 1 "b": 2}, {}]', r"element 1 \(line 2\): .* not JSON \(Expecting ',' delimiter at byte 11\)"),
        ('[{"a": "x\ny"}]', r"text that is not JSON \(Invalid control character at at byte 10\)"),
        ('[{"a": ' + "[" * 100_000, r"element 1 .* found .*(recursion|overflow).* Correct it and plan again\."),
        ('[{"a": ' + "7" * 5000 + "}]", r"FILE, element 1: expected a JSON object, found text .* \(Exceeds"),
        ('[{"a": "ä"}]'.encode("latin-1"), r"FILE, element 1: expected UTF-8, found 0xe4 .* with `iconv -f LATIN1"),
        ("[{}]".encode("utf-16"), r"element 1 \(line 1\): expected UTF-8, found 0xf[ef]\. .*`-f UTF-16`"),
        ('{"text": "a"}', r"is one object; .* Write its items as a list\. If it is one line of JSON lines, name"),
        ('{"text": "a"}', "if each file is an item, write 'files:' before the path or the pattern"),
        ('{"ids": [1], "a": [{}], "b": [{}, {}]}', r"one object; .* has lists of objects in 'a', 'b': jq -c '\.\[\"a"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_objects_is_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(SlurmGPUError) as caught:
        planned(path, content)
    assert re.search(words, str(caught.value).replace(str(path), "FILE"))


def test_a_list_that_was_cut_anywhere_is_refused_as_such(tmp_path: Path) -> None:
    content = r'[{"a": [1.5e-7, true, "\u00e4\n"], "b": {"c": null}}, {"d": -Infinity}]'
    for end in range(1, len(content)):
        with pytest.raises(
            SlurmGPUError, match=r"the file ends within (the list|an object)\. If a copy or download was"
        ):
            planned(tmp_path / "a.json", content[:end])
    assert planned(tmp_path / "a.json", content).n_items == 2


def test_an_error_far_behind_the_first_objects_names_its_place(tmp_path: Path) -> None:
    good = json.dumps(ROWS, indent=1)
    n_lines = good.count("\n")
    content = f"{good[:-2]},\n oops\n]"
    with pytest.raises(
        SlurmGPUError, match=rf"a.json, element 3001 \(line {n_lines + 1}\): expected a JSON object, found 'o'"
    ):
        planned(tmp_path / "a.json", content)
    content = f'{good[:-2]},\n {{"a": oops}}\n]'
    with pytest.raises(
        SlurmGPUError, match=rf"element 3001 .* at byte {content.index('oops') + 1 + good.count('ö')}\)"
    ):
        planned(tmp_path / "a.json", content)


def test_a_long_object_is_read_and_one_over_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.dumps([{"text": "x" * 5_000_000}, {"text": "y"}])
    assert planned(tmp_path / "a.json", content).n_items == 2
    monkeypatch.setattr(json_lists, "MAX_RECORD_BYTES", 3 << 20)
    with pytest.raises(SlurmGPUError, match=r"a.json, element 1 \(line 1\): .* found one of more than 3 MiB"):
        planned(tmp_path / "a.json", content)


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_the_refusal_of_an_object_has_the_command_that_makes_it_an_input(tmp_path: Path, is_ascii: bool) -> None:
    path = tmp_path / "it's.json"
    with pytest.raises(SlurmGPUError) as caught:
        planned(path, json.dumps({"version": "1", 'the "rö中"\'': ROWS[:5]}, ensure_ascii=is_ascii))
    [command] = re.findall(r"jq .* > items\.jsonl", str(caught.value))
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert items_of(tmp_path / "items.jsonl") == ROWS[:5]


def test_a_list_that_is_written_to_while_it_is_planned_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))

    def touch(done: int, total: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(SlurmGPUError, match=r"a.json changed while it was read"):
        scan([path], tmp_path / "index", stride=4, progress=touch)


def test_a_list_of_300_mb_takes_less_than_150_mb_of_memory(tmp_path: Path) -> None:
    element = json.dumps({"text": "x" * 9990}).encode()
    with open(tmp_path / "a.json", "wb") as file:
        file.write(b"[" + element)
        for _ in range(30):
            file.write((b",\n" + element) * 1000)
        file.write(b"]")
    assert memory_of_scan(tmp_path / "a.json", tmp_path / "index") < 150


def test_a_place_in_a_file_is_counted_over_all_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lists, "CHUNK_BYTES", 4)
    content = "[" + '{"a": 1},\n' * 50 + '{"a": oops}]'
    (tmp_path / "a.json").write_text(content)
    place = rf"element 51 \(line 51\): .* at byte {content.index('oops') + 1}\)"
    with pytest.raises(SlurmGPUError, match=place):
        list(named("json").items(tmp_path / "a.json"))
