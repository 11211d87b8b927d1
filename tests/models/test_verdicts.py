"""How verdicts are read, scored and counted, without a model."""

import dataclasses

import numpy as np
import pytest

from slurmgpu.errors import ItemError
from slurmgpu.llm.answers import parsing
from slurmgpu.llm.answers.metrics import wilson_interval
from slurmgpu.llm.interface.engine import EngineOptions
from slurmgpu.llm.prompts.codec import Codec
from slurmgpu.llm.prompts.questions import ask, scores_of
from slurmgpu.workload import Item
from slurmgpu.workloads.judge.rubrics import Reader, read_rubric
from slurmgpu.workloads.judge.verdicts import summarize
from slurmgpu.workloads.judge.workload import Judge
from slurmgpu.workloads.samples import has_failed
from tests.support.engines import Says
from tests.support.tiny_models import make_llama, make_tokenizer

ITEM = Item(3, {"question": "1+1", "reference": 2, "text": "2"})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_llama(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("rubric", "answer", "verdict"),
    [
        ("rating", "Rating (1-10): 8", "8"),
        ("rating", "Rating: 8\n\n(Rating 1 is worst, 10 is best)", "8"),
        ("rating", "**RATING:** 10/10", "10"),
        ("rating", "Rating: 8.0", "8"),
        ("rating", "Rating: 8.05", None),
        ("rating", "Rating: 7.5", None),
        ("rating", "Rating: 17.5", None),
        ("rating", "Rating: 4\nRating: 11", "4"),
        ("rating", "**Rating**：**4**", "4"),
        ("rating", "Rating:\n- 4", "4"),
        ("rating", "Rating: 8/10", "8"),
        ("rating", "Rating: 8 out of 10", "8"),
        ("rating", "Rating: 4/5", None),  # another scale
        ("rating", "Rating: 4 out of 5", None),
        ("rating", "Rating: 3-4", None),
        ("rating", "Rating: 3 to 4", None),
        ("rating", "Rating: **3** or **4**", None),
        ("rating", "Rating: 3½", None),
        ("rating", "Rating: 5\n\nRating scale: 1 to 10", "5"),
        ("rating", "Rating: 8 - two faults\n- 2 of them small", "8"),
        ("rating", "Rating: 8 - 1 error in units", "8"),
        ("rating", "Rating: 7 – 3 points deducted", "7"),
        ("rating", "First rating: 3.\nFinal rating: 8 - 2 small slips", "8"),
        ("rating", "Rating: 8 - 10/10 in style", "8"),
        ("rating", "Rating: 3 - 4", None),
        ("rating", "Rating: **3** – **4**.\nGood", None),
        ("rating", "Rating: 3 - 4 out of 10", None),
        ("rating", "Rating: -4", None),
        ("pairwise", "Verdict: A tie", "tie"),
        ("pairwise", "Verdict: Tie.", "tie"),
        ("pairwise", "Verdict: answer B", "b"),
        ("pairwise", "Verdict: A", "a"),
        ("pairwise", "Verdict: A and B are equal", None),
        ("pairwise", "Verdict: [[A]] or [[B]]", None),
        ("pairwise", "Verdict: A/B", None),
        ("pairwise", "Verdict: **A** = **B**", None),
        ("pairwise", "Verdict: A vs B", None),
        ("pairwise", "Verdict: A draw", None),
        ("pairwise", "Verdict: a clear win for B", None),
        ("pairwise", "Verdict: A > B", "a"),
        ("pairwise", "Verdict: A\n\nA is shorter", "a"),
        ("pairwise", "Verdict: B, a more complete answer", "b"),
        ("pairwise", "Verdict: Tie, A and B are equal", "tie"),
        ("pairwise", "Verdict：A", "a"),
        ("pairwise", "Verdict: A - B misses the point", "a"),
        ("pairwise", "Verdict: B – A is wrong", "b"),
        ("pairwise", "Verdict: A, B is wrong", "a"),
        ("pairwise", "Initial verdict: A.\nFinal verdict: B - A has a bug", "b"),
        ("pairwise", "Verdict: A provides less", None),
        ("pairwise", "Verdict: A\nClear and short", "a"),
        ("pairwise", "Verdict: A - B", None),
        ("pairwise", "Verdict: **A**, **B**.\nBoth are right", None),
        ("pairwise", "Verdict: A, B are equal", None),
        ("pairwise", "Verdict: A loses to B", None),
        ("pairwise", "Verdict: A is as good as B", None),
        ("pairwise", "Verdict: **B** is not as clear as A", None),
        ("pairwise", "Verdict: B isn't better", None),
        ("pairwise", "Verdict: Tie-breaker: A", None),
        ("pairwise", "Verdict: B.\nTie-breaker: A", "b"),
        ("pairwise", "Verdict: A wins, B loses", "a"),
        ("pairwise", "Verdict: B is better than A", "b"),
        ("pairwise", "Verdict: B is clearly the better answer", "b"),
        ("pairwise", "Verdict: A is no better", None),
        ("pairwise", "**Verdict:** [[A]]: it is right", "a"),
        ("pairwise", "<verdict>Verdict: B</verdict>", "b"),
        ("pairwise", "Verdict: Tie—both are right", "tie"),
        ("pairwise", "Verdict: A\nis worse in style alone", "a"),
        ("pairwise", "Verdict: A, as B fails", "a"),
        ("pairwise", "Verdict: B because A is as long as a novel", "b"),
        ("correctness", "VERDICT: CORRECT", "correct"),
        ("correctness", "The verdict is: Correct", "correct"),
        ("correctness", "Verdict: Correct\n\nThe verdict is based on this: nothing", "correct"),
        ("correctness", "The verdict may be incorrect.", None),
        ("correctness", "Verdict: not correct", None),
        ("correctness", 'either "Verdict: Correct" or "Verdict: Incorrect"', "incorrect"),
        ("correctness", "Verdict: Correct or Incorrect", None),
        ("correctness", "Verdict: [Correct / Incorrect]", None),
        ("correctness", "Verdict: Correct\n\nIncorrect units are no fault", "correct"),
        ("correctness", "Verdict： **Incorrect**", "incorrect"),
        ("correctness", "Verdict: Incorrect. Correct answer: 5", "incorrect"),
        ("correctness", "Verdict: Incorrect (correct answer is 5)", "incorrect"),
        ("correctness", "Verdict: **Incorrect** (Correct: 5)", "incorrect"),
        ("correctness", "Verdict: Incorrect, correct answer is 42", "incorrect"),
        ("correctness", "Verdict: Incorrect | **Correct**: 5", "incorrect"),
        ("correctness", "Verdict: Correct. Correct answer is 5", "correct"),
        ("correctness", "Verdict: Correct and correct units", "correct"),
        ("correctness", "Verdict: Correct.\nFinal verdict: Incorrect (correct answer: 5 m)", "incorrect"),
        ("correctness", "Verdict: **Correct** and **Incorrect**", None),
        ("correctness", "Verdict: 'Correct'/'Incorrect'", None),
        ("correctness", "Verdict: Correct or Incorrect, by the units", None),
    ],
)
def test_a_judge_says_its_verdict_in_many_ways(rubric, answer, verdict):
    assert Reader(read_rubric(rubric)).verdict(answer) == verdict


