"""The engine on vLLM, the real one, built for CPUs: `make test-vllm`."""

import json
import os
import random
import re

import numpy as np
import pytest

import slurmgpu
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Passage, Prompt, Question, Request, Sampling
from slurmgpu.llm.prompts.structures import structure_of
from slurmgpu.llm.vllm_engine import engine as vllm_engine
from slurmgpu.llm.vllm_engine import node as vllm_node
from slurmgpu.util.shared_memory import FOLDER
from slurmgpu.workload import Item, Share
from slurmgpu.workloads import language_model
from slurmgpu.workloads.classify.workload import Classify
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.generate.workload import Generate
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.score.workload import Score
from tests.gpu.findings import HELD
from tests.support.byte_models import THINKING, make_byte_llama
from tests.support.engines import by_id, load_on_cpu, texts, tokens_of
from tests.support.runs import kill_workers, published, wait_until, workers
from tests.support.tiny_heads import make_head
from tests.support.tiny_models import make_llama, make_qwen3, sentence, sum_steps
from tests.vllm.conftest import open_on_cpu

SUMS = {
    "prompt": "{question}?{final}",
    "pattern": "^([YN])$",
    "max_tokens": 40,
    "measure": "accuracy",
    "verdicts": {"correct": "Y", "incorrect": "N"},
    "values": {"correct": 1, "incorrect": 0},
}


def requests_of(prompts, **sampling):
    return [
        Request(number, Prompt(text), Sampling(**{"max_tokens": 4 + number % 30, **sampling}), key=2**62 + number)
        for number, text in enumerate(prompts)
    ]


def sums(n, seed=0):
    rng = random.Random(seed)
    return [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(n)]


# The engine


@pytest.mark.parametrize("sampling", [{}, {"stop": ("a", "3")}, {"logprobs": True}, {"logprobs": True, "stop": ("e",)}])
def test_greedy_answers_are_those_of_the_other_engine(vllm, reference, sampling):
    asked = requests_of([*texts(24), *(f"{a}+{b}=" for a, b in sums(8))], **sampling)
    expected = by_id(reference.generate(asked))
    for found in vllm.generate(asked):
        wanted = expected[found.id]
        assert (found.text, found.finish_reason, found.error) == (wanted.text, wanted.finish_reason, None)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.n_prompt_tokens == wanted.n_prompt_tokens
        if "logprobs" in sampling:
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
        else:
            assert found.logprobs is None


def test_a_special_token_that_is_a_stop_text_ends_what_is_computed(monkeypatch, vllm):
    arguments_of, generate, n_computed = vllm._sampling_arguments, vllm._generate, []

    def with_a_special_token(encoded):
        return {**arguments_of(encoded), "allowed_token_ids": [3, *range(5, 18)]}  # 3 is <unk>

    def counted(*given, **more):
        outputs = generate(*given, **more)
        n_computed.extend(len(output.outputs[0].token_ids) for output in outputs)
        return outputs

    monkeypatch.setattr(vllm, "_sampling_arguments", with_a_special_token)
    monkeypatch.setattr(vllm, "_generate", counted)
    found = list(vllm.generate(requests_of(texts(8), max_tokens=60, temperature=2.0, stop=("<unk>",))))
    assert "stop" in {output.finish_reason for output in found}
    assert sorted(n_computed) == sorted(len(output.tokens) for output in found)


@pytest.mark.parametrize(
    ("choices", "n_ways"), [(("a", "b"), 1), (("1", "12", "123", "ab", "ac"), 1), (("yes", "yes", "no", " no"), 2)]
)
def test_its_scores_are_those_of_the_other_engine(vllm, reference, choices, n_ways):
    questions = [Question(number, Prompt(text), choices, n_ways) for number, text in enumerate(texts(8, seed=1))]
    expected = by_id(reference.score(questions))
    for found in vllm.score(questions):
        np.testing.assert_allclose(found.logprobs, expected[found.id].logprobs, atol=1e-4)
        assert found.n_tokens.tolist() == expected[found.id].n_tokens.tolist()
        assert found.error is None


