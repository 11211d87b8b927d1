"""The built-in workload `generate`: what it refuses, what it asks of an engine, and runs of a model that can add."""

import csv
import json
import math
import random
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Output
from slurmgpu.loader.settings import ELSEWHERE, OF_RUN_FILE, names_of_settings
from slurmgpu.run.directory import Run
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item, Share
from slurmgpu.workloads import progress
from slurmgpu.workloads.generate.workload import Generate
from slurmgpu.workloads.progress import Progress
from tests.support.engines import load_on_cpu
from tests.support.runs import datasets, report
from tests.support.tiny_models import make_llama, sum_steps

FP32 = {"precision": "fp32"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def sums(n, seed=0):
    rng = random.Random(seed)
    return [{"id": f"q{i}", "a": rng.randint(10, 99), "b": rng.randint(10, 99)} for i in range(n)]


# Settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"prompt": None}, "neither is set"),
        ({"prompt": "{a}+{"}, "prompt: found '{' in line 1; expected a field"),
        ({"n": 0}, "n is 0; expected at least 1 answer for each item."),
        ({"n": 4}, "n = 4 answers with temperature = 0 would all be the same"),
        ({"temperature": -1.0}, "temperature is -1.0; expected at least 0."),
        ({"top_p": 0.0}, "top_p is 0.0; expected more than 0 and at most 1."),
        ({"temperature": float("nan")}, "temperature is nan; expected at least 0."),
        ({"temperature": float("inf")}, "temperature is inf; expected at least 0."),
        ({"top_p": float("nan")}, "top_p is nan; expected more than 0 and at most 1."),
        ({"max_tokens": 0}, "max_tokens is 0; expected at least 1."),
        (
            {"max_tokens": 2048},
            "max_tokens is 2048, and prompt and answer must fit the model's context of 2048 tokens",
        ),
        (
            {"max_tokens": 80, "max_context": 64},
            "max_tokens is 80, and prompt and answer must fit max_context of 64 tokens",
        ),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"chat_options": {"tokenize": True}}, "chat_options has 'tokenize', which slurmgpu sets itself"),
        ({"precision": "int8"}, "precision is 'int8'; expected one of 'bf16', 'fp16', 'fp32'."),
        ({"engine": "llama.cpp"}, "engine is 'llama.cpp'; expected one of 'transformers', 'vllm', 'server'."),
        ({"model": "./nowhere"}, "there is no folder './nowhere'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(nothing, settings, sentence):
    with pytest.raises(SlurmGPUError) as raised:
        Generate(**{"model": nothing, "prompt": "{a}", **settings}).place(Share(0))
    assert sentence in str(raised.value)


@pytest.mark.parametrize(("n", "n_items"), [(1, 128), (16, 128), (64, 32), (5000, 1)])
def test_a_call_has_at_most_so_many_answers(nothing, n, n_items):
    assert Generate(model=nothing, prompt="{a}", n=n, temperature=1.0).batch_size == n_items


def test_planning_refuses_in_a_sentence_and_imports_no_torch(nothing, tmp_path):
    (tmp_path / "items.csv").write_text("question,id\nwhy?,1\n")
    settings = f'[settings]\nmodel = "{nothing}"\nprompt = "{{question}}"\n'
    cases = [
        ("", '["text", "n_prompt_tokens", "n_tokens", "finish_reason"]'),
        ('keep = ["idd"]\n', "takes the field 'idd', which "),
        ('schema = {properties = {sum = {type = "integer"}}, required = ["sum"]}\n', '"finish_reason", "sum"]'),
        ("max_token = 3\n", "has no setting 'max_token'. Did you mean 'max_tokens'?"),
        ('dtype = "float16"\n', "generate has no setting 'dtype'. Here it is called 'precision'."),
        ("max_new_tokens = 3\n", "Here it is called 'max_tokens'."),
        ("tensor_parallel_size = 2\n", "Here it is called 'gpus_per_task'. gpus_per_task is a key of [resources]"),
        ('max_tokens = "3"\n', "setting 'max_tokens' should be a valid integer; found '3'."),
        ("top_p = 2.0\n", "top_p is 2.0; expected more than 0 and at most 1."),
        ('system = "file:nowhere.txt"\n', "system is 'file:nowhere.txt', but "),
    ]
    code = """
import json, sys
from slurmgpu.errors import SlurmGPUError
from slurmgpu.plan.planner import Path, draft_run
found = []
for path in sys.argv[1:]:
    try:
        with draft_run(Path(path), {"resources": {"gpus": 0}}) as draft:
            found.append(json.dumps(list(draft.plan.columns)))
    except SlurmGPUError as error:
        found.append(str(error))
print(json.dumps([found, sorted({name.split(".")[0] for name in sys.modules})]))
"""
    for number, (line, _) in enumerate(cases):
        (tmp_path / f"{number}.toml").write_text(f'input = "items.csv"\nworkload.use = "generate"\n{settings}{line}')
    files = [tmp_path / f"{number}.toml" for number in range(len(cases))]
    done = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True)
    found, modules = json.loads(done.stdout)
    for (_, sentence), said in zip(cases, found, strict=True):
        assert sentence in said
    assert not {"torch", "transformers", "tokenizers", "huggingface_hub", "vllm"} & set(modules)


