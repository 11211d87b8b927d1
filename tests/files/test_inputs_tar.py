"""Tar files, in the layout of WebDataset, as inputs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader, find, list_files, scan, scanner, tar

Members = list[tuple[str, bytes]]


def pack(path: Path, members: Members, form: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def samples(start: int, stop: int) -> tuple[Members, list[dict[str, Any]]]:
    """Members with long names and odd sizes, and the items that they are."""
    rng = random.Random(start)
    members, items = [], []
    for i in range(start, stop):
        key = f"part.{i % 3}/{'x' * (150 * (i % 2))}ü{i:04}"
        item = {
            "jpg": rng.randbytes(rng.choice([0, 1, 511, 512, 5000])),
            "json": {"n": i},
            "cls": i,
            "seg.txt": f"ß{i}",
        }
        members += [
            (f"{key}.JPG", item["jpg"]),
            (f"{key}.json", json.dumps(item["json"]).encode()),
            (f"{key}.cls", b"%d\n" % i),
            (f"{key}.seg.txt", f"ß{i}".encode()),
        ]
        items.append({"__key__": key, **item})
    return members, items


def planned(pattern: str, folder: Path, stride: int = 4) -> InputSpec:
    assert list_files(pattern, folder) is None
    return scan(find(pattern, folder), folder / "index", stride=stride)


def read(spec: InputSpec, folder: Path) -> list[Any]:
    with Reader(spec, folder / "index") as reader:
        return reader.read(0, spec.n_items)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("stride", [1, 7])
def test_any_range_of_tars_is_their_items(
    tmp_path: Path, form: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar, "_AT_ONCE", 8)  # of a real archive's thousands of offsets
    (first, expected), (second, more) = samples(0, 20), samples(20, 31)
    if form == tarfile.USTAR_FORMAT:
        first = [(name, content) for name, content in first if len(name) < 90]
        expected = expected[::2]
    pack(tmp_path / "a.tar", [("README", b"no suffix"), *first], form)
    pack(tmp_path / "b.tar", second)
    expected += more
    spec = planned("*.tar", tmp_path, stride)
    assert (spec.format, spec.n_items) == ("tar", len(expected))
    with Reader(spec, tmp_path / "index") as reader:
        for start in range(len(expected) + 1):
            for stop in {start, start + 1, start + 9, len(expected)}:
                assert reader.read(start, min(stop, len(expected))) == expected[start:stop]


@pytest.mark.parametrize("stride", [1, 2])
def test_items_of_one_member_are_read_one_by_one(tmp_path: Path, stride: int) -> None:
    pack(tmp_path / "a.tar", [(f"{i}.jpg", b"x" * i) for i in range(5)])
    spec = planned("a.tar", tmp_path, stride)
    with Reader(spec, tmp_path / "index") as reader:
        found = [item for i in range(5) for item in reader.read(i, i + 1)]
    assert found == [{"__key__": str(i), "jpg": b"x" * i} for i in range(5)]


def test_what_is_no_file_or_has_no_suffix_is_no_item(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        (tmp_path / "d.jpg").mkdir()
        archive.add(tmp_path / "d.jpg", "d.jpg")
        for name in ("a.jpg", "b.jpg", "README", "b.txt", ".hidden.jpg", "c/.hidden.jpg"):
            archive.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("LATEST")
        link.type, link.linkname = tarfile.SYMTYPE, "README"
        archive.addfile(link)
    found = read(planned("a.tar", tmp_path), tmp_path)
    assert found == [{"__key__": "a", "jpg": b""}, {"__key__": "b", "jpg": b"", "txt": ""}]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_whose_item_would_be_missing_is_refused(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("b.jpg")
    link.type, link.linkname = kind, "a.jpg"
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
        archive.addfile(link)
    with pytest.raises(SlurmGPUError, match=r"'b\.jpg' is a link to 'a\.jpg'; .* `tar --sort=name --dereference"):
        planned("a.tar", tmp_path)


def test_an_item_whose_members_are_apart_is_refused(tmp_path: Path) -> None:
    pack(tmp_path / "a.tar", [("a.jpg", b""), ("b.jpg", b""), ("a.txt", b""), ("b.txt", b"")])
    with pytest.raises(SlurmGPUError, match=r"members of 'a' in two places; .* `tar --sort=name`"):
        planned("a.tar", tmp_path)


def test_a_member_that_is_not_what_its_name_says_is_its_items_error(tmp_path: Path) -> None:
    members = [("0.json", b"{"), ("1.cls", b"x"), ("2.txt", b"\xff"), ("3.jpg", b"a"), ("3.JPG", b"b"), ("4.jpg", b"c")]
    pack(tmp_path / "a.tar", members)
    *errors, good = read(planned("a.tar", tmp_path), tmp_path)
    assert good == {"__key__": "4", "jpg": b"c"}
    assert all(isinstance(error, ItemError) for error in errors)
    said = [
        "0.json: expected JSON",
        "1.cls: expected a number",
        "2.txt: expected text in UTF-8",
        "3: two of its members",
    ]
    for error, part in zip(errors, said, strict=True):
        assert f"{tmp_path}/a.tar, {part}" in str(error)


def test_a_tar_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    pack(tmp_path / "whole.tar", samples(0, 3)[0])
    content = (tmp_path / "whole.tar").read_bytes()
    end = len(content.rstrip(b"\0")) + 512
    for size in {1, 100, 512, 1000, *range(512, end, 512), *range(700, end, 777)}:
        (tmp_path / "a.tar").write_bytes(content[:size])
        with pytest.raises(
            SlurmGPUError, match=r"a\.tar (is truncated or damaged|has no end mark|has data|is not a tar)"
        ):
            planned("a.tar", tmp_path)


def test_damaged_headers_second_archives_and_what_is_no_tar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    pack(path, [("0.jpg", b"a" * 600), ("1.jpg", b"b")])
    content = bytearray(path.read_bytes())
    content[512 + 1024 + 5] ^= 1  # in the second header
    path.write_bytes(content)
    with pytest.raises(SlurmGPUError, match="data after its last member, at byte 1536: a damaged header"):
        planned("a.tar", tmp_path)
    pack(path, [("0.jpg", b"a")])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(SlurmGPUError, match="or a second archive"):
        planned("a.tar", tmp_path)
    path.write_bytes(b"no tar" * 1000)
    with pytest.raises(SlurmGPUError, match="is not a tar archive"):
        planned("a.tar", tmp_path)
    pack(path, [("README", b"a")])
    with pytest.raises(SlurmGPUError, match="has no items; expected members whose names have a suffix"):
        planned("a.tar", tmp_path)
    path.write_bytes(b"")
    with pytest.raises(SlurmGPUError, match="is empty"):
        planned("a.tar", tmp_path)
    (tmp_path / "b.tar.gz").write_bytes(b"")
    with pytest.raises(SlurmGPUError, match=r"b\.tar\.gz is compressed as a whole.* Decompress it to \.tar"):
        planned("b.tar.gz", tmp_path)


def test_damage_after_planning_is_an_error_of_the_items_behind_it_in_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    pack(path, [(f"{i}.jpg", b"x") for i in range(8)])
    spec = planned("a.tar", tmp_path)
    with open(path, "r+b") as file:
        file.seek(2 * 1024)
        file.write(b"\xff" * 9)
    os.utime(path, ns=(0, spec.files[0].mtime_ns))
    with Reader(spec, tmp_path / "index") as reader:
        found = reader.read(0, 4) + reader.read(4, 8)
    assert [isinstance(item, ItemError) for item in found] == [False, False, True, True, *[False] * 4]
    assert "a.tar, item 3: expected a member of a tar archive" in str(found[2])


def test_a_digest_is_that_of_the_whole_file_with_any_number_of_empty_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "CHUNK_BYTES", 512)
    path = tmp_path / "a.tar"
    pack(path, [("a.text", b"a"), ("b.txt", b"b")])
    whole = path.read_bytes()
    for content in (whole + bytes(99 * 512), whole[: 5 * 512]):  # one empty block is an end mark
        path.write_bytes(content)
        spec = planned("*.tar", tmp_path)
        assert spec.files[0].sha256 == hashlib.sha256(content).hexdigest()
        assert read(spec, tmp_path) == [{"__key__": "a", "text": "a"}, {"__key__": "b", "txt": "b"}]


def test_a_member_that_is_cut_after_planning_is_no_content(tmp_path: Path) -> None:
    pack(tmp_path / "a.tar", [(f"{n}.jpg", b"x" * 90_000) for n in range(3)])
    spec = planned("a.tar", tmp_path, stride=1)
    with Reader(spec, tmp_path / "index") as reader:
        rows = reader._rows(0)  # as if it were cut right after the reader has looked at its size
        os.truncate(tmp_path / "a.tar", 512 + 100)
        [item] = rows.read(0, 1)
    assert isinstance(item, ItemError)
    assert "unexpected end of data" in str(item)


def test_a_file_with_holes_has_its_content(tmp_path: Path) -> None:
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x" * 5000)
    subprocess.run(["tar", "-C", tmp_path, "--sparse", "-cf", tmp_path / "a.tar", "a.bin"], check=True)
    assert read(planned("a.tar", tmp_path), tmp_path) == [
        {"__key__": "a", "bin": (tmp_path / "a.bin").read_bytes()},
    ]
