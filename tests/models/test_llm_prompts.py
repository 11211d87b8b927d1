"""What a model is asked, what its answers are read as, and the metrics of labels: nothing here needs a model."""

import subprocess
import sys

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers import metrics
from slurmgpu.llm.answers.parsing import Labels, check_labels, compile_pattern, json_field, search_last
from slurmgpu.llm.prompts.jinja_templates import JinjaTemplate
from slurmgpu.llm.prompts.templates import Prompts, Template

DATA = {"text": "cats", "n": 3, "half": 0.5, "choices": ["a", "b"], "meta": {"title": "T", "ids": [7, 8]}, "no": None}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "so?"}]


# Templates


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {text}\nA:", "Q: cats\nA:"),
        ("{text}{n} {half}", "cats3 0.5"),
        ("{choices[0]}/{choices[-1]}", "a/b"),
        ("{meta[title]} {meta[ids][1]}", "T 8"),
        ("{choices} {meta}", '["a", "b"] {"title": "T", "ids": [7, 8]}'),
        ('{{"label": "{text}"}}', '{"label": "cats"}'),
        ("{{{{{n}}}}}", "{{3}}"),
    ],
)
def test_a_template_is_filled_in(template, text):
    assert Template(template).render(DATA) == text


def test_numbers_and_arrays_of_numpy_are_shown_as_those_of_python():
    assert Template("{x} {y}").render({"x": np.int64(3), "y": np.array([1, 2])}) == "3 [1, 2]"


@pytest.mark.parametrize(
    "template", ["{", "a } b", "{}", "{text!r}", "{n:.2f}", '{"label": 1}', "{choices[]}", "{ text }x{"]
)
def test_a_text_that_is_no_template_is_refused(template):
    with pytest.raises(SlurmGPUError, match=r"^system: found .* in line 2; expected a field .* write \{\{ and \}\}\.$"):
        Template(f"first\n{template}", "system")


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{txt}", "no field 'txt'. Did you mean 'text'?"),
        ("{choices[2]}", "field 'choices' is a list of 2 entries, so it has no [2]"),
        ("{choices[x]}", "field 'choices' is a list of 2 entries, so it has no [x]"),
        ("{meta[tittle]}", "field 'meta' has no [tittle]. Did you mean 'title'?"),
        ("{text[0]}", "field 'text' holds 'cats'; expected a list or a table with [0]"),
        ("{no}", "field 'no' is null"),
    ],
)
def test_an_item_without_what_a_template_takes_is_an_error_of_that_item(template, sentence):
    with pytest.raises(ItemError) as raised:
        Template(template).render(DATA)
    assert str(raised.value) == sentence


# Prompts


def test_the_fields_of_prompts_and_templates_cannot_be_changed():
    for own in (Prompts("{text} {choices}", given={"choices": "a"}), JinjaTemplate("{{ text }}{{ range(3) }}")):
        assert (type(own.fields), own.fields) == (frozenset, {"text"})


def test_a_template_is_a_plain_prompt_that_may_have_a_system_prompt():
    assert Prompts("{text}?").of(DATA).text == "cats?"
    chat = Prompts("{text}?", system="Be {n}.").of(DATA)
    assert (chat.system, chat.text, chat.messages) == ("Be 3.", "cats?", ())


def test_messages_are_taken_from_their_field():
    assert Prompts(messages="chat").of({"chat": CHAT}).messages == tuple(CHAT)
    marked = [{**message, "tool_calls": None, "id": 3} for message in CHAT]
    assert Prompts(messages="chat").of({"chat": marked}).messages == tuple(CHAT)
    with_system = Prompts(messages="chat", system="Short.").of({"chat": CHAT}).messages
    assert with_system == ({"role": "system", "content": "Short."}, *CHAT)


ANSWERED = [*CHAT, {"role": "assistant", "content": "it is"}]