def test_names_of_other_programs_are_none_of_ours():
    known = {*names_of_settings(Generate), *OF_RUN_FILE}
    assert known >= ELSEWHERE.keys()
    assert not known & {word for words in ELSEWHERE.values() for word in words.split()}


def test_a_bad_setting_ends_submit_with_exit_code_2(nothing, project, slurmgpu):
    folder = project(2, workload="Rows", settings={"model": nothing, "prompt": "{text}", "n": 2})
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "generate"))
    done = slurmgpu("submit", "--gpus", "0", cwd=folder, expect=2)
    assert "would all be the same; set temperature, or n = 1." in done.stderr
    assert not (folder / "run").exists()


def test_a_folder_that_changes_after_planning_ends_the_run_and_a_merge_needs_no_model(tmp_path, project, slurmgpu):
    model = make_llama(tmp_path / "model")
    settings = {"model": str(model), "prompt": "{text}", "max_tokens": 2, **FP32}
    folder = project(4, batch_size=2, shard_items=2, settings=settings)
    text = (folder / "slurmgpu.toml").read_text().replace("workloads.py:Rows", "generate")
    (folder / "slurmgpu.toml").write_text(text)
    slurmgpu("submit", "--executor", "debug", "--gpus", "0", cwd=folder, expect=0, **ONE_THREAD)
    summary = report(folder)["summary"]
    assert summary["n_answers"] == 4

    for name in ("shards/00001.h5", "merged.h5"):  # a merge would take its rows from there
        (folder / "run" / name).unlink()
    make_llama(model, seed=1)
    said = slurmgpu("resubmit", "run", "--executor", "debug", cwd=folder, expect=None, **ONE_THREAD)
    assert "planned: model.safetensors is changed." in said.stdout + said.stderr
    assert report(folder)["failures"] == {"workload_error": 1}
    assert report(folder)["n_missing_items"] == 2

    shutil.rmtree(model)
    slurmgpu("merge", "run", cwd=folder, expect=3, **ONE_THREAD)
    assert report(folder)["summary"]["n_answers"] == 2


def test_a_prompt_from_a_file_is_frozen_in_the_plan(nothing, project, slurmgpu):
    folder = project(2, settings={"model": nothing, "prompt": "file:prompt.txt"})
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "generate"))
    (folder / "prompt.txt").write_text("Säg {text}:\n", encoding="utf-8-sig")  # as editors on Windows write it
    plan = json.loads(slurmgpu("submit", "--gpus", "0", "--dry-run", "--json", cwd=folder, expect=0).stdout)["plan"]
    assert plan["settings"]["prompt"] == "Säg {text}:"
    assert plan["summarizes"] is True
    told = slurmgpu("submit", "--gpus", "0", "--dry-run", cwd=folder, expect=0).stdout
    assert '"prompt": "Säg {text}:"' in " ".join(told.split())
    assert plan["settings"]["model_files"]
    assert "model_files" not in told


@pytest.mark.parametrize("given", [None, "2024-07-26"])
def test_the_date_that_a_chat_template_writes_is_frozen_in_the_plan(nothing, given):
    said = {} if given is None else {"date": given}
    workload = Generate(model=nothing, prompt="{text}", **said)
    assert "date" not in workload.frozen_settings
    template = "{{ strftime_now('%Y') }}{{ messages[0].content }}"
    (Path(nothing) / "chat_template.jinja").write_text(template)
    before = date.today()
    frozen = workload.frozen_settings
    assert given is not None or before <= date.fromisoformat(frozen["date"]) <= date.today()
    assert given is None or "date" not in frozen  # which is among the settings
    assert Generate(model=nothing, prompt="{text}", **{**said, **frozen}).options.date == frozen.get("date", given)


