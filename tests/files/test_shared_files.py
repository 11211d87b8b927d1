"""Files on a file system that fails for a moment, shows what was, and holds what is no file."""

import contextlib
import errno
import math
import os
import shutil
import socket
import stat
import time

import pytest

from slurmgpu.errors import SlurmGPUError
from slurmgpu.util import shared_files
from slurmgpu.util.atomic_files import write_bytes
from slurmgpu.util.regular_files import UnusableFileError, open_regular
from slurmgpu.util.shared_files import (
    cause_raised,
    exists,
    link_first,
    list_fresh,
    list_names,
    may,
    move,
    read_bytes,
    read_given,
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


@pytest.fixture
def naps(monkeypatch):
    """The pauses, which take no time but are on the clock."""
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(naps))
    monkeypatch.setattr(shared_files, "_outage", (-math.inf, -math.inf))
    return naps


def waited(naps, patience_s=60.0, operation=None):
    """How long an operation is tried that always fails."""
    before = sum(naps)
    with pytest.raises(OSError):
        retried(operation or failing(10**6, errno.ESTALE), patience_s)
    return sum(naps) - before


def test_a_file_system_that_is_gone_is_waited_for_once_not_for_each_file(naps):
    assert 50 < waited(naps) <= 60
    for _ in range(9):
        assert 0 < waited(naps) <= 5
    assert sum(naps) < 100


def test_a_longer_patience_counts_from_the_beginning_of_the_outage(naps):
    waited(naps)
    waited(naps, 120.0)
    assert 110 < sum(naps) <= 120


def test_an_operation_of_others_has_its_own_patience_while_theirs_end(naps):
    waited(naps, 120.0, lambda: retried(failing(10**6, errno.ESTALE)))
    assert 110 < sum(naps) <= 130


def test_a_file_system_that_comes_back_is_waited_for_again(naps):
    waited(naps)
    assert retried(failing(2, errno.ESTALE)) == "done"
    assert waited(naps) > 50
    naps.append(61.0)
    assert waited(naps) > 50


def test_a_file_that_is_left_out_after_a_moment_makes_no_other_impatient(naps):
    assert waited(naps, 5.0) <= 5
    assert waited(naps) > 50


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
    assert len(os.listdir("/proc/self/fd")) <= n_open


def test_a_device_is_refused():
    with pytest.raises(UnusableFileError, match="a device"):
        open_regular("/dev/zero")


@pytest.mark.parametrize("what", [*UNUSABLE, "a device"])
def test_what_a_user_names_is_read_through_a_link_and_refused_without_waiting_if_it_is_no_file(tmp_path, what):
    (tmp_path / "text").write_text("said")
    (tmp_path / "link").symlink_to("text")
    assert read_given(tmp_path / "link") == b"said"
    (tmp_path / "x").symlink_to("/dev/zero") if what == "a device" else UNUSABLE[what](tmp_path / "x")
    expected = {"a folder": "Is a directory", "symbolic link": "a device"}.get(what, what)
    with pytest.raises(OSError, match=expected) as refused:
        read_given(tmp_path / "x")
    assert refused.value.filename == str(tmp_path / "x")


def test_a_read_that_fails_names_its_file(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self/mem")  # its first bytes cannot be read: EIO
    with pytest.raises(OSError, match="Input/output error") as failed:
        read_given(tmp_path / "link", patience_s=0.0)
    assert failed.value.filename == str(tmp_path / "link")


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


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTSUP])
def test_a_folder_in_which_nothing_can_be_made_is_listed_all_the_same(tmp_path, monkeypatch, number):
    (tmp_path / "a").touch()
    Failing(monkeypatch)("open", number, of=".anew")
    if number == errno.ENOTSUP:
        with pytest.raises(OSError, match="supported"):
            list_fresh(tmp_path)
    else:
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


def test_a_file_that_is_moved_though_the_reply_is_lost_is_there(tmp_path, monkeypatch):
    failing, synced = Failing(monkeypatch), []
    failing("rename", errno.EIO, of="a", lost=True)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    (tmp_path / "a").write_text("x")
    move(tmp_path / "a", tmp_path / "b")
    assert failing.n_failed == 1
    assert (tmp_path / "b").read_text() == "x"
    assert synced == [1]
    with pytest.raises(FileNotFoundError):
        move(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600])