class Digits:
    """An engine whose tokens are characters, and that says 10 nearly always, else 9."""

    def __init__(self, folder):
        self.codec = Codec(make_tokenizer(folder, None), EngineOptions(None), 2048)

    def score(self, questions):
        for question in questions:
            begins = {"1": 0.9, "10": 0.9, "9": 0.1}
            logprobs = np.log([begins.get(choice, 1e-9) for choice in question.choices])
            yield scores_of(ask(question, self.codec), logprobs)


def test_a_rating_of_10_is_none_of_1_where_digits_are_tokens(tmp_path, model):
    judge = Judge(model=model, rubric="rating", method="score")
    judge.judging.engine = Digits(tmp_path)
    [row] = judge([ITEM])
    assert (row["verdict"], row["score"]) == ("10", pytest.approx(9.9, abs=1e-5))


def test_a_rubrics_system_text_can_be_another_or_none(model):
    given = [({}, "You are a careful and impartial grader."), ({"system": ""}, "")]
    for settings, expected in [*given, ({"system": "Grade {question}."}, "Grade 1+1.")]:
        judge = Judge(model=model, **settings)
        judge.judging.engine = Says("Verdict: Correct")
        judge([ITEM])
        assert judge.judging.engine.asked[0].prompt.system == expected
        assert judge.frozen_settings["rubric"]["system"] == settings.get("system", expected)


