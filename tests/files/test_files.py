"""Files that appear whole or not at all, and what is said when they cannot."""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

import pytest

from slurmgpu.run.creation import create_run
from slurmgpu.shards.names import partial_name, partials_of
from slurmgpu.util.atomic_files import beside, partial_path, write_bytes, write_json_text, write_new
from slurmgpu.util.shared_files import FULL
from tests.support.access_lists import let_user_read
from tests.support.failing import Failing
from tests.support.runs import planned_run
from tests.support.somebody import USER


@contextlib.contextmanager
def umasked(umask):
    former = os.umask(umask)
    try:
        yield
    finally:
        os.umask(former)


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


@pytest.fixture
def steps(monkeypatch):
    """What is fsynced (a file with its size, or a folder) and named, in order."""
    done = []

    def noted(name, call, what):
        monkeypatch.setattr(os, name, lambda *given: (call(*given), done.append(what(*given))))

    def synced(fd):
        status = os.fstat(fd)
        return "folder" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes"

    noted("fsync", os.fsync, synced)
    noted("replace", os.replace, lambda source, target: f"named {target.name}")
    noted("link", os.link, lambda source, target: f"named {target.name}")
    return done


def test_the_bytes_of_a_file_reach_the_disk_before_its_name_does(tmp_path, steps):
    n_open = len(os.listdir("/proc/self/fd"))
    write_bytes(tmp_path / "run.json", b"{}")
    assert steps == ["2 bytes", "named run.json", "folder"]
    assert len(os.listdir("/proc/self/fd")) <= n_open
    steps.clear()
    write_bytes(tmp_path / "progress.json", b"{}", durable=False)  # it may be lost if the machine fails
    assert steps == ["named progress.json"]


def test_a_new_file_reaches_the_disk_before_its_name_does_and_replaces_no_other(tmp_path, steps):
    path = tmp_path / "run.toml"
    assert write_new(path, b"first")
    assert steps == ["5 bytes", "named run.toml"]
    assert not write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["run.toml"]


def test_all_of_a_run_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    plan = planned_run(tmp_path / "other").plan
    index, folder = tmp_path / "input.idx", tmp_path / "input"
    index.touch()
    folder.mkdir()
    (folder / "00000.parquet").touch()
    steps, rename = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    monkeypatch.setattr(os, "replace", lambda source, target: (rename(source, target), steps.append(target.name)))
    create_run(tmp_path / "run", plan, [index, folder])
    before, after = steps[: steps.index("run")], steps[steps.index("run") + 1 :]
    assert {"input.idx", "00000.parquet", "input", "run.json"} <= {*before}
    assert before.index("00000.parquet") < before.index("input")
    assert after == [tmp_path.name]


def test_a_file_that_another_process_writes_meanwhile_is_not_replaced_by_a_new_one(tmp_path, monkeypatch):
    path = tmp_path / "run.toml"
    monkeypatch.setattr(os, "fsync", lambda fd: path.write_bytes(b"theirs"))
    assert not write_new(path, b"ours")
    assert path.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["run.toml"]