@pytest.mark.parametrize("wrong", ["26.7.2024", "2024-7-26", "2024-02-30"])
def test_what_is_no_day_is_refused(nothing, wrong):
    with pytest.raises(SlurmGPUError, match=f"^date is '{wrong}'; expected a day such as"):
        Generate(model=nothing, prompt="{text}", date=wrong)


# Rows


class Parrot:
    """An engine that says what it was asked, backwards in order; some answers fail, or are missing."""

    def __init__(self, failing=(), missing=()):
        self.failing, self.missing, self.asked = failing, missing, []

    def generate(self, requests):
        for request in reversed(requests):
            self.asked.append(request)
            if request.id in self.missing:
                continue
            text = f"{request.prompt.text}.{request.id}"
            error = "too long" if request.id in self.failing else None
            told = {"tokens": np.arange(len(text), dtype=np.int32), "logprobs": np.zeros(len(text), np.float32)}
            yield Output(request.id, text, "hm", **told, n_prompt_tokens=7, finish_reason="length", error=error)


def test_rows_have_exactly_the_columns_whatever_was_asked_for(nothing):
    everything = {"tokens": True, "logprobs": True, "keep_reasoning": True, "temperature": 1.0}
    for n in (1, 3):
        workload = Generate(model=nothing, prompt="{a}", n=n, **everything)
        workload.engine = Parrot(failing=[n], missing=[2 * n])
        items = [Item(i, {"a": i}) for i in (5, 6, 7, 8)]
        rows = workload([*items, Item(9, {"b": 1})])
        assert [isinstance(row, ItemError) for row in rows] == [False, True, True, False, True]
        assert [str(rows[i]) for i in (1, 2)] == ["too long", "the engine gave no answer"]
        assert str(rows[4]).startswith("no field 'a'")
        stored = convert_row(workload.columns, rows[3])
        last = [f"8.{3 * n + sample}" for sample in range(n)]
        assert rows[3]["text"] == (last[0] if n == 1 else last)
        assert len(stored["tokens"]) == len(stored["logprobs"]) == stored["n_tokens"].sum() == sum(map(len, last))
        assert stored["n_prompt_tokens"] == 7


def test_who_watches_is_told_how_many_answers_there_are_also_in_the_middle_of_a_batch(nothing, monkeypatch):
    told = []
    monkeypatch.setattr(progress, "TELL_S", math.inf)
    workload = Generate(model=nothing, prompt="{a}", n=2, temperature=1.0)
    workload.engine, workload._told_answers = Parrot(missing=[0]), Progress(told.append, "answers")
    workload([Item(i, {"a": i}) for i in range(3)])
    assert told == ["5 answers"]
    workload([Item(9, {"b": 1})])
    assert told == ["5 answers"]
    monkeypatch.setattr(progress, "TELL_S", 0.0)
    workload([Item(i, {"a": i}) for i in range(2)])
    assert told[1:] == ["6 answers", "7 answers", "8 answers"]


def test_a_samples_key_depends_on_item_and_sample_alone(nothing):
    workload = Generate(model=nothing, prompt="{a}", n=2, temperature=1.0)
    keys = []
    for batch in ([3, 4], [4, 3], [3], [4]):
        workload.engine = Parrot()
        workload([Item(i, {"a": i}, run_seed=1) for i in batch])
        keys.append({(request.prompt.text, request.id % 2): request.key for request in workload.engine.asked})
    assert keys[0] == keys[1] == keys[2] | keys[3]
    assert len(set(keys[0].values())) == 4


# What a model that can add says


def loaded(**settings):
    return load_on_cpu(Generate(**{**FP32, **settings}))


