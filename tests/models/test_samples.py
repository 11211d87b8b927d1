"""All texts of an item: judged and scored one by one, joined to a row, and chosen among by score and by votes."""

import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from slurmgpu import results
from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.metrics import best_of, vote, vote_weights
from slurmgpu.llm.interface.engine import Output
from slurmgpu.loader.names import BUILT_IN
from slurmgpu.shards.columns import Array, Json, Ragged, Text, convert_row
from slurmgpu.workload import Item
from slurmgpu.workloads.grading.checkers import open_checker
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.samples import Samples
from slurmgpu.workloads.score.workload import Score
from tests.support.engines import load_on_cpu
from tests.support.runs import report
from tests.support.tiny_heads import make_head
from tests.support.tiny_models import make_unloadable

OWN = {"score": Array("float32"), "n": Array("int32"), "name": Text(), "parts": Array("float32", (2,))}


def scored_by(table, failing=()):
    """A workload that knows the score of each text."""

    def rows_of(items):
        return [
            ItemError("too dark")
            if item.data["text"] in failing
            else {
                "score": table[item.data["text"]],
                "n": len(item.data["text"]),
                "name": item.data["text"],
                "parts": [1, 2],
            }
            for item in items
        ]

    return rows_of


def row_of(samples, data, rows_of):
    [row] = samples.compute([Item(0, data)], rows_of)
    return row if isinstance(row, ItemError) else convert_row(samples.columns, row) and row


def test_the_rows_of_all_texts_are_one_row_and_one_text_that_fails_costs_itself():
    samples = Samples("text", OWN)
    assert samples.columns["score"] == Ragged("float32")
    assert samples.columns["name"] == Json()
    row = row_of(samples, {"text": ["a", "bb", "c"]}, scored_by({"a": 0.5, "bb": 0.9, "c": 0.7}, failing=["bb"]))
    np.testing.assert_array_equal(row["score"], [0.5, math.nan, 0.7])
    np.testing.assert_array_equal(row["parts"], [1, 2, math.nan, math.nan, 1, 2])
    assert row["n"].tolist() == [1, 0, 1]
    assert (row["name"], row["errors"]) == (["a", None, "c"], [None, "too dark", None])
    assert (row["best"], row["best_text"], row["n_texts"]) == (2, "c", 3)
    assert str(row_of(samples, {"text": ["bb"]}, scored_by({}, failing=["bb"]))) == "too dark"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("a", "field 'text' holds 'a'; expected a list of texts"),
        ([], "field 'text' holds []; expected a list of texts"),
        (["a", 3], "entry 1 of field 'text' holds 3; expected a text, or a mapping with one"),
        (None, "field 'text' holds None; expected a list of texts"),
    ],
)
def test_what_is_no_list_of_texts_is_its_items_error(value, said):
    assert str(row_of(Samples("text", OWN), {"text": value}, scored_by({"a": 1}))) == said


def test_each_text_has_a_seed_of_its_own_whatever_is_beside_it():
    samples = Samples("text", OWN)
    seeds = [part.seed for part in samples.parts(Item(3, {"text": ["a", "b", "c"]}, run_seed=7))]
    assert len({*seeds}) == 3
    assert [part.seed for part in samples.parts(Item(3, {"text": ["x", "y"]}, run_seed=7))] == seeds[:2]


def test_votes_count_answers_and_weigh_them_by_score():
    samples = Samples("text", OWN, open_checker("numeric", reference="answer"), "answer")
    table = {"so 7": 0.2, "it is 7": 0.3, "8, I think": 0.9, "hm": 0.1}
    row = row_of(samples, {"text": [*table], "answer": "8"}, scored_by(table))
    assert (row["answers"], row["correct"]) == (["7", "7", "8", None], [False, False, True, False])
    assert (row["vote"], row["weighted_vote"], row["best_text"]) == ("7", "8", "8, I think")
    assert [row[f"{name}_correct"] for name in ("best", "vote", "weighted_vote", "any")] == [True, False, True, True]
    assert row["accuracy"] == pytest.approx(0.25)


