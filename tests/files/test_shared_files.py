"""Files on a file system that fails for a moment, shows what was, and holds what is no file."""

import contextlib
import errno
import os
import socket
import stat
import time

import pytest

from slurmgpu.util import shared_files
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.shared_files import (
    UnusableFileError,
    exists,
    list_fresh,
    move,
    open_regular,
    read_bytes,
    remove,
    retried,
)
from tests.support.failing import Failing


def failing(times, number, then=lambda: "done"):
    left = [number] * times

    def operation():
        if left:
            raise OSError(left.pop(), "for a moment")
        return then()

    return operation


@pytest.mark.parametrize("number", sorted(shared_files.TRANSIENT))
def test_a_transient_error_is_tried_again(number):
    assert retried(failing(3, number)) == "done"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_an_error_that_will_remain_is_raised_at_once(number):
    operation = failing(1, number)
    with pytest.raises(OSError) as failed:
        retried(operation)
    assert failed.value.errno == number
    assert operation() == "done"


def test_patience_has_an_end(monkeypatch):
    monkeypatch.setattr(shared_files, "FIRST_PAUSE_S", 0.01)
    with pytest.raises(OSError, match="for a moment"):
        retried(failing(10**6, errno.EIO), patience_s=0.1)


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


UNUSABLE = {
    "a FIFO": make_fifo,
    "a folder": os.mkdir,
    "symbolic link": lambda path: path.symlink_to("/dev/zero"),
    "socket": make_socket,
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_is_no_file_is_refused_without_waiting(tmp_path, what):
    UNUSABLE[what](tmp_path / "x")
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnusableFileError, match=what) as refused:
        open_regular(tmp_path / "x")
    assert refused.value.filename == str(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_a_device_is_refused():
    with pytest.raises(UnusableFileError, match="a device"):
        open_regular("/dev/zero")


def test_a_file_beyond_what_makes_sense_is_not_read(tmp_path):
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", 1 << 40)
    with pytest.raises(UnusableFileError, match="at most 1,000 are plausible"):
        read_bytes(tmp_path / "x", max_bytes=1000)
    (tmp_path / "y").write_bytes(b"abc")
    assert read_bytes(tmp_path / "y", max_bytes=3) == b"abc"


def test_a_listing_changes_the_folder_first(tmp_path):
    (tmp_path / "a").touch()
    os.utime(tmp_path, ns=(0, 0))
    assert list_fresh(tmp_path) == ["a"]
    assert tmp_path.stat().st_mtime_ns > 0


def test_a_folder_that_is_not_ones_own_is_listed_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "a").touch()

    def refuse(*_):
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(shared_files, "_touch", refuse)
    assert list_fresh(tmp_path) == ["a"]


def test_what_is_gone_already_is_no_error(tmp_path):
    (tmp_path / "a").touch()
    assert remove(tmp_path / "a")
    assert not remove(tmp_path / "a")
    assert not exists(tmp_path / "a")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder to a group that it is not in")
def test_a_file_that_is_moved_into_a_projects_folder_belongs_to_its_group(tmp_path):
    """As /tmp may be on the file system of the project, where a colleague with umask 007 could not read the file."""
    os.chown(tmp_path, -1, 4242)
    for name, mode in (("plain", 0o770), ("setgid", 0o2770)):
        folder = tmp_path / name
        folder.mkdir()
        os.chown(folder, -1, 4242)
        folder.chmod(mode)
        (tmp_path / "a").write_text("x")
        move(tmp_path / "a", folder / "a")
    assert [(tmp_path / name / "a").stat().st_gid for name in ("plain", "setgid")] == [os.getgid(), 4242]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a folder to a group that it is not in")
@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.EDQUOT])
def test_a_file_is_moved_also_where_its_group_cannot_be_changed(tmp_path, monkeypatch, number):
    """In a user namespace without the group, fchown(2) gives EINVAL."""
    folder = tmp_path / "setgid"
    folder.mkdir()
    os.chown(folder, -1, 4242)
    folder.chmod(0o2770)

    def refused(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fchown", refused)
    (tmp_path / "a").write_text("x")
    with pytest.raises(OSError, match="quota") if number == errno.EDQUOT else contextlib.nullcontext():
        move(tmp_path / "a", folder / "a")
    assert (folder / "a").read_text() == "x"


def test_a_write_whose_reply_is_lost_has_happened(tmp_path, monkeypatch):
    """The rename happens and fails; sent again, it does not find what it has renamed."""
    real, answers = os.replace, [errno.ETIMEDOUT]

    def replace(source, target):
        real(source, target)
        if answers:
            raise OSError(answers.pop(), "the reply was lost")

    monkeypatch.setattr(os, "replace", replace)
    write_bytes(tmp_path / "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"
    assert os.listdir(tmp_path) == ["x"]


def test_an_fsync_that_fails_once_costs_a_second_write(tmp_path, monkeypatch):
    real, answers = os.fsync, [errno.EIO, errno.EIO]

    def fsync(fd):
        if answers:
            raise OSError(answers.pop(), "for a moment")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes(tmp_path / "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.ENOSPC, True)])
def test_a_folder_that_cannot_be_synced_is_written_all_the_same(tmp_path, monkeypatch, number, is_told):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left") if is_told else contextlib.nullcontext():
        write_bytes(tmp_path / "x", b"abc")
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_pauses_grow(monkeypatch):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(shared_files.CHANCE, "uniform", lambda low, high: 1.0)
    retried(failing(9, errno.ESTALE), patience_s=1e6)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_folder_is_listed_anew_though_the_reply_to_its_change_is_lost(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    failing = Failing(monkeypatch)
    failing("open", errno.EEXIST, of=".anew", lost=True)
    assert list_fresh(tmp_path) == ["a"]
    assert failing.n_failed == 1
