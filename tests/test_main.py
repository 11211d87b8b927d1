"""What the command line makes of errors: a sentence where the user can do something, a traceback where not."""

import errno
import os
import sys

import pytest

from slurmgpu import cli
from slurmgpu.cli import app


@pytest.fixture
def failing(monkeypatch):
    """Runs the command line, which fails with an error: its exit code."""

    def call(error):
        def fail():
            raise error

        monkeypatch.setattr(app, "app", fail)
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a broken pipe takes away
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    return call


@pytest.mark.parametrize(
    ("number", "to_do"),
    [
        (errno.EROFS, "Do this on a machine that can write there"),
        (errno.EACCES, "Name a path that you may read"),
        (errno.EPERM, "Name a path that you may read"),
        (errno.ENOSPC, "Make room there"),
        (errno.EDQUOT, "Make room there"),
        (errno.ENAMETOOLONG, "Name a path that can be read"),
        (errno.ELOOP, "Name a path that can be read"),
        (errno.ENOENT, "Name a path that can be read"),
    ],
)
def test_an_error_of_a_file_that_the_user_can_put_right_is_a_sentence(failing, capsys, number, to_do):
    assert failing(OSError(number, os.strerror(number), "/runs/a/.submitting")) == 2
    assert capsys.readouterr().err.startswith(f"error: /runs/a/.submitting: {os.strerror(number)}. {to_do}")


def test_a_full_disk_is_one_also_where_the_file_is_not_known(failing, capsys):
    assert failing(OSError(errno.ENOSPC, "No space left on device")) == 2
    assert "A file that it writes: No space left on device. Make room" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "no", "x"), OSError(errno.EACCES, "no"), OSError("h5py")])
def test_any_other_error_is_a_bug_with_its_traceback(failing, error):
    with pytest.raises(OSError, match=r"no|h5py"):
        failing(error)


def test_a_path_that_is_too_long_is_said_to_be(slurmgpu):
    done = slurmgpu("status", "a" * 300, expect=2)
    assert done.stderr.count("\n") == 1
    assert "File name too long" in done.stderr