def test_a_file_is_moved_to_a_file_system_that_refuses_chmod(tmp_path, monkeypatch, mode):
    """GPFS with access lists alone does, and shares of a Windows server; /tmp is another file system than theirs."""

    def refused(number):
        def refuse(*given, **options):
            raise OSError(number, os.strerror(number))

        return refuse

    (tmp_path / "a").write_text("x")
    (tmp_path / "a").chmod(mode)
    os.utime(tmp_path / "a", (1000, 1000))
    monkeypatch.setattr(os, "rename", refused(errno.EXDEV))
    monkeypatch.setattr(os, "chmod", refused(errno.EPERM))
    monkeypatch.setattr(os, "fchmod", refused(errno.EPERM))
    if mode == 0o600:  # others could read the copy
        with pytest.raises(PermissionError) as failed:
            move(tmp_path / "a", tmp_path / "b")
        assert failed.value.filename == str(tmp_path / "b")
    else:
        move(tmp_path / "a", tmp_path / "b")
        assert (tmp_path / "b").read_text() == "x"
        assert (tmp_path / "b").stat().st_mtime == 1000


def test_a_file_for_which_a_disk_has_no_room_is_named_as_it_would_be_there(tmp_path, monkeypatch):
    def full(source, target, copy):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "move", full)
    with pytest.raises(OSError) as failed:
        move(tmp_path / "a", tmp_path / "b")
    assert (failed.value.filename, failed.value.filename2) == (str(tmp_path / "b"), None)


def test_what_cannot_be_opened_exists_all_the_same(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "away")
    make_socket(tmp_path / "socket")
    assert exists(tmp_path / "link")
    assert exists(tmp_path / "socket")
    assert not exists(tmp_path / "socket" / "x")


def test_the_first_file_of_a_name_stays(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    assert link_first(tmp_path / "first", tmp_path / "target")
    assert not link_first(tmp_path / "second", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "first"
    assert link_first(tmp_path / "first", tmp_path / "target")  # as NFS answers a request that was sent again


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EROFS])
def test_the_first_file_of_a_name_stays_also_where_there_are_no_hard_links(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(os, "link", refuse)
    if number == errno.EROFS:
        with pytest.raises(OSError, match="Read-only"):
            link_first(tmp_path / "first", tmp_path / "target")
        return
    assert link_first(tmp_path / "first", tmp_path / "target")
    assert not link_first(tmp_path / "second", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "first"


def test_only_a_folder_that_is_missing_itself_has_no_names(tmp_path, monkeypatch):
    """A run's whole directory that is away for a moment is not one without tasks."""
    assert list_names(tmp_path / "tasks") == []
    with pytest.raises(FileNotFoundError):
        list_names(tmp_path / "run" / "tasks")
    (tmp_path / "link").symlink_to(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        list_names(tmp_path / "link")
    monkeypatch.setattr(os, "listdir", lambda folder: ["10", "9", "1"])
    assert list_names(tmp_path) == ["1", "10", "9"]


def test_what_a_user_may_do_is_not_taken_from_an_error(tmp_path, monkeypatch):
    """access(2) says of any error that the user may not."""
    assert may(tmp_path, os.W_OK)
    with pytest.raises(FileNotFoundError):
        may(tmp_path / "missing", os.R_OK)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not may(tmp_path, os.W_OK)


@pytest.mark.parametrize(("number", "is_again"), [(errno.ESTALE, True), (errno.EACCES, False), (None, False)])
def test_what_a_message_says_of_a_moment_is_tried_again(number, is_again):
    said = []

    def say():
        if said:
            return "done"
        said.append("the input cannot be read")
        raise SlurmGPUError(said[0]) from (OSError(number, "for a moment") if number else None)

    if is_again:
        assert retried(lambda: cause_raised(say)) == "done"
    else:
        with pytest.raises(SlurmGPUError, match="the input cannot be read"):
            retried(lambda: cause_raised(say))


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


@pytest.mark.parametrize("lost", [False, True])
def test_nothing_of_a_listing_is_left_though_a_removal_fails(tmp_path, monkeypatch, lost):
    (tmp_path / "a").touch()
    failing = Failing(monkeypatch)
    failing("unlink", errno.EINTR, of=".anew", lost=lost, times=2)
    assert list_fresh(tmp_path) == ["a"]
    assert failing.n_failed == 2
    assert os.listdir(tmp_path) == ["a"]