def test_more_choices_than_vllm_allows_are_asked_for_in_parts(monkeypatch, vllm, reference):
    monkeypatch.setattr(vllm_engine, "MOST_LOGPROB_TOKENS", 3)
    [question] = [Question(0, Prompt("1+1="), tuple("abcdefgh"))]
    [found], [expected] = (list(each.score([question])) for each in (vllm, reference))
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_the_probabilities_of_a_texts_tokens_are_those_of_the_other_engine(vllm, reference):
    passages = [Passage(number, Prompt(text)) for number, text in enumerate(texts(8, seed=2))]
    passages += [Passage(8, Prompt("12+3=", answer="15")), Passage(9, Prompt("a" * 3000)), Passage(10, Prompt(""))]
    expected = by_id(reference.likelihoods(passages))
    for found in vllm.likelihoods(passages):
        wanted = expected[found.id]
        assert found.error == wanted.error
        assert found.tokens.tolist() == wanted.tokens.tolist()
        # What is longer than the context is read in windows, which are two tokens shorter here.
        n_same = min(len(wanted.logprobs), 2040)
        np.testing.assert_allclose(found.logprobs[:n_same], wanted.logprobs[:n_same], atol=1e-4)


def test_a_sample_depends_on_its_key_alone(vllm):
    asked = requests_of(texts(12, seed=2), temperature=1.3, top_p=0.95)
    together = tokens_of(vllm.generate(asked))
    assert len({tuple(tokens) for tokens in together.values()}) > len(asked) // 2
    assert tokens_of(vllm.generate(random.Random(1).sample(asked, len(asked)))) == together
    alone = {}
    for request in asked[:4]:
        alone |= tokens_of(vllm.generate([request]))
    assert alone == {number: together[number] for number in alone}
    others = tokens_of(vllm.generate([Request(each.id, each.prompt, each.sampling, each.key + 1000) for each in asked]))
    assert others != together


def test_what_fails_is_the_error_of_its_request(vllm):
    asked = [
        Request(0, Prompt("1" * 2000), Sampling(max_tokens=300)),
        Request(1, Prompt("half a surrogate \ud800"), Sampling(max_tokens=2)),
        Request(2, Prompt("1"), Sampling(max_tokens=2, temperature=2.5)),
        Request(3, Prompt("1"), Sampling(max_tokens=2, temperature=0.005)),
        Request(4, Prompt("1"), Sampling(max_tokens=2)),
    ]
    found = {output.id: output.error for output in vllm.generate(asked)}
    assert "exceeds the context of 2048 tokens" in found[0]
    assert "half of a surrogate pair" in found[1]
    assert found[2] == "temperature is 2.5; expected 0, or 0.01 to 2, for vLLM"
    assert found[3] == "temperature is 0.005; expected 0, or 0.01 to 2, for vLLM"
    assert found[4] is None
    scores = by_id(vllm.score([Question(0, Prompt("1" * 2100), ("a", "b")), Question(1, Prompt("1"), ("a", "b"))]))
    assert "exceeds" in scores[0].error
    assert scores[1].error is None


# The workloads


def loaded(monkeypatch, engine, make, folder, name="vllm", **settings):
    """A workload with an engine that is open already."""
    workload = make(model=str(folder), engine=name, precision="fp32", **settings)
    assert workload.place(Share(0)).processes == "one"
    monkeypatch.setattr(language_model, "open_engine", lambda options, place: engine)
    load_on_cpu(workload)
    return workload


def both(monkeypatch, vllm, reference, make, folder, data, **settings):
    """The rows of a workload by vLLM and by the other engine."""
    items = [Item(index, each, 5) for index, each in enumerate(data)]
    for engine, name in ((vllm, "vllm"), (reference, "transformers")):
        yield loaded(monkeypatch, engine, make, folder, name, **settings)(items)


def test_generate_writes_the_rows_of_the_other_engine(monkeypatch, vllm, reference, wide_adder):
    data = [{"a": a, "b": b} for a, b in sums(12)] + [{"a": 1}]
    settings = {"prompt": "{a}+{b}=", "max_tokens": 40, "tokens": True}
    found, expected = both(monkeypatch, vllm, reference, Generate, wide_adder, data, **settings)
    assert [row["text"] for row in found[:12]] == [sum_steps(each["a"], each["b"]) for each in data[:12]]
    for row, wanted in zip(found[:12], expected, strict=False):
        assert row.pop("tokens").tolist() == wanted.pop("tokens").tolist()
        assert row == wanted
    assert isinstance(found[12], ItemError)


