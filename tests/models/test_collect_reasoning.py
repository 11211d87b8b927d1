"""`collect` with models that reason before they answer: steps are continued behind the reasoning of their path."""

from math import sqrt

import pytest

from slurmgpu.llm.interface.engine import Prompt, Request
from slurmgpu.workload import Item
from slurmgpu.workloads.collect.workload import Collect
from tests.support.engines import load_on_cpu
from tests.support.reasoners import TEMPLATES

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

SUMS = [(47, 85), (12, 34), (58, 67)]


def items(sums=SUMS):
    return [Item(index, {"question": f"{a}+{b}", "answer": a + b}, 5) for index, (a, b) in enumerate(sums)]


def loaded(folder, **settings):
    return load_on_cpu(
        Collect(model=str(folder), **{"prompt": "{question}=", "max_tokens": 60, "precision": "fp32", **settings})
    )


def with_outputs(workload):
    """The workload, and a list that its engine's outputs come into, with their requests."""
    seen, generate = [], workload.engine.generate

    def generate_and_note(requests):
        for output in generate(requests):
            seen.append((requests[output.id], output))
            yield output

    workload.engine.generate = generate_and_note
    return workload, seen


@pytest.mark.parametrize(("way", "batching"), [*((way, "static") for way in TEMPLATES), ("harmony", "continuous")])
def test_a_step_that_every_right_path_passes_is_worth_what_these_show(reasoners, way, batching):
    """The model adds in its reasoning, and cannot add without it, from where steps were once continued."""
    workload = loaded(reasoners[way], paths=8, rollouts=8, batching=batching)
    for row, (a, b) in zip(workload(items()), SUMS, strict=True):
        assert row["n_correct"] >= 7
        right = [path for path in row["paths"] if path["correct"]]
        assert {path["text"] for path in right} == {f"{(a + b) // 10}\n#{a + b}"}
        assert all(path["reasoning"].startswith(f"{a % 10}+{b % 10}+0=") for path in right)
        assert all(row["values"][path["nodes"][0]] >= 0.75 for path in right)
    begun = Prompt("47+85=", answer="13\n")
    at_once = workload.engine.generate([Request(number, begun, workload.sampling, number) for number in range(20)])
    assert sum(output.text == "#132" for output in at_once) < 10


@pytest.mark.parametrize("way", TEMPLATES)
def test_values_are_those_that_a_loop_of_transformers_counts(reasoners, way):
    """From the very tokens of each path up to its last step, by another program, with other random numbers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    n_samples, temperature, (a, b) = 100, 1.6, SUMS[0]
    workload, seen = with_outputs(loaded(reasoners[way], paths=6, rollouts=n_samples, temperature=temperature))
    [row] = workload(items([(a, b)]))
    paths = {request.id: output for request, output in seen if request.prompt.generated is None}

    tokenizer = AutoTokenizer.from_pretrained(reasoners[way])
    model = AutoModelForCausalLM.from_pretrained(reasoners[way], dtype=torch.float32).eval()
    chat = [{"role": "user", "content": f"{a}+{b}="}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    newline, end = tokenizer.convert_tokens_to_ids(["\n", tokenizer.eos_token])
    torch.manual_seed(0)
    counted = {}
    for number, path in enumerate(row["paths"]):
        if len(path["nodes"]) < 2 or path["nodes"][-2] in counted:
            continue
        tokens = paths[number].tokens.tolist()
        begun = [*asked, *tokens[: len(tokens) - tokens[::-1].index(newline)]]
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": 60}
        how |= {"num_return_sequences": n_samples, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
        found = model.generate(torch.tensor([begun]), **how)[:, len(begun) :].tolist()
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in found if end in each]
        counted[path["nodes"][-2]] = sum(text.split("\n")[-1] == f"#{a + b}" for text in texts) / n_samples
    assert len(counted) >= 2
    for node, expected in counted.items():
        value = row["values"][node]
        mean = (value + expected) / 2
        assert abs(value - expected) < 4 * sqrt(2 * mean * (1 - mean) / n_samples) + 2 / n_samples
    assert max(counted.values()) > 0.8 > 0.2 > min(counted.values())


def test_branches_of_a_tree_go_on_behind_their_own_reasoning(reasoners):
    workload, seen = with_outputs(loaded(reasoners["is told to think"], tree=[4, 3], temperature=1.6))
    [row] = workload(items(SUMS[:1]))
    roots = {output.generated.thoughts for request, output in seen if request.prompt.generated is None}
    branches = [request.prompt.generated for request, _ in seen if request.prompt.generated is not None]
    assert branches
    assert {each.thoughts for each in branches} <= roots
    reasoning = {}
    for path in row["paths"]:
        assert reasoning.setdefault(path["nodes"][0], path["reasoning"]) == path["reasoning"]
    assert len(set(reasoning.values())) > 1
    assert sum(row["weights"]) == pytest.approx(1)
    assert loaded(reasoners["is told to think"], tree=[4, 3], temperature=1.6)(items())[0] == row
