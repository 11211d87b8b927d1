"""Files that appear whole or not at all, and what is said when they cannot."""

import errno
import os

import pytest

from slurmgpu.util.atomic_files import FULL, beside, write_bytes


def half_of_it(path):
    with beside(path) as partial:
        partial.write_bytes(b"half")
        raise RuntimeError


def a_folder_that_lacks_one(path):
    with beside(path) as partial:
        partial.mkdir()
        (partial / "tasks" / "1.json").write_text("{}")


def test_what_is_written_is_there_whole_or_not_at_all(tmp_path):
    write_bytes(tmp_path / "page.html", b"before")
    with pytest.raises(RuntimeError):
        half_of_it(tmp_path / "page.html")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("page.html", b"before")]


@pytest.mark.parametrize("path", ["missing/page.html", "x" * os.pathconf("/", "PC_NAME_MAX")])
def test_an_error_names_the_file_that_was_asked_for(tmp_path, path):
    with pytest.raises(OSError) as failed:
        write_bytes(tmp_path / path, b"")
    assert failed.value.filename == str(tmp_path / path)


def test_an_error_within_a_folder_that_is_made_names_it_where_it_shall_be(tmp_path):
    with pytest.raises(OSError) as failed:
        a_folder_that_lacks_one(tmp_path / "run")
    assert failed.value.filename == str(tmp_path / "run" / "tasks" / "1.json")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", FULL)
def test_a_full_disk_is_told_of_the_file_that_has_no_room(tmp_path, number):
    with pytest.raises(OSError) as failed, beside(tmp_path / "page.html"):
        raise OSError(number, os.strerror(number))
    assert failed.value.filename == str(tmp_path / "page.html")


def test_errors_of_other_files_name_those(tmp_path):
    with pytest.raises(FileNotFoundError) as failed, beside(tmp_path / "page.html"):
        (tmp_path / "other").stat()
    assert (failed.value.errno, failed.value.filename) == (errno.ENOENT, str(tmp_path / "other"))
