"""The progress of a run that Python waits for, without a terminal and in a notebook."""

import time
from types import SimpleNamespace

import pytest

from slurmgpu import progress
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


def test_a_notebooks_line_changes_twice_a_second_at_most_and_has_the_end_at_once(tmp_path, monkeypatch):
    run, now, shown = pretend_run(tmp_path / "judge", 300, n_tasks=2), [1000.0], []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))

    def display(data, raw, display_id):
        shown.append(data)
        return handle

    monkeypatch.setattr(progress, "_notebook", lambda: display)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    status = StatusReader(run).read(now=BEGIN + 300)
    n_items, errors = status["n_items"], {"crash": 2, "item_error": 1000}
    with following(run) as tell:
        for later, n_done in ((0.0, 8), (0.4, 16), (0.5, 8), (0.0, 16)):  # too early; later, but nothing new
            now[0] += later
            tell({**status, "n_items_done": n_done, "state": "running", "errors_by_class": {}})
        tell({**status, "n_items_done": 24, "state": "incomplete", "errors_by_class": errors})
        dead = [{**each, "silent": True} for each in status["attempts"][:1]]
        alive = status["attempts"][1:]
        tell({**status, "n_items_done": 24, "state": "incomplete", "errors_by_class": {}, "attempts": dead + alive})
        tell({**status, "n_items_done": n_items, "state": "complete", "errors_by_class": {}, "attempts": []})
    assert [data["text/plain"] for data in shown] == [
        f"8 of {n_items:,} items; running, 2 tasks",
        f"16 of {n_items:,} items; running, 2 tasks",
        f"24 of {n_items:,} items, 1,002 failed; incomplete, 2 tasks",
        f"24 of {n_items:,} items; incomplete, 1 task",
        f"{n_items:,} of {n_items:,} items; complete, 0 tasks",
    ]
    assert shown[0]["text/html"] == f'<progress value="8" max="{n_items}"></progress> {shown[0]["text/plain"]}'