@pytest.mark.model
def test_a_model_that_can_add_adds(adder):
    workload = loaded(model=str(adder), prompt="{a}+{b}=", max_tokens=32, tokens=True, logprobs=True)
    items = [Item(i, data) for i, data in enumerate(sums(64))]
    rows = workload(items)
    wanted = [sum_steps(item.data["a"], item.data["b"]) for item in items]
    assert np.mean([row["text"] == text for row, text in zip(rows, wanted, strict=True)]) > 0.95
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert all(len(row["logprobs"]) == row["n_tokens"] == len(row["text"]) + 1 for row in rows)  # a character each
    chat = loaded(model=str(adder), messages="chat", max_tokens=32)
    [answer] = chat([Item(0, {"chat": [{"role": "user", "content": "47+85="}]})])
    assert answer["text"].endswith("#132")
    begun = [{"role": "user", "content": "47+85="}, {"role": "assistant", "content": answer["text"][:5]}]
    going_on = loaded(model=str(adder), messages="chat", last="continue", max_tokens=32)
    [rest] = going_on([Item(0, {"chat": begun})])
    assert begun[1]["content"] + rest["text"] == answer["text"]


@pytest.mark.model
def test_stop_and_max_tokens_end_an_answer(adder):
    item = Item(0, {"a": 47, "b": 85})
    [stopped] = loaded(model=str(adder), prompt="{a}+{b}=", stop=["\n"])([item])
    assert (stopped["text"], stopped["finish_reason"]) == ("7+5+0=12", "stop")
    [cut] = loaded(model=str(adder), prompt="{a}+{b}=", max_tokens=3)([item])
    assert (cut["text"], cut["finish_reason"], cut["n_tokens"]) == ("7+5", "length", 3)


@pytest.mark.model
def test_a_small_input_has_the_same_samples_on_one_task_and_cut_for_four(project, slurmgpu, nothing):
    settings = {"model": nothing, "prompt": "{a}+{b}=", "max_tokens": 8, "temperature": 1.0, "n": 2, **FP32}
    folder = project(items=sums(10), batch_size=128, settings={**settings, "tokens": True})
    text = (folder / "slurmgpu.toml").read_text()
    text = text.replace("workloads.py:Rows", "generate").replace("shard_items = 8\n", "")
    (folder / "slurmgpu.toml").write_text(text)
    found = []
    for n_tasks in (1, 4):
        words = ("submit", "--executor", "debug", "--gpus", "0", "--tasks", n_tasks, "--run-dir", f"{n_tasks}/run")
        slurmgpu(*words, cwd=folder, expect=0, **ONE_THREAD)
        assert Run.open(folder / f"{n_tasks}/run").plan.n_shards == n_tasks
        rows = datasets(folder / str(n_tasks))
        found.append({name: rows[name] for name in rows if name.startswith(("tokens", "text"))})
    assert found[0] == found[1] != {}


@pytest.mark.nightly
@pytest.mark.model
def test_samples_are_the_same_with_one_task_with_two_and_after_a_kill(project, slurmgpu, adder):
    settings = {"model": str(adder), "prompt": "{a}+{b}=", "max_tokens": 16, "temperature": 1.5, "n": 2, **FP32}
    folder = project(items=sums(48), batch_size=8, settings={**settings, "tokens": True, "keep": ["id"]}, seed=3)
    text = (folder / "slurmgpu.toml").read_text()
    (folder / "slurmgpu.toml").write_text(text.replace("workloads.py:Rows", "generate"))
    submit = ("submit", "--executor", "local", "--gpus", "0")
    shown = slurmgpu(*submit, "--tasks", "1", "--run-dir", "one/run", cwd=folder, expect=0, **ONE_THREAD).stdout
    kills = ("--tasks", "2", "--inject", "kill@3,kill@20")
    slurmgpu(*submit, *kills, "--run-dir", "two/run", cwd=folder, expect=0, **ONE_THREAD)
    assert datasets(folder / "one") == datasets(folder / "two")

    # What the report and an export have of it.
    slurmgpu("export", "one/run", "--format", "csv", "-o", "out.csv", cwd=folder, expect=0)
    rows = list(csv.DictReader((folder / "out.csv").open()))
    assert [row["id"] for row in rows] == [f"q{i}" for i in range(48)]
    texts, lengths = ([json.loads(row[name]) for row in rows] for name in ("text", "n_tokens"))
    assert any(first != second for first, second in texts)
    assert all(len(json.loads(row["tokens"])) == sum(pair) for row, pair in zip(rows, lengths, strict=True))
    flat = [length for pair in lengths for length in pair]
    assert max(flat) == 16
    n_cut = sum(json.loads(row["finish_reason"]).count("length") for row in rows)
    assert n_cut > 80  # right answers are longer
    assert f"{n_cut} of 96 answers were cut at max_tokens = 16, and lack their end." in shown
    assert report(folder / "one")["summary"]["tokens_per_answer"] == pytest.approx(sum(flat) / 96)