def test_classify_gives_the_labels_and_probabilities_of_the_other_engine(monkeypatch, vllm, reference, wide_adder):
    rng = random.Random(3)
    data = [{"text": sentence(rng)[0]} for _ in range(16)]
    settings = {"prompt": ":{text}", "labels": ["hate", "ok"]}
    found, expected = both(monkeypatch, vllm, reference, Classify, wide_adder, data, **settings)
    assert [row["label"] for row in found] == [row["label"] for row in expected]
    assert {row["label"] for row in found} == {"hate", "ok"}
    for row, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(row["scores"], wanted["scores"], atol=1e-4)


def test_judge_gives_the_verdicts_of_the_other_engine(monkeypatch, vllm, reference, wide_adder):
    data = [{"question": f"{a}+{b}", "text": f"it is {a + b + number % 2}"} for number, (a, b) in enumerate(sums(16))]
    settings = {"rubric": SUMS, "final": "numeric", "retries": 0}
    found, expected = both(monkeypatch, vllm, reference, Judge, wide_adder, data, **settings)
    assert found == expected
    assert {row["verdict"] for row in found} == {"correct", "incorrect"}


def test_collect_depends_on_item_and_seed_alone_and_values_right_steps_more(monkeypatch, vllm, wide_adder):
    data = [{"question": f"{a}+{b}", "answer": a + b} for a, b in sums(6)]
    items = [Item(index, each, 5) for index, each in enumerate(data)]
    settings = {"prompt": "{question}=", "temperature": 1.6, "max_tokens": 40, "paths": 4, "rollouts": 4}
    workload = loaded(monkeypatch, vllm, Collect, wide_adder, **settings)
    rows = workload(items)
    assert [row for item in reversed(items[:2]) for row in workload([item])] == [rows[1], rows[0]]
    right, wrong = [], []
    for each, row in zip(data, rows, strict=True):
        wanted = sum_steps(*map(int, each["question"].split("+"))).split("\n")
        for path in row["paths"]:
            for n_steps, node in enumerate(path["nodes"], 1):
                (right if path["steps"][:n_steps] == wanted[:n_steps] else wrong).append(row["values"][node])
    assert np.mean(right) > np.mean(wrong) + 0.4


def test_a_process_reward_model_scores_the_steps_of_its_paths_beside_it(monkeypatch, vllm, wide_adder, tmp_path):
    head = str(make_head(tmp_path, task="TokenClassification"))
    [(a, b)] = sums(1)
    settings = {"precision": "fp32", "activation": "none"}
    asked = {"prompt": "{question}=", "temperature": 1.6, "max_tokens": 40, "paths": 4}
    workload = loaded(monkeypatch, vllm, Collect, wide_adder, scorer={"model": head, **settings}, **asked)
    [row] = workload([Item(0, {"question": f"{a}+{b}", "answer": a + b}, 5)])
    alone = load_on_cpu(Score(model=head, prompt="{q}=", steps="s", **settings))
    for path, score in zip(row["paths"], row["scores"], strict=True):
        [wanted] = alone([Item(0, {"q": f"{a}+{b}", "s": path["steps"]})])
        assert score == pytest.approx(wanted["score"], abs=1e-4)


# Runs


RUN = """
input = "items.jsonl"
shard_items = 4
run_dir = "run"
html = false
lease_s = 4.0
margin_s = 1.0

[workload]
use = "generate"
batch_size = 4

[settings]
model = "{model}"
engine = "vllm"
precision = "fp32"
prompt = "{{a}}+{{b}}="
temperature = 1.0
max_tokens = 40
n = 2
"""


