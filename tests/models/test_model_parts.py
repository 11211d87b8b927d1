"""Items of language models in parts: what several tasks compute of one item is what one computes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from slurmgpu.errors import ItemError
from slurmgpu.llm.heads.engine import HeadScores
from slurmgpu.llm.interface import exchange
from slurmgpu.llm.interface.engine import Generated, Output, Scores
from slurmgpu.run.claims import Claim
from slurmgpu.run.directory import Run
from slurmgpu.shards.columns import Array, Ragged, convert_row
from slurmgpu.worker.parts import Parts
from slurmgpu.workload import Item, TaskContext
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.generate.workload import Generate
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.score.workload import Score
from tests.support.engines import load_on_cpu
from tests.support.runs import datasets, planned_run, report
from tests.support.tiny_heads import make_head
from tests.support.tiny_models import make_llama

FP32 = {"precision": "fp32"}
SUM = {"prompt": "{question}=", "temperature": 1.6, "max_tokens": 24, **FP32}
TEXTS = {"question": "47+85", "reference": "132", "text": ["#132", "#131", "7+5=12", "132", "no"]}
RUBRIC = {
    "prompt": "{reference}={text}",
    "verdicts": {"right": "1", "wrong": "0"},
    "values": {"right": 1, "wrong": 0},
    "pattern": "(1|0)",
    "max_tokens": 4,
}


def test_what_engines_give_is_the_same_after_json():
    tokens, thirds = np.array([3, 1], np.int32), np.array([1 / 3, -np.inf], np.float32)
    found = [
        Output(7, "a\udcff", "b", Generated((1, 2), (3,), "<x>"), tokens, thirds, 5, "length", None, None, 2),
        Output(8, error="too long", finish_reason="error", count=3),
        Scores(9, np.array([-1 / 3, -np.inf]), np.array([1, 2])),
        HeadScores(1, np.array([[1 / 3, 2.0], [0.1, 5.0]]), 7, 1),
    ]
    for each in found:
        back = exchange.from_json(type(each), json.loads(json.dumps(exchange.to_json(each))))
        for field in dataclasses.fields(each):
            one, other = getattr(each, field.name), getattr(back, field.name)
            if isinstance(one, np.ndarray):
                assert (one.dtype, one.tobytes(), one.shape) == (other.dtype, other.tobytes(), other.shape)
            else:
                assert one == other


def asked_of(make, tmp_path, item, n_tasks=1):
    """The workload of the first of some tasks, and the row of the item in four parts as each of them has it."""
    run = planned_run(tmp_path, n_items=1, batch_size=1, shard_items=1, parts=4)
    workloads, calls = [], []
    for number in range(n_tasks):
        workload, parts = make(), Parts(run, Claim(f"{number}", f"{number}.0", "node", number), 1)
        workload.load(TaskContext("cpu", 0, Path(), parts=4, divide=parts.divide))
        workloads.append(workload)
        calls.append(parts.calling(workload))
    rows = [call([item])[0] for call in calls]
    return workloads[0], rows


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_tasks_that_ask_a_model_something_else_do_not_take_each_others_answers(adder, tmp_path):
    prompts = iter(["{question}=", "{question}"])

    def make():
        return Generate(model=str(adder), n=4, **{**SUM, "prompt": next(prompts)})

    with pytest.raises(ItemError, match="another task made different requests to the model for this item"):
        asked_of(make, tmp_path / "run", Item(0, {"question": "47+85"}, 5), n_tasks=2)


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", ["generate", "collect", "tree", "judge", "judge by scores", "score"])
def test_an_item_in_parts_has_the_row_of_the_whole_item(case, adder, tmp_path):
    data = TEXTS
    if case == "generate":
        data = {"question": "47+85"}

        def make():
            return Generate(model=str(adder), n=6, tokens=True, logprobs=True, **SUM)
    elif case in ("collect", "tree"):
        shape = {"tree": [2, 5]} if case == "tree" else {"paths": 5, "rollouts": 2}
        data = {"question": "47+85", "answer": 132}

        def make():
            return Collect(model=str(adder), **{**SUM, "temperature": 1.0}, **shape)
    elif case == "score":
        model = make_head(tmp_path / "model", "bert", num_labels=1)

        def make():
            return Score(model=str(model), pair=["{question}", "{text}"], each="text", **FP32)
    else:
        model, method = make_llama(tmp_path / "model"), "score" if "scores" in case else "parse"

        def make():
            return Judge(model=str(model), rubric=RUBRIC, each="text", method=method, **FP32)

    item = Item(0, data, 5)
    whole = load_on_cpu(make())
    [expected] = whole([item])
    workload, rows = asked_of(make, tmp_path / "run", item, n_tasks=2)
    assert workload.most_parts > 1
    wanted, *found = (convert_row(workload.columns, row) for row in (expected, *rows))
    for name, column in workload.columns.items():
        one, other, as_a_whole = (np.asarray(row[name]) for row in (*found, wanted))
        assert one.tobytes() == other.tobytes()
        if isinstance(column, Array | Ragged) and column.dtype.kind == "f":  # its last bits are those of its batch
            np.testing.assert_allclose(one, as_a_whole, rtol=1e-4, atol=1e-5)
        else:
            assert one.tobytes() == as_a_whole.tobytes()
    stages = sorted(path.name for path in (tmp_path / "run" / "parts" / "1").iterdir())
    assert stages[0] == "00000.0.0"
    assert len(stages) >= (2 if case in ("collect", "tree") else 1)


@pytest.mark.nightly
@pytest.mark.model
def test_samples_of_two_items_on_five_tasks_of_which_some_were_killed_are_those_of_one(project, slurmgpu, adder):
    settings = {**SUM, "model": str(adder), "n": 8, "tokens": True}
    folder = project(items=[{"question": "47+85"}, {"question": "12+34"}], batch_size=32, settings=settings)
    text = (folder / "slurmgpu.toml").read_text()
    text = text.replace("workloads.py:Rows", "generate").replace("shard_items = 8\n", "")
    (folder / "slurmgpu.toml").write_text(text)
    submit = ("submit", "--executor", "local", "--gpus", "0", "--tasks")
    for n_tasks, more in ((1, ()), (5, ("--inject", "kill@0,kill@1"))):
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        slurmgpu(*submit, n_tasks, *more, "--run-dir", f"{n_tasks}/run", cwd=folder, expect=0, **env)
    assert Run.open(folder / "5" / "run").plan.parts == 2
    assert report(folder / "5")["worker_deaths"] == {"crash": 2}
    assert datasets(folder / "5") == datasets(folder / "1")
