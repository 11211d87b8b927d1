"""What the next Slurm jobs ask for after the last ones."""

import pytest

from slurmgpu.executors import slurm_lessons
from tests.files.test_status import change
from tests.support.pretend_runs import pretend_run


@pytest.mark.parametrize(
    ("failed", "memory"),
    [([], None), ([[2, {"cuda_oom": 1}]], None), ([[2, {"item_error": 1, "host_oom": 1}]], "96000M")],
)
def test_an_item_that_lacked_host_memory_gets_half_as_much_again(tmp_path, monkeypatch, failed, memory):
    monkeypatch.setattr(slurm_lessons, "lives_of", lambda run: {})
    run = pretend_run(tmp_path / "run", 10_000)
    change(run, run.attempts()[0]["attempt"], failed=failed)
    options, _, notes = slurm_lessons.learn(run, run.last_submission(), {}, {})
    assert options.get("mem") == memory
    assert bool(notes) is (memory is not None)