def test_an_answer_at_the_end_of_a_chat_is_not_shown_unless_asked():
    with pytest.raises(ItemError, match=r"'chat' ends with an assistant turn.* last = \"drop\".* \"continue\""):
        Prompts(messages="chat").of({"chat": ANSWERED})
    dropped = Prompts(messages="chat", last="drop").of({"chat": ANSWERED})
    assert (dropped.messages, dropped.continues) == (tuple(CHAT), False)
    dropped = Prompts(messages="chat", last="drop").of({"chat": [*ANSWERED, ANSWERED[-1]]})
    assert (dropped.messages, dropped.continues) == (tuple(ANSWERED), False)  # as in a log of an agent
    continues = Prompts(messages="chat", last="continue")
    continued = continues.of({"chat": ANSWERED})
    assert (continued.messages, continued.continues) == (tuple(ANSWERED), True)
    assert continues.length({"chat": ANSWERED}) == 12
    for last in ("drop", "continue"):
        assert Prompts(messages="chat", last=last).of({"chat": CHAT}).messages == tuple(CHAT)
        with pytest.raises(ItemError, match="has only an assistant turn"):
            Prompts(messages="chat", last=last).of({"chat": ANSWERED[-1:]})


@pytest.mark.parametrize(
    ("chat", "sentence"),
    [
        ("hi", "field 'chat' holds 'hi'; expected a list"),
        ([], "field 'chat' holds []; expected a list"),
        (["hi"], "message 0 of field 'chat' is 'hi'; expected \"role\" and \"content\""),
        ([CHAT[0], {"role": "bot", "content": ""}], "message 1 of field 'chat' has the role 'bot'; expected one of"),
        ([{"role": "user", "content": 3}], "message 0 of field 'chat' has 3; expected a text"),
        (
            [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}],
            "message 1 of field 'chat' has tool_calls, which the prompt would lack",
        ),
        ([{"role": "system", "content": ""}], "begins with a system message, and system is also set"),
    ],
)
def test_messages_that_are_no_chat_are_an_error_of_that_item(chat, sentence):
    with pytest.raises(ItemError) as raised:
        Prompts(messages="chat", system="Short.").of({"chat": chat})
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "neither is set"),
        ({"prompt": "{a}", "messages": "m"}, "both are set"),
        ({"messages": "m", "last": "cut"}, "last is 'cut'; expected 'drop'"),
        ({"prompt": "{a}", "last": "drop"}, "last = 'drop' needs messages, which is not set"),
        ({"prompt": "Say something."}, "has no field, so it is the same for all items"),
        ({"prompt": "Which of {labels}?", "given": ["labels"]}, "has no field"),
    ],
)
def test_settings_that_make_no_prompt_are_refused(settings, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        Prompts(**settings)


def test_a_prompt_without_an_item_has_a_word_in_place_of_its_fields():
    prompts = Prompts("{labels}: {choices[0]}, {text}", system="{n}", given={"labels": "a, b"})
    filled = prompts.fill("N/A")
    assert (filled.system, filled.text) == ("N/A", "a, b: N/A, N/A")


def test_a_prompt_has_a_length_to_sort_by_also_where_an_item_has_none():
    assert Prompts("{text}").length(DATA) == 4
    assert Prompts(messages="chat").length({"chat": CHAT}) == 7
    assert Prompts("{text}").length({}) == 0


# Parsing


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("hate", "hate"),
        (" **Hate**.\n", "hate"),
        ("I first thought ok.\nLabel: hate speech", "hate speech"),
        ("It is hate, surely", "hate"),
        ("ok or hate", None),  # one of several would be a guess
        ("ok, hate\nso\nok", "ok"),  # the last line alone is one
        ("ok, hate\nso\nok\n \n", "ok"),
        ("hateful", None),
        ("non-hate", None),
        ("", None),
    ],
)
def test_a_label_is_found_as_a_word_and_never_guessed(text, label):
    assert Labels(["hate", "hate speech", "ok"]).within(text) == label


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Sentiment: −1", "-1"),
        ("Sentiment: –1.", "-1"),
        ("The label is **−1.0**", "-1"),
        ("score: - 1", "-1"),
        ("Sentiment: minus 1", "-1"),
        ("it is Negative 1, surely", "-1"),
        ("I pick 1 – surely", "1"),
        ("It is 1\n- 90 % sure", "1"),
        ("Sentiment - 1", None),  # a minus, or a dash
        ("between −1 and 1", None),
        ("I first said 1.\nIt is −3", None),
    ],
)
def test_a_label_that_is_a_number_is_named_with_its_sign(text, label):
    assert Labels(["-1", "0", "1"]).within(text) == label
    own = Labels(["−1", "0", "1"]).within(text)  # a label of the user's may be written with the sign of mathematics
    assert own == ("−1" if label == "-1" else label)


