"""The runs of `check --gpu`, whose faults of a GPU are pretended here, and the verdicts on them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from slurmgpu import api
from slurmgpu.cli.commands import check
from slurmgpu.faults import gpu_trial
from slurmgpu.faults.verdicts import Verdict
from slurmgpu.util.gpus import GPU
from slurmgpu.workload import TaskContext
from slurmgpu.workloads.gpu_trial import workload


def test_verdicts_say_what_was_found_where_it_is_not_what_must_come_of_it(tmp_path, monkeypatch):
    """As of a run that had no faults, and of one that computed other numbers.

    That they hold of a run with faults shows `tests/models/test_gpu_kit.py`.
    """
    run = api.submit(gpu_trial.run_file(tmp_path, 0, faults=False)).run
    computes, *others = gpu_trial.try_gpus(tmp_path, 0, lambda keys: run)
    assert computes.kept
    assert [other.kept for other in others] == [False] * 5
    assert "item 19 was not quarantined" in others[1].text

    monkeypatch.setattr(gpu_trial, "matrix", lambda index: np.ones((gpu_trial.N, gpu_trial.N), np.float32))
    [wrong] = gpu_trial.try_gpus(tmp_path, 0, lambda keys: run)
    assert wrong == Verdict("40 of 40 products differ from the CPU's", kept=False)


@pytest.mark.parametrize(("free_mb", "kept"), [([9000, 9001, 7000, 7001, 7000], True), ([9000] * 4 + [7000], False)])
def test_memory_that_is_not_free_again_is_that_of_one_gpu(monkeypatch, free_mb, kept):
    """Of two GPUs, one may have a display."""
    tasks = [{"published": [[shard, 0, 1, shard != 4]]} for shard in (0, 4)]
    tasks[0]["published"] += [[1, 1, 1, True]]
    tasks[1]["published"] += [[shard, 1, 1, True] for shard in (2, 3, 4)]
    found = SimpleNamespace(
        report={"complete": True},
        run=SimpleNamespace(attempts=lambda: tasks),
        notes=lambda kind: {"free_mb": free_mb[gpu_trial.KINDS.index(kind)]},
    )
    card = GPU("A card", 24 * 10**9, free_bytes=10**10)
    monkeypatch.setattr(gpu_trial.gpus, "probe", lambda n: [card, card])
    verdict = gpu_trial._is_free_again(found, [10**10] * 2, 2)
    assert verdict.kept == kept
    assert f"workers found 7,000 to {max(free_mb):,} MB free" in verdict.text


def test_a_batch_needs_more_than_is_free_of_a_gpu_that_others_use(tmp_path, monkeypatch):
    """Half of a batch, too, and a quarter fits: so `oom_batch` must be 2."""
    left = [55e9]

    def empty(size, **_):
        left[0] -= size
        if left[0] < 0:
            raise RuntimeError("CUDA out of memory")

    cuda = SimpleNamespace(set_device=lambda device: None, mem_get_info=lambda device: (int(left[0]), 100 * 10**9))
    torch = SimpleNamespace(cuda=cuda, device=str, empty=empty, uint8="uint8")
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = workload._GPU(TaskContext("cuda:0", 1, tmp_path))
    device.hold(gpu_trial.OOM_BATCH)
    left[0] = 55e9
    with pytest.raises(RuntimeError, match="out of memory"):
        device.hold(2 * gpu_trial.OOM_BATCH)


@pytest.mark.parametrize("kept", [True, False])
def test_check_tries_the_gpus_in_the_run_files_image_and_fails_with_them(project, monkeypatch, capfd, kept):
    folder = project(
        8, resources={"executor": "local", "gpus": 2, "device": "cpu"}, container={"env": {"SPEED": "fast"}}
    )
    asked = []

    def try_gpus(*arguments):
        asked.append(arguments)
        yield Verdict("it computes", kept=kept)

    monkeypatch.setattr(gpu_trial, "try_gpus", try_gpus)
    assert check.run_checks_here(folder / "slurmgpu.toml", {}, gpu=True) == (0 if kept else 2)
    [(_, n_gpus, _, container)] = asked
    assert (n_gpus, container) == (0, {"env": {"SPEED": "fast"}})
    said = capfd.readouterr().out
    assert f"{'✓' if kept else '✗'} GPU trial  it computes" in said
    assert "proves nothing about a GPU" in said


def test_a_gpu_is_tried_where_one_is_asked_for(project, slurmgpu):
    folder = project(8, resources={"executor": "local", "gpus": 0})
    done = slurmgpu("check", "--here", "--gpu", cwd=folder, expect=2)
    assert "✗ GPU trial  The run file asks for no GPU" in done.stdout
    done = slurmgpu("check", "--gpu", cwd=folder, expect=2)
    assert "--gpu says what to try, not where" in done.stderr


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.usefixtures("cluster")
def test_check_tries_the_gpus_of_a_node(project, slurmgpu):
    """By a job of the private cluster, whose GPUs are pretended."""
    folder = project(8, resources={"gpus": 1, "device": "cpu"})
    done = slurmgpu("check", "--node", "--gpu", cwd=folder, expect=0)
    assert done.stdout.count("✓ GPU trial") == 7


@pytest.mark.nightly
def test_check_tries_the_gpus_in_an_image(project, slurmgpu, apptainer):
    folder = project(8, resources={"executor": "local", "gpus": 1, "device": "cpu"}, container=apptainer.table())
    done = slurmgpu("check", "--here", "--gpu", cwd=folder, expect=0)
    assert done.stdout.count("✓ GPU trial") == 7