def test_a_run_whose_worker_is_killed_has_the_rows_that_another_process_has(
    monkeypatch, vllm, calls, tmp_path, wide_adder
):
    (tmp_path / "slurmgpu.toml").write_text(RUN.format(model=wide_adder))
    data = [{"a": a, "b": b} for a, b in sums(40)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in data))
    killed = calls.start("submit", "--executor", "local", "--gpus", "0", "--tasks", "1", cwd=tmp_path)
    wait_until(lambda: len(published(tmp_path)) > 1, "two shards")
    assert kill_workers(tmp_path) == 1
    said, _ = killed.communicate(timeout=300)
    assert killed.returncode == 0, said
    assert not workers(tmp_path)
    settings = {"prompt": "{a}+{b}=", "temperature": 1.0, "max_tokens": 40, "n": 2}
    workload = loaded(monkeypatch, vllm, Generate, wide_adder, **settings)
    items = [Item(index, each) for index, each in enumerate(data)]
    expected = [row for first in range(0, len(items), 4) for row in workload(items[first : first + 4])]
    with slurmgpu.open(tmp_path / "run" / "merged.h5") as merged:
        found = merged.rows()
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert set(row) == {"index", *wanted}
        for name, value in wanted.items():
            np.testing.assert_array_equal(row[name], value)


# With engines of their own: one that is closed ends the one above


def test_structured_answers_are_those_of_the_other_engine_behind_any_reasoning(tmp_path):
    folder = make_byte_llama(tmp_path / "bytes", THINKING, n_heads=2)
    schema = {
        "type": "object",
        "properties": {
            "sum": {"type": "integer", "minimum": 0, "maximum": 999},
            "why": {"type": "string", "maxLength": 5},
            "ok": {"type": "boolean"},
        },
        "required": ["sum", "why", "ok"],
    }
    structures = [
        structure_of(schema=schema),
        structure_of(choices=["yes", "no"]),
        structure_of(regex="[0-9]{2}-[a-z]+"),
    ]
    structures.append(structure_of(grammar='start: "a" b\nb: "b"+ "c"\n'))
    asked = [
        Request(number, Prompt(f"{number}+1="), Sampling(max_tokens=90, structure=structures[number % 4]))
        for number in range(16)
    ]
    found = {}
    for engine in ("transformers", "vllm"):
        opened = open_on_cpu(engine, folder, batching="static")
        found[engine] = by_id(opened.generate(asked))
        opened.close()
    ends = {number: output.finish_reason for number, output in found["transformers"].items()}
    assert {number: output.finish_reason for number, output in found["vllm"].items()} == ends
    assert tokens_of(found["vllm"].values()) == tokens_of(found["transformers"].values())
    answered = [output for number, output in found["vllm"].items() if ends[number] == "stop"]
    assert {asked[output.id].sampling.structure.kind for output in answered} >= {"schema", "choices", "regex"}
    assert any(output.reasoning for output in found["vllm"].values())
    for output in answered:
        kind, text = asked[output.id].sampling.structure.kind, output.text
        assert kind != "schema" or json.loads(text).keys() == schema["properties"].keys()
        assert kind != "choices" or text in ("yes", "no")
        assert kind != "regex" or re.fullmatch("[0-9]{2}-[a-z]+", text)
        assert kind != "grammar" or re.fullmatch("ab+c", text)


def test_every_token_that_ends_an_answer_by_config_json_ends_it(tmp_path, reference):
    """vLLM knows the tokenizer's only."""
    folder = make_llama(tmp_path / "llama", head_dim=32, eos_token_id=[2, 7, 11, 13])
    (folder / "generation_config.json").unlink()
    asked = requests_of(texts(10, seed=4), max_tokens=60)
    expected = by_id(open_on_cpu("transformers", folder, batching="static").generate(asked))
    opened = open_on_cpu("vllm", folder)
    found = by_id(opened.generate(asked))
    opened.close()
    assert {number: each.tolist() for number, each in ((n, o.tokens) for n, o in found.items())} == {
        number: output.tokens.tolist() for number, output in expected.items()
    }
    assert {output.tokens[-1] for output in found.values()} & {7, 11, 13}