def test_raw_scores_weigh_by_their_exponentials():
    """Three times exp(-1) is more than exp(0), and three raw scores of -1 would be less than none."""
    samples = Samples("text", OWN, open_checker("numeric", reference="answer"), "answer", is_raw=True)
    table = {"7": -1.0, "a 7": -1.0, "b 7": -1.0, "8": 0.0}
    row = row_of(samples, {"text": [*table], "answer": "7"}, scored_by(table))
    assert (row["vote"], row["weighted_vote"], row["best_text"]) == ("7", "7", "8")


def test_a_text_without_a_score_is_never_the_best_and_has_no_weight_however_high_the_others_are():
    assert best_of([math.nan, -2.0, -1.0]) == 2
    assert best_of([math.nan]) == -1
    assert vote_weights([math.nan, 1000.0, 999.0], is_raw=True) == [0.0, 1.0, math.exp(-1.0)]


def test_paths_of_a_tree_vote_by_the_samples_that_they_stand_for():
    samples = Samples("paths", OWN, open_checker("numeric"))
    paths = [{"text": "7", "correct": True}, {"text": "8", "correct": False}, {"text": "b 8", "correct": False}]
    data = {"paths": paths, "weights": [0.5, 0.25, 0.125]}
    row = row_of(samples, data, scored_by({"7": 0.1, "8": 0.1, "b 8": 0.1}))
    assert (row["vote"], row["vote_correct"]) == ("7", True)
    assert row["accuracy"] == pytest.approx(float(Fraction(4, 7)))
    row = row_of(samples, {"paths": paths}, scored_by({"7": 0.1, "8": 0.1, "b 8": 0.1}))
    assert (row["vote"], row["accuracy"]) == ("8", pytest.approx(1 / 3))


def test_a_third_and_three_ninths_are_a_tie_also_in_the_float32_of_weights():
    samples = Samples("paths", OWN, open_checker("numeric"))
    paths = [{"text": text, "correct": False} for text in ("8", "7", "8", "8", "9", "9", "9")]
    weights = np.array([1 / 9, 1 / 3, *[1 / 9] * 5], np.float32).tolist()
    row = row_of(samples, {"paths": paths, "weights": weights}, scored_by(dict.fromkeys("789", 0.1)))
    assert (row["vote"], row["weighted_vote"]) == ("8", "8")
    assert vote(["a", "b"], [-2.0, -1.0]) == 1
    assert vote(["a", "b"], [0.9999992, 0.9999999]) == 1  # sigmoids of 14 and 16: no rounding
    assert vote(["a", "b"], [1.0, float("inf")]) == 1
    assert vote([None, None], [0.5, 0.5]) == -1


@pytest.mark.parametrize("reference", ["answer", None])
def test_a_text_that_was_cut_is_wrong_and_has_no_vote(reference):
    path = {"text": "so 7", "cut": True, "correct": reference is not None}
    data = {"paths": [path, {"text": "it is 8", "cut": False, "correct": False}], "answer": "7"}
    samples = Samples("paths", OWN, open_checker("numeric", reference="answer"), reference)
    row = row_of(samples, data, scored_by({"so 7": 0.9, "it is 8": 0.1}))
    assert (row["answers"], row["correct"], row["vote"], row["weighted_vote"]) == ([None, "8"], [False] * 2, "8", "8")
    assert not any(row[f"{name}_correct"] for name in ("best", "vote", "weighted_vote", "any"))

    samples = Samples("text", OWN, open_checker("numeric", reference="answer"), reference, right=lambda row: True)
    data = {"text": ["so 7", "it is 7"], "finish_reason": ["length", "stop"], "answer": "7"}
    row = row_of(samples, data, scored_by({"so 7": 0.9, "it is 7": 0.1}))
    assert (row["answers"], row["correct"], row["accuracy"]) == ([None, "7"], [False, True], pytest.approx(0.5))