@pytest.mark.parametrize("number", FULL)
def test_on_a_full_disk_only_a_file_that_may_be_is_written_in_place(tmp_path, monkeypatch, number):
    def full(source, target):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "7_0.0.json"
    path.write_text('{"state": "running"}')
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        write_json_text(path, '{"state": "ended"}')
    assert path.read_text() == '{"state": "running"}'
    write_json_text(path, '{"state": "ended"}', in_place_if_full=True)
    assert path.read_text() == '{"state": "ended"}'
    with pytest.raises(OSError) as failed:
        write_json_text(tmp_path / "other.json", "{}", in_place_if_full=True)
    assert failed.value.errno == number
    assert os.listdir(tmp_path) == ["7_0.0.json"]
    link = tmp_path / "link.json"
    link.symlink_to(path)  # of another user, where others may write in the folder
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        write_json_text(link, "{}", in_place_if_full=True)
    assert path.read_text() == '{"state": "ended"}'


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


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_of_a_mode_has_no_other_one_before(tmp_path, monkeypatch, mode):
    had, change = [], os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda fd, to: (had.append(os.fstat(fd).st_mode & 0o777), change(fd, to)))
    with umasked(0):
        write_bytes(tmp_path / "private.json", b"{}", mode=mode)
    assert had == [mode]
    assert (tmp_path / "private.json").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("former", "umask", "found"), [(0o644, 0o077, 0o644), (0o600, 0o022, 0o644), (0o664, 0o027, 0o644)]
)
def test_a_file_that_replaces_another_keeps_its_readers(tmp_path, former, umask, found):
    path = tmp_path / "file"
    path.touch()
    path.chmod(former)
    with umasked(umask):
        write_bytes(path, b"new")
        write_bytes(tmp_path / "secret", b"", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == found
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_what_replaces_a_file_of_an_access_list_is_not_opened_to_the_group(tmp_path):
    """The mode of such a file has the list's mask where the group's permissions would be."""
    path = tmp_path / "merged.h5"
    path.touch(0o600)
    let_user_read(path, USER.pw_uid)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with umasked(0o077):
        write_bytes(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(("has", "asked"), [(0o755, 0o644), (0o777, 0o644), (0o755, 0o600)])
def test_where_no_mode_can_be_given_a_file_is_written_only_if_others_may_do_no_more(tmp_path, monkeypatch, has, asked):
    def refuse(fd, mode):
        change(fd, has)  # the mode that all files have there
        raise PermissionError(errno.EPERM, "Operation not permitted")

    change = os.fchmod
    monkeypatch.setattr(os, "fchmod", refuse)
    path = tmp_path / "run.json"
    if (has, asked) == (0o755, 0o644):
        write_bytes(path, b"{}", mode=asked)
        assert path.read_bytes() == b"{}"
    else:
        with pytest.raises(PermissionError, match=re.escape(str(path))):
            write_bytes(path, b"{}", mode=asked)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOENT, *FULL])
def test_errors_of_other_files_name_those(tmp_path, number):
    with pytest.raises(OSError) as failed, beside(tmp_path / "page.html"):
        raise OSError(number, os.strerror(number), str(tmp_path / "other"))
    assert (failed.value.errno, failed.value.filename) == (number, str(tmp_path / "other"))


def test_a_link_of_somebody_who_saw_the_name_before_leads_no_writer_elsewhere(tmp_path):
    folder, theirs = tmp_path / "shared", tmp_path / "theirs"
    folder.mkdir()
    theirs.write_bytes(b"precious")
    seen = partial_path(folder / "rows.csv")
    for later in range(100):
        guess = re.sub(r"\d+(?=\.partial$)", lambda number, later=later: str(int(number[0]) + later), seen.name)
        if not os.path.lexists(folder / guess):
            (folder / guess).symlink_to(theirs)
    write_bytes(folder / "rows.csv", b"rows")
    assert theirs.read_bytes() == b"precious"
    assert not (folder / "rows.csv").is_symlink()


def test_the_name_of_a_partial_shard_stays_and_tells_nothing_of_the_next_ones(tmp_path):
    first, second = (partial_name(shard, "1_0.0") for shard in (0, 1))
    assert first == partial_name(0, "1_0.0")
    assert first[5:] != second[5:]
    (tmp_path / first).touch()
    assert partials_of(tmp_path, "1_0.0") == [tmp_path / first]


def test_tries_that_find_no_status_leave_no_files_beside_the_target(tmp_path, monkeypatch):
    path, failing = tmp_path / "a.json", Failing(monkeypatch)
    write_bytes(path, b"old")
    for name in ("stat", "lstat"):
        failing(name, errno.ESTALE, of=".partial", times=99)
    with pytest.raises(OSError, match="Stale file handle"):
        write_bytes(path, b"new", patience_s=0.2)
    assert failing.n_failed > 1
    assert os.listdir(tmp_path) == ["a.json"]
    assert path.read_bytes() == b"old"
