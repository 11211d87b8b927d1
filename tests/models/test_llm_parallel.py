"""A model that several processes share says what it says in one; and no process waits for one that has failed."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers")


import slurmgpu as library
from slurmgpu.llm.interface.engine import Place
from slurmgpu.workload import Item
from slurmgpu.workloads.generate.workload import Generate
from tests.support.engines import load_on_cpu
from tests.support.llm_ranks import compute
from tests.support.runs import records
from tests.support.tiny_models import make_gpt_oss, make_llama, make_qwen3

LOCAL = ("submit", "--executor", "local", "--device", "cpu")
FP32 = {"precision": "fp32"}
SAMPLED = {"temperature": 1.1, "top_p": 0.9}
CASES = {
    "static": ("llama", FP32 | {"batching": "static"}, SAMPLED),
    "continuous": ("qwen3", FP32 | {"batching": "continuous"}, SAMPLED),
    "a mixture of experts": ("gpt_oss", FP32 | {"batching": "static"}, {}),
}
N_REQUESTS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        # An odd number of tokens cannot be split by transformers before 5.21.
        "llama": make_llama(root / "llama", vocab_size=50),
        "qwen3": make_qwen3(root / "qwen3", vocab_size=50),
        "gpt_oss": make_gpt_oss(root / "gpt_oss", vocab_size=50),
    }


@pytest.fixture(scope="module")
def cases(models):
    """Name, model, options, sampling and number of requests."""
    found = [
        (name, str(models[kind]), options, sampling, N_REQUESTS) for name, (kind, options, sampling) in CASES.items()
    ]
    return [*found, ("8bit", f"{models['llama']}-8bit", FP32, {}, N_REQUESTS)]


@pytest.fixture(scope="module")
def ranks(cases, tmp_path_factory, slurmgpu):
    """What each of two ranks got, by the cases' names."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.json").write_text(json.dumps(cases))
    slurmgpu.module("tests.support.llm_ranks", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_say_what_one_does(ranks, cases, name, one_thread):
    [case] = [case for case in cases if case[0] == name]
    alone = compute((*case[:2], FP32 | {"batching": "static"}, *case[3:]), Place("cpu"))
    for found in (rank[name] for rank in ranks):
        assert found["outputs"] == alone["outputs"]
        np.testing.assert_allclose(found["scores"], alone["scores"], atol=1e-4)
        assert not found["given_up"]
        assert found["n_parameters"] < 0.8 * alone["n_parameters"], "the model was not split"
        # Of a mixture the experts are handed out, and each process has all heads.
        assert found["kv_bytes"] == alone["kv_bytes"] // (1 if name == "a mixture of experts" else 2)


def test_eight_bits_are_split_as_well(ranks):
    first, second = (rank["8bit"] for rank in ranks)
    assert first["outputs"] == second["outputs"]
    assert all(error is None and tokens for tokens, _, error in first["outputs"])
    exact = np.array(ranks[0]["static"]["scores"])
    assert 0 < np.abs(np.array(first["scores"]) - exact).mean() < 0.5 * exact.std()


def test_processes_compute_alike_where_one_of_them_is_off_when_a_model_is_loaded(ranks):
    nothing = dict.fromkeys(("pads", "packs", "leaves out", "draws by kernels"), False)
    assert [rank["rank 1 off"] for rank in ranks] == [nothing] * 2


FAULTY = """
from slurmgpu.worker import groups
from slurmgpu.workloads.generate.workload import Generate

class Faulty(Generate):
    "Of the first worker, rank 1's batches fail."

    def load(self, task):
        super().load(task)
        mark = task.run_dir / "failed"
        if task.rank != 1 or mark.exists():
            return
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

        def fail(self, model):
            mark.touch()
            raise RuntimeError("rank 1 has failed")

        ContinuousBatchProcessor._generation_step = fail
        groups.PEER_PATIENCE_S = 1.0  # nobody will come
"""


@pytest.mark.nightly
def test_a_run_of_several_processes_says_what_one_does_also_after_a_rank_failed(project, slurmgpu, models):
    items = [{"q": f"{number}+{number}="} for number in range(12)]
    settings = {"model": str(models["llama"]), "prompt": "{q}", "max_tokens": 12, "precision": "fp32", "tokens": True}
    continuous = settings | {"batching": "continuous"}
    folder = project(items=items, workload="Faulty", settings=continuous, resources={"processes": "per-gpu"})
    (folder / "workloads.py").write_text(FAULTY)
    slurmgpu(*LOCAL, "--gpus", 2, cwd=folder, expect=0, OMP_NUM_THREADS="1")
    [record] = records(folder)
    assert len(record["deaths"]) == 1
    alone = load_on_cpu(Generate(**settings, batching="static"))
    rows = alone([Item(index, item) for index, item in enumerate(items)])
    with library.open(folder / "run" / "merged.h5") as merged:
        for name in ("text", "finish_reason", "n_tokens"):
            assert list(merged[name][:]) == [row[name] for row in rows]
        assert [each.tolist() for each in merged["tokens"][:]] == [row["tokens"].tolist() for row in rows]