def test_a_pattern_that_never_ends_is_the_error_of_its_item(model, monkeypatch):
    monkeypatch.setattr(parsing, "TIME_LIMIT_S", 0.1)
    rubric = {**read_rubric("correctness").to_json(), "pattern": "(a+)+b"}
    judge = Judge(model=model, rubric=rubric)
    judge.judging.engine = Says("a" * 5000)
    [row] = judge([ITEM])
    assert isinstance(row, ItemError)
    assert str(row).startswith("pattern of the rubric '(a+)+b' took more than 0.1 s to search a text of 5000 char")


@pytest.mark.parametrize(
    ("data", "failed"),
    [
        ({"index": 3, "text": "", "kept": None, "n": 0, "error": "item_error: too dark"}, True),
        ({"index": 3, "text": None, "error": "item_error: too dark"}, True),
        ({"index": 3, "text": "", "kept": "3+4?", "error": "item_error: too dark"}, True),  # what a run keeps is there
        ({"index": 3, "text": "2", "error": "unit missing"}, False),  # data about errors
        ({"index": 3, "text": "", "error": "TypeError: no unit"}, False),
        ({"text": "", "error": "unit missing"}, False),
        ({"index": 3, "text": "", "error": None}, False),
        ({"index": 3, "text": "", "error": 1}, False),
    ],
)
def test_only_the_blank_row_of_a_merged_file_is_an_item_that_failed(data, failed):
    assert has_failed(data, ["text", "kept", "more"]) is failed


WORTH = {"a": 1.0, "tie": 0.5, "b": 0.0, None: np.nan}


class Rows:
    """What a summary needs of a merged file."""

    def __init__(self, pairs):
        self.columns = {
            "verdict": ["" if None in pair else "tie" if len({*pair}) > 1 else pair[0] for pair in pairs],
            "how": ["parsed"] * len(pairs),
            "finish_reason": ["stop"] * len(pairs),
            "score": np.array([np.mean([WORTH[verdict] for verdict in pair]) for pair in pairs]),
            "verdicts": [list(pair) for pair in pairs],
        }
        self.failed = np.zeros(len(pairs), bool)

    def __len__(self):
        return len(self.failed)

    def __getitem__(self, name):
        return self.columns[name]


def test_a_position_is_preferred_where_it_won_in_both_orders():
    """Verdicts are of the texts: what stood first won both times if they are a, then b. Beside a tie nothing tells."""
    pairs = [("a", "b"), ("a", "b"), ("b", "a"), ("a", "tie"), ("tie", "b"), ("a", "a"), ("tie", "tie"), ("a", None)]
    summary = summarize(Rows(pairs), read_rubric("pairwise"), 9, with_truth=False)
    assert summary["preferred_position"] == {"first": 2, "second": 1}
    assert (summary["agreement_rate"], summary["position_bias_rate"]) == (2 / 7, 5 / 7)


