"""`slurmgpu track`: replay what tasks logged to trackers."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slurmgpu.cli import completion, options
from slurmgpu.errors import SlurmGPUError

if TYPE_CHECKING:
    from slurmgpu.run.directory import Run
    from slurmgpu.trackers.replay import Replay

LOOK_S = 5.0
DOUBT_S = 30.0
"""How often to ask whether any task of a followed run is alive: a run that was killed never records its end."""


def track(
    folder: options.RunArgument,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="TRACKER:WHERE",
            help="tensorboard:DIR, wandb:PROJECT, mlflow:URI or trackio:PROJECT; default: [track] of the run file.",
            autocompletion=completion.words("tensorboard:", "wandb:", "mlflow:", "trackio:"),
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Replay what tasks logged to a tracker.

    \b
      slurmgpu track runs/digits --to tensorboard:tb
      slurmgpu track runs/digits --to wandb:digits --follow

    Tasks write what task.log gets into the run directory; they never contact a tracker.
    A tracker that already has a part gets only the rest.
    A step to which a running task may still add is sent later.
    """
    from slurmgpu.cli.console import result, result_json
    from slurmgpu.executors import live_tasks, on_end
    from slurmgpu.plan.trackers import parse_destination
    from slurmgpu.run.submissions import is_over
    from slurmgpu.trackers.replay import Replay
    from slurmgpu.util.amounts import count_of

    # MLflow logs each of its database's migrations.
    logging.getLogger().setLevel(logging.WARNING)
    run = options.open_run(folder)
    texts = to or run.plan.track
    if not texts:
        raise SlurmGPUError("Name a tracker: --to tensorboard:DIR, wandb:PROJECT, mlflow:URI or trackio:PROJECT.")
    if not to:  # folders of [track] are relative to the run file, as those of its merge job
        os.chdir(on_end.folder_of(run))
    replay = Replay(run, list(dict.fromkeys(map(parse_destination, texts))))
    over, asked = is_over(run.submissions()), time.monotonic()
    try:
        replay.look(final=over)
        while follow and not over:
            time.sleep(LOOK_S)
            over = is_over(lines := run.submissions())  # asked first, so that the replay reads all that was written
            if lines and not over and time.monotonic() - asked >= DOUBT_S:
                over, asked = not live_tasks.may_live(run), time.monotonic()
            replay.look(final=over)
    except KeyboardInterrupt:
        _say_interrupted(run, to or ())
    finally:
        sent = replay.close(finished=over)
    _say_left(run, replay, goes_on=over or follow)
    if as_json:
        result_json([{"to": str(one.destination), "n_runs": one.n_runs, "n_steps": one.n_steps} for one in sent])
    else:
        for one in sent:
            result(f"{one.destination}: {count_of(one.n_runs, 'run')}, {count_of(one.n_steps, 'new step')}")
    if replay.failed:
        raise SlurmGPUError("\n".join(replay.failed.values()))


def _say_interrupted(run: Run, to: Sequence[str]) -> None:
    from slurmgpu.cli.console import say

    given = "".join(f" --to {shlex.quote(text)}" for text in to)
    say(f"interrupted; the run goes on. To send the rest: slurmgpu track {run.typed}{given}")


def _say_left(run: Run, replay: Replay, *, goes_on: bool) -> None:
    """Print how many steps were not sent, and why; held-back steps only if the command does not send them later."""
    from slurmgpu.cli.console import say
    from slurmgpu.util.amounts import count_of

    if not goes_on and (n_held := replay.points.n_held):
        say(
            f"{count_of(n_held, 'step')} not sent yet, because tasks may still add to them: repeat the command once "
            "the run has ended."
        )
    if n_late := replay.points.n_late:
        say(
            f"values of {count_of(n_late, 'step')} came too late: these or later steps had been sent already. "
            f"{run.folder} has all values. To have them all in a tracker, send to another DIR or PROJECT after the run."
        )
    if not replay.points.items():
        say(f"Nothing has been logged in {run.folder} yet. A workload logs with task.log(step, loss=…).")