@pytest.mark.parametrize("weights", [[0, 0], ["1", "0"], [-1, 2], [math.nan, 1], [math.inf, 1], [10**400, 1], [1]])
def test_a_field_weights_that_has_none_leaves_equal_shares(weights):
    samples = Samples("text", OWN, open_checker("numeric", reference="answer"), "answer")
    row = row_of(samples, {"text": ["7", "8"], "answer": "7", "weights": weights}, scored_by({"7": 1, "8": 0}))
    assert row["accuracy"] == pytest.approx(0.5)


@pytest.fixture(scope="module")
def unloadable(tmp_path_factory):
    return str(make_unloadable(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rubric": "pairwise", "each": "text"}, "the rubric compares two; expected a rubric without swap"),
        ({"each": "text", "truth": "gold"}, "truth is one verdict for each item"),
        ({"reference": "answer"}, "and each is not set"),
        ({"reference": "answer", "each": "text"}, "and final is not set"),
    ],
)
def test_what_cannot_be_asked_of_each_text_is_refused(unloadable, settings, said):
    with pytest.raises(SlurmGPUError) as raised:
        Judge(model=unloadable, **settings)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("use", "settings", "each", "said"),
    [
        (
            "collect",
            {},
            "paths",
            r'Set final = "numeric", the checker of first: its paths say which of them are right\.',
        ),
        ("collect", {"checker": "regex", "pattern": "A|B"}, "paths", r'Set final = "regex", pattern = "A\|B", the'),
        ("collect", {}, "steps", None),
        ("generate", {}, "text", None),
    ],
)
def test_planning_says_what_best_of_n_needs_where_texts_have_no_votes(tmp_path, unloadable, use, settings, each, said):
    plan = {"name": "first", "workload": BUILT_IN[use], "settings": settings, "keep": {"gold": "gold"}}
    (tmp_path / "run.json").write_text(json.dumps(plan))
    files = [tmp_path / "merged.h5"]
    rubric = {**RUBRIC, "measure": "mean"}
    lines = Judge(model=unloadable, rubric=rubric, each=each).check_input(files, 3)
    assert (lines == []) if said is None else re.search(said, *lines)
    judge = Judge(model=unloadable, rubric=rubric, each=each, final="numeric")
    if use == "generate":
        with pytest.raises(SlurmGPUError, match=r"nothing says which are right\. Set reference .* has kept gold\."):
            judge.check_input(files, 3)
    else:
        assert judge.check_input(files, 3) == []
    assert Judge(model=unloadable, rubric=RUBRIC, each=each, final="numeric").check_input(files, 3) == []


class Sums:
    """An engine that judges a text by whether it has the reference in it."""

    def generate(self, requests):
        for request in requests:
            prompt = request.prompt.text
            right = prompt.rpartition("is ")[2].strip() == prompt.partition("=")[2].split()[0]
            yield Output(request.id, "Y" if right else "N", finish_reason="stop")


RUBRIC = {
    "prompt": "={reference} is {text}",
    "verdicts": {"right": "Y", "wrong": "N"},
    "values": {"right": 1, "wrong": 0},
    "measure": "accuracy",
    "pattern": "(Y|N)",
}


def test_every_path_of_a_collected_question_is_judged(unloadable):
    judge = Judge(model=unloadable, rubric=RUBRIC, each="paths", final="numeric", fields={"reference": "answer"})
    assert judge.fields == {"paths", "answer"}
    judge.judging.engine = Sums()
    paths = [{"text": text, "answer": text, "correct": text == "132"} for text in ("131", "132", "131")]
    items = [
        Item(0, {"answer": "132", "paths": paths}),
        Item(1, {"index": 1, "error": "item_error: too dark", "paths": None}),
    ]
    row, failed = judge(items)
    convert_row(judge.columns, row)
    assert row["verdict"] == ["wrong", "right", "wrong"]
    assert row["score"].tolist() == [0, 1, 0]
    assert (row["best_text"], row["vote"], row["weighted_vote"]) == ("132", "131", "132")
    assert str(failed) == "the judged item failed: item_error: too dark"


