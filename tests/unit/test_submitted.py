import io
import re

from rich.console import Console

from slurmgpu.cli.commands import submitted


def test_long_progress_of_a_task_leaves_the_number_of_items_whole(monkeypatch, tmp_path):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(submitted, "bar_console", lambda: terminal)
    with submitted.following(tmp_path, 512) as follower:
        follower._begin(draws=True)
        follower._bar(progress="each call failed so far: python exited with code 1: KeyError: 'prompt', in all of them")
    assert re.search("0 of 512 items *each call failed so far", terminal.file.getvalue())
