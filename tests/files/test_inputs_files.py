"""Files that are items themselves, from a folder or a glob to their paths; folders that leave open what is meant."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.inputs import InputSpec, Reader, file_items, find, list_files, passed_over, scan
from slurmgpu.inputs.fields import kept_values
from slurmgpu.inputs.file_items import FILE, Files


def make(folder: Path, *names: str | bytes) -> None:
    for name in map(os.fsdecode, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name.encode("utf-8", "backslashreplace").decode())


def planned(patterns: str | list[str], base: Path) -> tuple[InputSpec, str, tuple[str, ...]]:
    listed = list_files(patterns, base)
    assert listed is not None
    said, folders = listed.write(base / FILE)
    return scan([base / FILE], base / "index", stride=3, of_format=Files()), said, folders


def items(patterns: str | list[str], base: Path) -> list[Any]:
    spec, *_ = planned(patterns, base)
    with Reader(spec, base / "index") as reader:
        return reader.read(0, spec.n_items)


def keys(patterns: str | list[str], base: Path) -> list[str]:
    return [item["key"] for item in items(patterns, base)]


def test_a_folder_of_images_is_its_files_at_any_depth_in_order_of_their_paths(tmp_path: Path) -> None:
    make(tmp_path / "in", "b.JPG", "a/2.jpg", "a/1.png", "a/10.jpg", "a-/x.webp", ".hidden.jpg", "a/.cache/y.jpg")
    found = items("in", tmp_path)
    assert found[0] == {"path": str(tmp_path / "in/a/1.png"), "key": "a/1", "name": "a/1.png"}
    assert [item["key"] for item in found] == ["a/1", "a/10", "a/2", "a-/x", "b"]
    assert (
        keys("in/", tmp_path) == keys("./in//**/*", tmp_path) == keys("in/**", tmp_path) == keys("files:in", tmp_path)
    )
    assert keys("in/*/*.jpg", tmp_path) == ["a/10", "a/2"]
    assert keys(["in/b.JPG", "in/a/*.jpg"], tmp_path) == ["b", "10", "2"]


def test_odd_names_are_read_and_their_keys_are_text(tmp_path: Path) -> None:
    names = [b"new\nline.jpg", b"\xff\xfe.jpg", "ü {x} [1].jpg".encode(), b"-rf.jpg"]
    make(tmp_path / "in", *names)
    found = items("in", tmp_path)
    assert [item["key"] for item in found] == ["-rf", "new\nline", "ü {x} [1]", "\\xff\\xfe"]
    assert [item["name"] for item in found] == [f"{item['key']}.jpg" for item in found]
    assert all(Path(item["path"]).is_file() for item in found)
    assert kept_values({"file": "path"}, found[3]) == {"file": f"{tmp_path}/in/\\udcff\\udcfe.jpg"}


def test_a_file_that_changed_went_or_cannot_be_read_is_its_items_error_alone(tmp_path: Path) -> None:
    make(tmp_path / "in", *(f"{i}.wav" for i in range(8)))
    (tmp_path / "in/dangling.wav").symlink_to("nowhere")
    os.mkfifo(tmp_path / "in/fifo.wav")
    os.utime(tmp_path / "in/7.wav", ns=(0, 1_700_000_000_123_456_789))
    spec, *_ = planned("in", tmp_path)
    (tmp_path / "in/1.wav").unlink()
    (tmp_path / "in/3.wav").write_text("longer than it was")
    os.utime(tmp_path / "in/5.wav", ns=(0, 0))
    os.utime(tmp_path / "in/7.wav", ns=(0, 1_700_000_000_000_000_000))  # as tar restores it
    (tmp_path / "in/6.wav").unlink()
    (tmp_path / "in/6.wav").mkdir()
    with Reader(spec, tmp_path / "index") as reader:
        found = reader.read(0, spec.n_items)
    errors = {i: str(item) for i, item in enumerate(found) if isinstance(item, ItemError)}
    assert list(errors) == [1, 3, 5, 6, 8, 9]
    assert errors[1] == f"{tmp_path}/in/1.wav cannot be read: No such file or directory"
    assert f"{tmp_path}/in/3.wav has changed since the run was planned: it had 5 bytes and has 18" in errors[3]
    assert "5.wav has changed since" in errors[5]
    assert "6.wav is not a regular file" in errors[6]
    assert "dangling.wav cannot be read: No such file" in errors[8]
    assert "fifo.wav is not a regular file" in errors[9]
    (tmp_path / "in/nowhere").write_text("there again")
    with Reader(spec, tmp_path / "index") as reader:
        [error] = reader.read(8, 9)
    assert "dangling.wav could not be read when the run was planned. Plan a new run with it" in str(error)


def test_a_listing_has_a_time_that_every_copy_of_the_run_keeps(tmp_path: Path) -> None:
    make(tmp_path / "in", "a.wav")
    spec, *_ = planned("in", tmp_path)
    assert spec.files[0].mtime_ns % 1_000_000_000 == 0


def test_a_folder_whose_name_looks_like_a_pattern_is_that_folder(tmp_path: Path) -> None:
    make(tmp_path, "in [1]/a.jpg", "in 1/b.jpg", "c[d].jpg", "cd.jpg")
    assert keys("in [1]", tmp_path) == ["a"]
    assert keys("c[d].jpg", tmp_path) == ["c[d]"]


def test_a_file_that_fails_for_ever_is_its_items_error_but_not_where_its_folder_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "in", "0.wav", "1.wav", "2.wav")
    spec, *_ = planned("in", tmp_path)
    monkeypatch.setattr(file_items, "PATIENCE_S", 0.0)
    real, failing = os.stat, {"1.wav"}

    def stat(path: Any, **given: Any) -> os.stat_result:
        if Path(path).name in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path, **given)

    monkeypatch.setattr(file_items.os, "stat", stat)
    with Reader(spec, tmp_path / "index") as reader:
        found = reader.read(0, 3)
        assert [isinstance(item, ItemError) for item in found] == [False, True, False]
        assert str(found[1]) == f"{tmp_path}/in/1.wav cannot be read: Input/output error"
    failing.add("in")
    with Reader(spec, tmp_path / "index") as reader, pytest.raises(OSError, match="Input/output error"):
        reader.read(0, 3)


def test_a_listing_says_how_many_files_and_which_keys_are_not_their_own(tmp_path: Path) -> None:
    make(tmp_path / "in", "a.jpg", "a.png", "b.jpg")
    spec, said, folders = planned("in", tmp_path)
    assert said == f"3 files of {tmp_path}/in, 15 B; 2 of them share their key with another, such as 'a'"
    assert folders == (str(tmp_path / "in"),)
    assert InputSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.columns == ("path", "key", "name")


def test_links_lead_where_they_lead_once_and_their_folders_are_known(tmp_path: Path) -> None:
    make(tmp_path / "store", "1.jpg", "2.jpg")
    make(tmp_path / "other", "3.jpg")
    make(tmp_path / "in", "0.jpg")
    (tmp_path / "hop").mkdir()
    (tmp_path / "hop/1.jpg").symlink_to(tmp_path / "store/1.jpg")
    (tmp_path / "in/1.jpg").symlink_to("../hop/1.jpg")
    (tmp_path / "in/more").symlink_to("../other")
    (tmp_path / "in/round").symlink_to(".")
    spec, _, folders = planned("in", tmp_path)
    assert spec.n_items == 3
    assert folders == tuple(str(tmp_path / name) for name in ("hop", "in", "other", "store"))


@pytest.mark.parametrize(
    ("names", "pattern", "said"),
    [
        (["a.jsonl", "b.jsonl"], "in", r"2 \.jsonl files, .* Write '.*/in/\*\*/\*\.jsonl' for the items in its"),
        (["a.txt"], "in", r"1 \.txt file, so it is unclear whether each file is an item.* or 'files:.*/in' to make"),
        (["a.jpg", "metadata.csv"], "in", r"'.*/in/\*\*/\*\.jpg' for each of its .* for the items in its \.csv files"),
        (["a.jpg", "README"], "in/*", r"has .*1 \.jpg file.*, so it is unclear.*'.*/in/\*\*/\*\.jpg' for each"),
        (
            ["a.jpg", "b.JPG", "c.JPG", "t.csv"],
            "in",
            r"has 2 \.JPG files and 1 \.jpg file and 1 \.csv file, .* '.*/in/\*\*/\*\.JPG' for each of its \.JPG files"
            r".*'.*/in/\*\*/\*\.jpg' for .* a list for several, such as \['.*/in/\*\*/\*\.JPG', '.*/in/\*\*/\*\.jpg'\]",
        ),
        (
            ["a.JPG"],
            "in/*.jpg",
            r"'in/\*\.jpg' matches no file.* The input skips 1 file with \.JPG, such as .*/a\.JPG",
        ),
        ([".hidden"], "in", r"matches no file \(hidden files are skipped\)"),
        (["a.jpg"], "in/*.png", "matches no file|has the suffix"),
        (["a.jpg"], "in/b.jpg", "in/b.jpg does not exist"),
        (
            ["a.zarr/.zarray"],
            "files:in/*.zarr",
            r"It matches 1 folder, .*in/a\.zarr.* For .* 'files:in/\*\.zarr/\*\*/\*'",
        ),
        (["a.jpg"], ["in/a.jpg", "in/*.jpg"], "names .*a.jpg twice"),
        (["a.jpg", "b.csv"], ["in/a.jpg", "in/b.csv"], r"'in/b.csv', whose files hold items\. .* 'files:in/b.csv'"),
    ],
)
def test_what_does_not_say_whether_a_file_is_an_item_is_refused(
    tmp_path: Path, names: list[str], pattern: str | list[str], said: str
) -> None:
    make(tmp_path / "in", *names)
    with pytest.raises(SlurmGPUError, match=said):
        assert list_files(pattern, tmp_path) or find(pattern, tmp_path)


def test_with_the_prefix_every_file_is_an_item_and_without_it_a_format_is_read(tmp_path: Path) -> None:
    make(tmp_path / "in", "a.txt", "b.npy", "c.pdb")
    make(tmp_path / "mols", "a.pdb", "b.pdb")
    assert keys("files:in/*", tmp_path) == ["a", "b", "c"]
    assert keys("files:in/a.txt", tmp_path) == ["a"]
    assert keys("mols", tmp_path) == ["a", "b"]
    assert list_files("in/*.txt", tmp_path) is None
    assert list_files("mols/*", tmp_path) is None
    with pytest.raises(SlurmGPUError, match="If each file is an item, write 'files:' before"):
        find("mols/*", tmp_path)


@pytest.mark.parametrize("named", ["", "files:", ["a.jpg", ""]])
def test_an_empty_name_as_of_a_variable_that_is_not_set_is_not_the_working_folder(
    tmp_path: Path, named: str | list[str]
) -> None:
    make(tmp_path, "a.jpg")
    with pytest.raises(SlurmGPUError, match=r"names nothing .* variable .* For the working folder write '(files:)?\.'"):
        list_files(named, tmp_path)
    assert keys(".", tmp_path) == ["a"]


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "in", "a.jpg", "shut/b.jpg")
    listed = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(SlurmGPUError, match=r"in/shut cannot be listed: Permission denied"):
        list_files("in", tmp_path)


def test_files_whose_suffix_differs_in_its_case_alone_are_said_to_be_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "in", "a.jpg", "b.JPG", "c.Jpg", "d.png", "sub/e.JPG", ".f.JPG", "x.jpgz", "Q.JSONL")
    make(tmp_path / "in", "g.gif", "g.GIF", "[1].png", "1.PNG")
    assert passed_over("in/**/*.jpg", tmp_path) == (
        f"The input skips 3 files with .JPG and .Jpg, such as {tmp_path}/in/b.JPG, because a "
        "pattern matches a suffix exactly. To include them, list the patterns: "
        "['in/**/*.jpg', 'in/**/*.JPG', 'in/**/*.Jpg']."
    )
    assert passed_over("files:in/*.jsonl", tmp_path) is not None
    named = ["in/b.JPG", "in/g.gif", "in/[1].png"]
    for taken in (["in/*.jpg", "in/*.J*"], ["in/*.jpg", "in/*.JPG", "in/c.Jpg"], "in", "in/*", "in/d*.png", *named):
        assert passed_over(taken, tmp_path) is None, taken
