"""`slurmgpu.map` on a real Slurm: columns are learnt on a node, and rows come while the array works."""

import pytest

import slurmgpu

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("cluster")]


def test_a_closure_is_mapped_on_nodes_and_its_columns_are_learnt_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    factor = 2

    def double(item, task):
        return {"n": item * factor, "device": task.device}

    options = {"gpus": 2, "array": True, "device": "cpu", "overrides": {"html": False}}
    run = slurmgpu.map(double, range(40), load=lambda task: task, **options)
    assert [(row["n"], row["device"]) for row in run.rows()] == [(n * 2, "cpu") for n in range(40)]
    assert run["n"].dtype == "int64"
    [line] = run.run.submissions()
    assert (line["executor"], line["n_tasks"], run.report()["complete"]) == ("slurm", 2, True)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["double"]  # the probe is removed
