"""A judge's prompts: Jinja, examples, images, texts that are too long, and answers that are kept to a form."""

import json
from pathlib import Path

import numpy as np
import pytest

from slurmgpu import results
from slurmgpu.errors import SlurmGPUError
from slurmgpu.llm.engines import open_engine
from slurmgpu.llm.interface.engine import Composed, EngineOptions, Place, Prompt, Question, Request, Sampling
from slurmgpu.llm.models.source import find_model
from slurmgpu.shards.columns import convert_row
from slurmgpu.workload import Item, Share
from slurmgpu.workloads.judge.orders import shares_of
from slurmgpu.workloads.judge.rubrics import read_rubric
from slurmgpu.workloads.judge.workload import Judge
from tests.support.engines import Says, load_on_cpu
from tests.support.runs import report
from tests.support.tiny_models import make_llama
from tests.support.tiny_vision_models import make_llava, make_png

pytestmark = pytest.mark.usefixtures("one_thread")

SUMS = {
    "prompt": "{question}?{text}",
    "pattern": "^([YN])$",
    "max_tokens": 12,
    "verdicts": {"right": "Y", "wrong": "N"},
    "values": {"right": 1, "wrong": 0},
    "fallback": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a random model."""
    return str(make_llama(tmp_path_factory.mktemp("model")))


def asked_by(llama, items, **settings):
    """The prompts of a judge, and its rows."""
    judge = Judge(model=llama, **{"rubric": SUMS, "retries": 0, **settings})
    judge.judging.engine = Says("Y", lambda request: request.id)
    rows = judge(items)
    for row in rows:
        convert_row(judge.columns, row)
    return [request.prompt for request in judge.judging.engine.asked], rows


def test_a_rubric_may_be_written_in_jinja_and_its_plan_says_so(llama, tmp_path):
    rubric = {**SUMS, "prompt": "{% for step in steps %}{{ loop.index }}. {{ step }}\n{% endfor %}{{ text }}"}
    item = Item(0, {"steps": ["1+1", "2"], "text": "so 2</s>", "question": "1+1"})
    for given in ({"rubric": {**rubric, "template_format": "jinja2"}}, {"rubric": rubric, "template_format": "jinja2"}):
        judge = Judge(model=llama, **given)
        assert judge.fields == {"steps", "text"}
        assert judge.judging.rubric.template_format == "jinja2"
        [prompt], _ = asked_by(llama, [item], **given)
        assert prompt.text == "1. 1+1\n2. 2\nso 2</s>"
        assert [prompt.text[slice(*part)] for part in prompt.text.quoted][-1] == "so 2</s>"
        again = Judge(model=llama, rubric=json.loads(json.dumps(judge.frozen_settings["rubric"])))
        assert again.judging.rubric == judge.judging.rubric
    with pytest.raises(SlurmGPUError, match="prompt of the rubric: Jinja says in line 1"):
        read_rubric({**rubric, "prompt": "{% for %}"}, "jinja2")
    with pytest.raises(SlurmGPUError, match="template_format is 'jinja'; expected 'f-string' or 'jinja2'"):
        read_rubric(rubric, "jinja")


def test_examples_have_the_items_names_and_the_same_places_for_every_run_of_an_item(llama):
    examples = [{"asked": f"{n}+{n}", "said": f"it is {2 * n}", "good": "Y"} for n in range(6)]
    settings = {
        "fewshot": examples,
        "target": "{good}",
        "num_fewshot": 2,
        "fields": {"question": "asked", "text": "said"},
        "final": "numeric",
        "rubric": {**SUMS, "prompt": "{question}?{final}"},
    }
    items = [Item(number, {"asked": "9+9", "said": "18"}, 7) for number in range(8)] + [Item(8, examples[3], 7)]
    prompts, _ = asked_by(llama, items, **settings)
    assert prompts[0].text == "9+9?18"
    known = {(f"{n}+{n}?{2 * n}", "Y") for n in range(6)}
    assert all(len(prompt.shots) == 2 and {*prompt.shots} <= known for prompt in prompts)
    assert len({prompt.shots for prompt in prompts}) > 3
    assert ("3+3?6", "Y") not in prompts[8].shots
    assert asked_by(llama, items[4:5], **settings)[0][0].shots == prompts[4].shots
    with pytest.raises(SlurmGPUError, match="fewshot: example 1: no field 'text'"):
        Judge(model=llama, **{**settings, "fewshot": [{"asked": "1", "good": "Y"}] * 2})


def test_both_orders_have_the_same_examples_and_an_item_is_none_of_its_own_in_either(llama):
    examples = [{"question": q, "text_a": "x", "text_b": "y", "good": "A"} for q in "abcd"]
    rubric = {**read_rubric("pairwise").to_json(), "fallback": False}
    settings = {"rubric": rubric, "fewshot": examples, "target": "Verdict: {good}"}
    [first, second], _ = asked_by(llama, [Item(0, {**examples[2], "text_a": "y", "text_b": "x"})], **settings)
    assert first.shots == second.shots
    assert len(first.shots) == 3
    assert not any("\nc\n" in asked for asked, _ in first.shots)
    assert first.shots[0][1] == "Verdict: A"


def loaded(model, **settings):
    return load_on_cpu(Judge(model=model, **{"rubric": SUMS, "precision": "fp32", **settings}))


@pytest.mark.parametrize("method", ["parse", "score"])
def test_a_text_that_is_too_long_is_cut_where_it_is_said_and_the_row_counts_it(llama, method):
    more = {"retries": 0} if method == "parse" else {}
    data = [{"question": "1+1", "text": "ab" * 2000 + "so 2"}, {"question": "1+1", "text": "so 2"}]
    items = [Item(number, each) for number, each in enumerate(data)]
    judge = loaded(llama, method=method, truncation_side="left", **more)
    long, short = judge(items)
    convert_row(judge.columns, long)
    assert short["n_truncated"] == 0
    # The end is left, and as much of the text as makes the prompt and its answer 2,048 tokens of one character.
    assert 4000 + len("1+1?so 2") - 2048 <= long["n_truncated"] <= 4000 + len("1+1?so 2") - 2048 + 20
    whole, _ = loaded(llama, method=method, **more)(items)
    assert "exceeds the context of 2048 tokens" in str(whole)


def test_the_report_of_several_texts_has_cut_prompts_and_the_distribution_of_scores(llama, tmp_path, slurmgpu):
    items = [
        {"question": "1+1", "text": ["ab" * 2000, "so 2", "ab" * 1500]},
        {"question": "1+1", "text": ["2", "2", "2"]},
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in items))
    (tmp_path / "rubric.toml").write_text(
        'prompt = "{{ question }}?{{ text }}"\nmethod = "score"\ntemplate_format = "jinja2"\n'
        '[verdicts]\nright = "Y"\nwrong = "N"\n[values]\nright = 1\nwrong = 0\n'
    )
    (tmp_path / "judge.toml").write_text(
        'input = "items.jsonl"\nrun_dir = "run"\nworkload.use = "judge"\n[settings]\neach = "text"\n'
        f'model = "{llama}"\nrubric = "rubric.toml"\ntruncation_side = "right"\nprecision = "fp32"\n'
        '[resources]\ngpus = 0\nexecutor = "debug"\n'
    )
    slurmgpu("submit", "judge.toml", cwd=tmp_path, expect=0)
    summary = report(tmp_path)["summary"]
    assert summary["n_truncated"] == 2
    with results.open(tmp_path / "run" / "merged.h5") as merged:
        scores = np.concatenate(merged["score"][:])
    assert summary["mean_score"] == pytest.approx(scores.mean())
    assert summary["standard_deviation"] == pytest.approx(scores.std())


# Answers of a given form.


def test_a_judge_that_must_choose_gives_a_verdict_on_every_item(llama):
    items = [Item(number, {"question": f"{number}+1", "text": str(number)}, 3) for number in range(6)]
    free = loaded(llama, retries=0)(items)
    assert [row["parse_ok"] for row in free] == [False] * 6  # a random model says no Y alone
    kept = loaded(llama, retries=0, choices=["Y", "N"])(items)
    assert [(row["how"], row["finish_reason"]) for row in kept] == [("parsed", "stop")] * 6
    assert {row["rationale"] for row in kept} <= {"Y", "N"}
    line = {**SUMS, "pattern": "is ([YN])$"}
    judge = loaded(llama, retries=0, rubric=line, regex="[a-z]{3} is [YN]", max_tokens=20)
    assert all(row["parse_ok"] and row["rationale"][3:7] == " is " for row in judge(items))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"choices": ["Y", "maybe"]},
            "choices has 'maybe', but the rubric finds no verdict in it; expected whole answers",
        ),
        ({"rubric": "yes-no", "choices": ["Yes", "No"]}, "choices is set, and method is 'score'"),
        ({"choices": ["Y"], "regex": "Y"}, "choices and regex are both set"),
        ({"regex": "Y", "stop": ["N"]}, "stop is set, but regex already defines where an answer ends"),
    ],
)
def test_a_form_that_no_verdict_could_have_is_refused(llama, settings, said):
    with pytest.raises(SlurmGPUError, match=said):
        Judge(model=llama, **{"rubric": SUMS, **settings}).place(Share(0))


# Images.


@pytest.fixture(scope="module")
def llava(tmp_path_factory, one_thread):
    return str(make_llava(tmp_path_factory.mktemp("llava")))


PICTURE = {**SUMS, "prompt": "{question} {text}?"}


def test_answers_about_images_are_judged_by_what_the_model_says_and_by_its_probabilities(llava, tmp_path):
    (tmp_path / "a.png").write_bytes(make_png(1))
    data = [{"photo": path, "question": "cat?", "text": "yes"} for path in ("a.png", "b.png")]
    data.append({"photo": make_png(2), "question": "cat?", "text": "yes"})
    settings = {"rubric": PICTURE, "images": "photo", "image_folder": str(tmp_path)}
    items = [Item(number, each) for number, each in enumerate(data)]
    engine = open_engine(EngineOptions(find_model(llava), precision="fp32", images=True), Place("cpu"))
    prompts = [Prompt(Composed("cat? yes?", ((0, 9),)), images=(make_png(number),)) for number in (1, 2)]

    judge = loaded(llava, method="score", **settings)
    rows = judge(items)
    assert judge.paths == [Path(llava), tmp_path]
    assert "b.png cannot be read: No such file" in str(rows[1])
    questions = [Question(number, each, ("Y", " Y", "N", " N"), 2) for number, each in enumerate(prompts)]
    shares = {found.id: shares_of(found) for found in engine.score(questions)}
    for number, row in enumerate((rows[0], rows[2])):
        np.testing.assert_allclose(row["probabilities"], shares[number], atol=1e-5)
    assert not np.allclose(shares[0], shares[1], atol=1e-5)

    answers = {
        found.id: found.text
        for found in engine.generate([Request(n, each, Sampling(max_tokens=4)) for n, each in enumerate(prompts)])
    }
    rows = loaded(llava, retries=0, max_tokens=4, **settings)(items)
    assert [rows[0]["rationale"], rows[2]["rationale"]] == [answers[0], answers[1]]


def test_images_are_not_for_scorers(llava):
    with pytest.raises(SlurmGPUError, match="scorer and images are both set"):
        Judge(scorer=llava, images="photo")
