"""What a command prints while it waits for the run that it has submitted."""

import io
import re

import pytest
from rich.console import Console

from slurmgpu.cli.commands import submitted
from tests.support.pretend_runs import pretend_run


def test_long_progress_of_a_task_leaves_the_number_of_items_whole(monkeypatch, tmp_path):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(submitted, "bar_console", lambda: terminal)
    with submitted.following(tmp_path, 512) as follower:
        follower._begin(draws=True)
        follower._bar(progress="each call failed so far: python exited with code 1: KeyError: 'prompt', in all of them")
    assert re.search("0 of 512 items *each call failed so far", terminal.file.getvalue())


@pytest.mark.parametrize(
    ("state", "n_published", "said"),
    [
        (None, 0, "interrupted; nothing was submitted. To continue: slurmgpu resubmit {}"),
        ("queued", 0, "interrupted; Slurm continues the run. To see it: slurmgpu status --watch {}"),
        ("ended", 0, "interrupted; the tasks have ended, published shards are kept. To continue: slurmgpu resubmit {}"),
        ("ended", 4, "interrupted; the tasks have ended, published shards are kept. To continue: slurmgpu merge {}"),
    ],
)
def test_an_interrupt_says_what_goes_on_and_what_to_type(tmp_path, capsys, state, n_published, said):
    run = pretend_run(tmp_path / "run", 0.0, n_shards=4)
    if state is None:
        (run.folder / "submissions.jsonl").unlink()
    else:
        run.record_submission({"submission": 1, "state": state})
    for shard in range(n_published):
        run.shard_path(shard).touch()
    with pytest.raises(KeyboardInterrupt), submitted.following(run.folder, 4):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[0] == said.format(run.folder)
