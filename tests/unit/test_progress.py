import time

import pytest

from slurmgpu.progress import following
from slurmgpu.report.status import StatusReader
from tests.support.pretend_runs import BEGIN, pretend_run


def test_python_that_waits_without_a_terminal_prints_lines_unless_the_run_ends_soon(tmp_path, monkeypatch, capsys):
    run, now = pretend_run(tmp_path / "judge", 300, n_tasks=2), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    status = StatusReader(run).read(now=BEGIN + 300)
    with following(run) as tell:
        tell(status)
        assert not capsys.readouterr().err
        now[0] += 11
        tell(status)
    out, err = capsys.readouterr()
    assert not out
    assert "judge running; " in err


def test_an_interrupt_says_without_a_terminal_how_to_come_back(tmp_path, capsys):
    run = pretend_run(tmp_path / "judge", 300, n_tasks=2)
    with pytest.raises(KeyboardInterrupt), following(run):
        raise KeyboardInterrupt
    assert f"slurmgpu.open_run({str(run.folder)!r})" in capsys.readouterr().err