@pytest.mark.parametrize(
    ("names", "text", "label"),
    [
        ("12345", "5/5", "5"),
        ("12345", "4/5", None),
        ("12345", "Score: −3", None),
        ("12345", "Rating – 3", "3"),
        ("12345", "Rating:\n- 4", "4"),
        ("12345", "Score –3", "3"),  # a dash, as no label is negative
        ("12345", "Rating–3", "3"),
        ("12345", "Score: –3", None),
        ("12345", "Score −3", None),
        ("01", "Class: negative 1", "1"),
        ("01", "Class: minus 1", None),
        (["A-1", "1"], "It is A–1", "A-1"),
        ("12345", "on a scale of 1–5 it is 4", "4"),
        (["0", "1–2", "3–5"], "It is 3–5, surely", "3–5"),
        ("18", "I would say 1, or more:\nEight", "8"),
        (["1", "1.0"], "1.00", None),
        (["1.5%", "2%"], "It is 1.5% of it", "1.5%"),
        (["1.5 million", "2 million"], "It is 1.5 million", "1.5 million"),
    ],
)
def test_a_label_that_is_a_number_is_not_a_part_of_another(names, text, label):
    assert Labels(names).within(text) == label


def test_case_counts_where_labels_differ_in_nothing_else():
    assert Labels(["A", "a"]).within("It is a") == "a"
    assert Labels(["(a)", "(b)"]).within("I say (B), yes") == "(b)"


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"Label: (\w+)", "Label: a\nLabel: b", "b"),
        (r"^#\d+$", "x\n#12\n#34\ny", "#34"),
        (r"a(b)?", "ab a", "b"),  # the last match that has the group
        (r"z", "abc", None),
    ],
)
def test_the_last_match_of_a_pattern_counts(pattern, text, found):
    assert search_last(compile_pattern(pattern), text) == found


@pytest.mark.parametrize(
    ("pattern", "sentence"), [("(", "not a regular expression"), ("(a)(b)", "has 2 groups; expected one")]
)
def test_a_pattern_that_tells_nothing_is_refused(pattern, sentence):
    with pytest.raises(SlurmGPUError, match=sentence):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('```json\n{"label": "a", "why": {"label": "x"}}\n```', "a"),
        ('{"label": "a"} no: {"label": "b"}', "b"),
        ('{oops {"label": 3}', 3),
        ('{"other": 1}', None),
        ('{"label": ', None),
        ("{" * 5000, None),
        ('{"a":' * 5000, None),
    ],
)
def test_a_field_is_read_from_the_last_json_object_that_has_it(text, found):
    assert json_field(text, "label") == found


@pytest.mark.parametrize("labels", [["a"], ["a", "a"], ["a", " "]])
def test_labels_that_leave_no_choice_are_refused(labels):
    with pytest.raises(SlurmGPUError, match="labels"):
        check_labels(labels)


# Metrics