def test_without_a_reference_a_right_text_is_one_that_the_rubric_says_is_right(unloadable):
    judge = Judge(model=unloadable, rubric=RUBRIC, each="text", final="numeric", fields={"reference": "answer"})
    judge.judging.engine = Sums()
    [row] = judge([Item(0, {"answer": "132", "text": ["131", "132"]})])
    assert row["correct"] == [False, True]


def test_a_reward_model_chooses_among_the_answers_of_a_run(slurmgpu, tmp_path, one_thread):
    """`generate` with n = 4, then `score` of all four, and a report with each way to choose among them."""
    model = make_head(tmp_path / "model", "bert", num_labels=1)
    texts = [["it is 7", "so 8", "hm"], ["8", "8", "7"], "no list"]
    items = [{"question": "3+4", "text": text, "answer": "7"} for text in texts]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(each) + "\n" for each in items))
    (tmp_path / "best.toml").write_text(
        f'input = "items.jsonl"\nrun_dir = "run"\nworkload.use = "score"\n[settings]\nmodel = "{model}"\n'
        'pair = ["{question}", "{text}"]\neach = "text"\nfinal = "numeric"\nreference = "answer"\nprecision = "fp32"\n'
        '[resources]\ngpus = 0\nexecutor = "debug"\n'
    )
    slurmgpu("submit", "best.toml", cwd=tmp_path, expect=0)
    alone = load_on_cpu(Score(model=str(model), pair=["{question}", "{text}"], precision="fp32"))
    with results.open(tmp_path / "run" / "merged.h5") as merged:
        assert merged.failed.tolist() == [False, False, True]
        for row, item in enumerate(items[:2]):
            expected = alone([Item(0, {**item, "text": text}) for text in item["text"]])
            scores = [each["score"] for each in expected]
            np.testing.assert_allclose(merged["score"][row], scores, atol=1e-4)
            assert merged["best"][row] == int(np.argmax(scores))
        best = [bool(each) for each in merged["best_correct"][:2]]
    summary = report(tmp_path)["summary"]
    assert (summary["n_items"], summary["n_failed"], summary["n_texts"]) == (3, 1, 6)
    assert summary["accuracy"] == pytest.approx((1 / 3 + 1 / 3) / 3)
    assert summary["best_accuracy"] == pytest.approx(sum(best) / 3)
    assert summary["vote_accuracy"] == pytest.approx(1 / 3)
    assert summary["any_accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("use", ["generate", "classify", "judge", "collect", "score"])
def test_a_kept_field_with_the_name_of_a_column_is_told_at_planning_and_renamed(tmp_path, unloadable, use):
    from slurmgpu.plan.planner import draft_run

    own = {
        "generate": ('prompt = "{q}"\n', "text"),
        "classify": ('prompt = "{q}"\nlabels = ["a", "b"]\n', "label"),
        "judge": ('fields = {question = "q", reference = "q", text = "q"}\n', "verdict"),
        "collect": ('prompt = "{q}"\nreference = "q"\n', "steps"),
        "score": ('prompt = "{q}"\nlabels = ["a", "b"]\nactivation = "none"\n', "label"),
    }
    settings, clash = own[use]
    model = unloadable if use != "score" else make_head(tmp_path / "model")
    (tmp_path / "items.jsonl").write_text(json.dumps({"q": "1", clash: "2"}) + "\n")
    file = tmp_path / "run.toml"
    head = f'input = "items.jsonl"\nrun_dir = "run"\nworkload.use = "{use}"\nresources.gpus = 0\n'
    body = f'[settings]\nmodel = "{model}"\nkeep = ["{clash}"]\n{settings}'
    file.write_text(head + body)
    with pytest.raises(SlurmGPUError, match=rf"rename = \{{{clash} = "), draft_run(file):
        pass
    file.write_text(head + f'rename = {{{clash} = "input_{clash}"}}\n' + body)
    with draft_run(file) as draft:
        assert f"input_{clash}" in draft.plan.columns
