"""What a test has changed in its process is found and put back, so that it fails in place of one that comes later."""

import importlib.util
import logging
import os
import signal
import sys

import pytest

from tests.support import process_state
from tests.support.unprivileged import unprivileged


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: os.environ.update(SHEEP="1"), "variable SHEEP: None, now '1'"),
        (lambda folder: os.environ.pop("NO_COLOR"), "variable NO_COLOR: '1', now None"),
        (os.chdir, "folder: "),
        (lambda folder: (os.chdir(folder), folder.rmdir()), "folder: "),
        (lambda folder: os.umask(0o123), "umask: "),
        (lambda folder: signal.signal(signal.SIGUSR2, signal.SIG_IGN), "handler of signal 12: "),
        (lambda folder: setattr(sys, "excepthook", print), "excepthook: "),
        (lambda folder: logging.root.addHandler(logging.NullHandler()), "log handlers: []"),
        (lambda folder: logging.root.setLevel(3), "log level: "),
    ],
)
def test_what_a_test_has_changed_is_told_and_put_back(tmp_path, change, told):
    before = process_state.read()
    change(tmp_path)
    [line] = process_state.put_back(before)
    assert line.startswith(told)
    assert process_state.read() == before


def test_what_a_test_has_set_in_pytorch_is_put_back():
    torch = pytest.importorskip("torch")
    before = process_state.read()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    assert len(process_state.put_back(before)) == 2
    assert process_state.read() == before


def test_what_another_user_could_not_import_root_can(tmp_path, monkeypatch):
    """pytest's folders, and in some places Python's, are closed to others."""
    (tmp_path / "of_root_alone.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with unprivileged():
        assert (importlib.util.find_spec("of_root_alone") is None) is (os.geteuid() != os.getuid())
    assert importlib.util.find_spec("of_root_alone") is not None