def test_metrics_are_those_of_the_books():
    pairs = {("a", "a"): 8, ("a", "b"): 1, ("a", ""): 1, ("b", "a"): 2, ("b", "b"): 4, ("z", "a"): 5}
    counts = metrics.count_matrix(pairs, ["a", "b", "c"])
    assert counts.tolist() == [[8, 1, 0, 1], [2, 4, 0, 0], [0, 0, 0, 0]]
    found = metrics.class_metrics(counts)
    assert found["precision"] == [8 / 10, 4 / 5, None]
    assert found["recall"] == [8 / 10, 4 / 6, None]
    assert found["f1"] == [0.8, 8 / 11, None]  # 2 tp / (2 tp + fp + fn)
    assert metrics.macro_f1(counts) == pytest.approx((0.8 + 8 / 11) / 2)
    rates = metrics.label_rates(counts, 0)
    assert rates == {"predicted_rate": 10 / 16, "true_positive_rate": 0.8, "false_positive_rate": 2 / 6}


def test_what_failed_and_what_has_no_label_counts_as_wrong():
    counts = metrics.count_matrix({("a", "a"): 6, ("b", ""): 2}, ["a", "b"])
    summary = metrics.classification_summary(counts, ["a", "b"], n_failed=2)
    assert summary["accuracy"] == 0.6
    assert summary["confusion"] == {"a": {"a": 6, "b": 0, "(none)": 0}, "b": {"a": 0, "b": 0, "(none)": 2}}
    assert summary["by_label"]["b"] == {"n": 2, "precision": None, "recall": 0.0, "f1": 0.0}


def test_the_agreement_with_true_labels_is_that_of_the_items_with_both():
    pairs = {("a", "a"): 20, ("a", "b"): 5, ("b", "a"): 10, ("b", "b"): 15, ("b", ""): 7}
    summary = metrics.classification_summary(metrics.count_matrix(pairs, ["a", "b"]), ["a", "b"], n_failed=3)
    assert summary["kappa"] == pytest.approx(0.4)


def test_nothing_counted_is_undefined_and_no_error():
    summary = metrics.classification_summary(metrics.count_matrix({}, ["a", "b"]), ["a", "b"])
    assert summary["accuracy"] is summary["accuracy_interval"] is summary["macro_f1"] is None
    assert metrics.cohen_kappa(np.zeros((2, 2), int)) is None


def test_wilsons_interval_is_that_of_the_literature():
    # Newcombe 1998, table I: 81 of 263, and 0 of 20.
    assert metrics.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert metrics.wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert metrics.wilson_interval(20, 20)[1] == 1.0
    assert metrics.wilson_interval(0, 0) is None


def test_an_interval_of_wins_that_counts_ties_as_halves_covers_the_win_rate():
    """How often, over many comparisons of 40 pairs: of wins, ties and losses, and of ties alone."""
    rng = np.random.default_rng(0)
    for chances in ([0.5, 0.3, 0.2], [0.05, 0.1, 0.85], [0.0, 1.0, 0.0]):
        rate = np.dot(chances, [1, 0.5, 0])
        won = rng.multinomial(40, chances, 2000) @ [1, 0.5, 0]
        intervals = [metrics.win_rate(float(each), 40)["win_rate_interval"] for each in won]
        assert np.mean([low <= rate <= high for low, high in intervals]) >= 0.95
    assert metrics.win_rate(1.5, 3, "parsed_") == {
        "parsed_win_rate": 0.5,
        "parsed_win_rate_interval": metrics.wilson_interval(1.5, 3),
    }
    assert metrics.win_rate(2.0, 3, are_shares=False) == {"win_rate": 2 / 3, "win_rate_interval": None}
    assert metrics.win_rate(0.0, 0) == {"win_rate": None, "win_rate_interval": None}


def test_cohens_kappa_is_agreement_beyond_chance():
    assert metrics.cohen_kappa(np.array([[20, 5], [10, 15]])) == pytest.approx(0.4)
    assert metrics.cohen_kappa(np.array([[7, 0], [0, 0]])) is None  # chance alone explains it


def test_none_of_it_imports_torch():
    code = "import sys, slurmgpu.workloads.generate.workload, slurmgpu.workloads.classify.workload; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "tokenizers", "huggingface_hub"} & set(done.stdout.split())