def test_a_position_is_preferred_also_where_it_won_by_more_in_one_order():
    names = {"A": 1.0, "a": 0.75, "tie": 0.5, "b": 0.25, "B": 0.0}
    rubric = {"prompt": "{text_a} or {text_b}?", "verdicts": dict(zip(names, "12345", strict=True)), "values": names}
    rubric |= {"swap": ["text_a", "text_b"], "swapped": {"A": "B", "a": "b", "b": "a", "B": "A"}}
    rows = Rows([("a", "a")] * 9)
    pairs = [("A", "B"), ("A", "b"), ("a", "B"), ("b", "A"), ("A", "a"), ("B", "b"), ("a", "tie"), ("b", "b")]
    rows.columns["verdicts"] = [[*pair] for pair in [*pairs, ("A", None)]]
    summary = summarize(rows, read_rubric(rubric), 9, with_truth=False)
    assert summary["preferred_position"] == {"first": 3, "second": 1}
    assert (summary["agreement_rate"], summary["position_bias_rate"]) == (1 / 8, 7 / 8)


def test_a_hint_says_that_most_verdicts_were_in_no_answer():
    rows, rubric = Rows([("a", "a")] * 5), read_rubric("pairwise")
    rows.columns["how"] = ["scored", "not at all", "parsed", "parsed again", "parsed"]
    assert "hint" not in summarize(rows, rubric, 9, with_truth=False)
    rows.columns["how"][2] = "scored"
    said = "3 of 5 verdicts are in no answer of the judge; 2 of these were scored instead: "
    assert summarize(rows, rubric, 9, with_truth=False)["hint"].startswith(said)
    rows.columns["finish_reason"] = ["length"] * 5
    cut, _, rest = summarize(rows, rubric, 9, with_truth=False)["hint"].partition(said)
    assert cut.startswith("5 of 5 answers were cut at max_tokens = 9")
    assert "choices or regex" in rest
    scored = dataclasses.replace(rubric, method="score")  # as was asked for
    assert "hint" not in summarize(rows, scored, 9, with_truth=False)


def test_a_win_rate_is_that_of_the_verdicts_counted_beside_it():
    """Two orders that disagree are a tie, which counts half, though the mean of a win and a tie is worth more."""
    pairs = [("a", "tie"), ("a", "tie"), ("a", "a"), ("b", None)]
    summary = summarize(Rows(pairs), read_rubric("pairwise"), 9, with_truth=False)
    assert summary["verdicts"] == {"a": 1, "b": 0, "tie": 2}
    assert (summary["win_rate"], summary["parsed_win_rate"]) == (2 / 4, 2 / 3)
    assert summary["win_rate_interval"] == wilson_interval(2, 4)
    assert summary["parsed_win_rate_interval"] == wilson_interval(2, 3)


def test_a_rubric_for_two_texts_measures_a_win_rate_unless_it_says_otherwise():
    pairwise = {"prompt": "{text_a} or {text_b}?", "verdicts": {"a": "A", "b": "B", "tie": "T"}}
    pairwise |= {"values": {"a": 1, "b": 0, "tie": 0.5}}
    assert read_rubric({**pairwise, "swap": ["text_a", "text_b"]}).measure == "win_rate"
    assert read_rubric({**pairwise, "swap": ["text_a", "text_b"], "measure": "mean"}).measure == "mean"
    assert read_rubric(pairwise).measure == "mean"


@pytest.mark.parametrize(("a", "tie", "b"), [(1, 0, -1), (5, 3, 1)])
def test_values_beyond_0_and_1_make_no_win_rate_with_an_interval(a, tie, b):
    """Of 1 and -1 the mean may lie between 0 and 1, and is still no share."""
    table = read_rubric("pairwise").to_json() | {"values": {"a": a, "tie": tie, "b": b}}
    assert table.pop("measure") == "win_rate"
    rows = Rows([("a", "a")] * 6 + [("b", "b")] * 4)
    rows.columns["score"] = np.array([a] * 6 + [b] * 4, float)
    mean = pytest.approx(0.6 * a + 0.4 * b)
    summary = summarize(rows, read_rubric(table), 9, with_truth=False)
    assert (summary["mean_score"], "win_rate" in summary) == (mean, False)
    summary = summarize(rows, read_rubric({**table, "measure": "win_rate"}), 9, with_truth=False)
    assert (summary["win_rate"], summary["parsed_win_rate"]) == (mean, mean)
    assert (summary["win_rate_interval"], summary["parsed_win_rate_interval"]) == (None, None)