def test_a_context_that_the_cache_has_no_room_for_is_shortened_or_refused_in_a_sentence(tmp_path, caplog):
    """A context of a quarter of a million tokens, of 512 bytes each and layer, does not fit 64 MiB."""
    folder = make_qwen3(tmp_path / "qwen", head_dim=32, num_hidden_layers=1, max_position_embeddings=1 << 18)
    with pytest.raises(SlurmGPUError, match=r"a KV cache of max_context = 200000 tokens.*Reduce max_context"):
        open_on_cpu("vllm", folder, max_context=200_000)
    opened = open_on_cpu("vllm", folder)
    assert 2048 < opened._codec.context < 200_000
    assert f"room for a context of {opened._codec.context} tokens" in caplog.text
    asked = requests_of(texts(4))
    found = tokens_of(opened.generate(asked))
    opened.close()
    assert found == tokens_of(open_on_cpu("transformers", folder, batching="static").generate(asked))


SPLIT = """
import os, signal, sys, tempfile
from tests.vllm.conftest import open_on_cpu
from slurmgpu.llm.interface.engine import Prompt, Request, Sampling
from slurmgpu.util.shared_memory import used_by

os.setsid()
tempfile.tempdir = None  # it is the one of TMPDIR
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else both processes compile how they look up embeddings
engine = open_on_cpu("vllm", sys.argv[1], gpus=2)
asked = [Request(n, Prompt(text), Sampling(max_tokens=40)) for n, text in enumerate(sys.argv[3:])]
for output in sorted(engine.generate(asked), key=lambda output: output.id):
    print("answer", output.text.replace("\\n", "|"), flush=True)
print("uses", *used_by(os.getpid()), flush=True)
if sys.argv[2] == "kill":
    os.kill(0, signal.SIGKILL)  # as a task ends its worker: with all that it has started
engine.close()
"""


def split(calls, tmp_path, folder, how):
    """What a model in two processes answers, and what stays of its shared memory when it is ended."""
    asked = [f"{a}+{b}=" for a, b in sums(4)]
    done = calls.code(SPLIT, folder, how, *asked, expect=None, TMPDIR=str(tmp_path))
    found = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert found == [sum_steps(a, b).replace("\n", "|") for a, b in sums(4)], done.stderr[-4000:]
    [used] = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("uses ")]
    assert used
    return {*used} & {*os.listdir(FOLDER)}


def test_a_split_model_says_the_same_and_what_it_leaves_when_killed_is_removed_by_the_next(
    monkeypatch, calls, tmp_path, wide_adder
):
    left = split(calls, tmp_path, wide_adder, "kill")
    assert any(name.startswith("psm_") for name in left)
    monkeypatch.setattr(vllm_node.tempfile, "tempdir", str(tmp_path))
    vllm_node.NodePlace().close()
    assert not left & set(os.listdir(FOLDER))


@pytest.mark.nightly
def test_a_split_model_that_is_closed_leaves_no_shared_memory(calls, tmp_path, wide_adder):
    assert not split(calls, tmp_path, wide_adder, "close")


FAILING = """
import sys
from tests.vllm.conftest import open_on_cpu
from slurmgpu.errors import WorkerBrokenError
from slurmgpu.llm.interface.engine import Prompt, Request, Sampling

engine = open_on_cpu("vllm", sys.argv[1])
executor = engine._llm.llm_engine.engine_core.engine_core.model_executor

def fail(*_, **more):
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

executor.execute_model = fail
try:
    list(engine.generate([Request(0, Prompt("47+85="), Sampling(max_tokens=4))]))
except WorkerBrokenError as error:
    print(error)
"""


def test_a_step_that_fails_ends_the_worker_as_vllm_would_never_end_another_call(calls, wide_adder):
    done = calls.code(FAILING, wide_adder)
    said = "vLLM failed, and cannot continue: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    assert said in done.stdout, done.stderr[-4000:]


FINDING = """
import sys
from pathlib import Path
from tests.gpu.findings import Machine
from tests.gpu.llm import vllm_answers_as_fp32
from tests.gpu.part import run

print(run(vllm_answers_as_fp32, Machine("cpu", 0, Path(sys.argv[1])))[0])
"""


def test_the_finding_of_the_proof_on_a_gpu_runs_on_a_cpu(calls, tmp_path):
    done = calls.code(FINDING, tmp_path)
    assert f"'verdict': '{HELD}'" in done.stdout, done.stdout
