"""Answer checkers and trees of steps: what counts as the final answer, what as right, and what a step is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.answers.final_answers import number_in, reference_number
from slurmgpu.llm.answers.parsing import Labels
from slurmgpu.llm.answers.steps import Tree, split_steps
from slurmgpu.workloads.grading.checkers import open_checker


@pytest.mark.parametrize(
    ("text", "said", "value"),
    [
        ("7+5+0=12\n4+8+1=13\n#132", "132", 132),
        ("5 + 3 = 8, so\n#### 1,234.50 dollars, not 7", "1,234.50", 1234.5),
        (r"thus $\boxed{\frac{3}{4}}$ of the 9 cakes", "3/4", 0.75),
        (r"\boxed{x = 2{,}000}", "2,000", 2000),
        (r"\boxed{\text{about } 12\%}", "12%", 0.12),
        (r"\boxed{3}, no: \boxed{4}", "4", 4),
        ("#### 3\nNo:\n#### 4", "4", 4),
        (r"\boxed{3 or 4}", "4", 4),
        (r"\boxed{x = 3 + 4 = 7}", "7", 7),
        (r"\boxed{7 = x}", "7", 7),
        (r"\boxed{2\frac12}", "2 1/2", 2.5),
        (r"\boxed{1.5 \times 10^{3}}", "1.5e3", 1500),
        (r"\boxed{10^{-2}}", "1e-2", 0.01),
        (r"\boxed{5\text{ cm}^2}", "5", 5),
        (r"\boxed{90^\circ}", "90", 90),
        (r"\boxed{7\sqrt{2}}", None, None),
        (r"\boxed{(3, 4)}", None, None),
        (r"#### 3\sqrt{2}", None, None),
        ("it is x^2", None, None),
        ("it is -3.", "-3", -3),
        ("10-5", "5", 5),
        ("2 1/2 cups", "2 1/2", 2.5),
        ("that makes $45", "$45", 45),
        ("6.02e23", "6.02e23", 6.02e23),
        ("−7 °C", "-7", -7),
        ("1, 2, 3", "3", 3),
        (".5", ".5", 0.5),
        ("H2O", None, None),
        ("一共有3个和4个,所以答案是42。", "42", 42),
        ("答案是-5", "-5", -5),
        ("約1.5e3人です", "1.5e3", 1500),
        ("答案是x42", None, None),
        ("1/0", None, None),
        ("#### none of 3", "3", 3),
        ("9" * 500, None, None),
        ("", None, None),
        ("8 (since 5+3=8, step 2)", "8", 8),
        ("Step 1: 5+3.\nThe answer is 8 apples (see step 2).", "8", 8),
        ("8, because 5+3=8 in step 2", "8", 8),
        (r"\boxed{8 (from step 2)}", "8", 8),
        ("(from 2)", "2", 2),
        ("2 hours (120 minutes)", "120", 120),
        ("The answer is negative 3.", "negative 3", -3),
        (r"\boxed{-2\text{ million}}", "-2  million", -2_000_000),
        ("10 minus 5", "5", 5),
        ("# −4", "-4", -4),
        ("about $1.5 million in all", "$1.5 million", 1_500_000),
        ("2 hundred thousand people", "2 hundred thousand", 200_000),
        ("3 million-dollar houses", "3", 3),
        ("eight", "eight", 8),
        ("Minus three.", "Minus three", -3),
        (r"\boxed{\text{Twenty}}", "Twenty", 20),
        ("Eight, since five and three are that", "Eight", 8),
        ("5 + 3.\nSo the answer is **eight** apples.", "eight", 8),
        ("5 + 3 = 8\nThese are the two.", "8", 8),
        ("5 + 3 = 8\nThe number of steps is two.", "8", 8),
        ("5 + 3 = 8\nSo much for the two.", "8", 8),
        ("So the answer is 24, as the factor is two.", "24", 24),
        ("8 is the right one", "8", 8),
        ("twenty-one", None, None),
        ("two hundred", None, None),
        ("no one knows", None, None),
        ("one of them", None, None),
    ],
)
def test_the_number_that_a_text_ends_on(text, said, value):
    found = number_in(text)
    assert (found and found[0]) == said
    assert (found and float(found[1])) == value


@pytest.mark.parametrize(
    ("checker", "text", "reference", "right"),
    [
        ({"kind": "numeric"}, "so 0.5", "1/2", True),
        ({"kind": "numeric"}, "it is 50%", 0.5, True),
        ({"kind": "numeric"}, "it is 50%", 50, True),
        ({"kind": "numeric"}, "it is 50", "50%", True),
        ({"kind": "numeric"}, "it is 0.5", "50%", True),
        ({"kind": "numeric"}, "it is 50%", "50 %", True),
        ({"kind": "numeric"}, "it is 50%", 0.005, False),
        ({"kind": "numeric"}, "it is minus 3", -3, True),
        ({"kind": "numeric"}, "it is minus 3", 3, False),
        ({"kind": "numeric"}, "2 million", 2_000_000, True),
        ({"kind": "numeric"}, "2 million", 2, True),
        ({"kind": "numeric"}, "2,000,000", "2 million", True),
        ({"kind": "numeric"}, "2 million", "2 billion", False),
        ({"kind": "numeric"}, "50%", "50 million", False),
        ({"kind": "numeric"}, "it is 0.005", "50%", False),
        ({"kind": "numeric"}, "12345679", 12345678, False),
        ({"kind": "numeric", "tolerance": 1e-6}, "12345679", 12345678, True),
        ({"kind": "numeric"}, "0.333333", r"\frac13", True),
        ({"kind": "numeric"}, "1500", r"1.5 \times 10^{3}", True),
        ({"kind": "numeric"}, "2", r"The second of 3 is\n#### 2", True),
        ({"kind": "numeric"}, "1,000,000", "They earn 3 * 5\n#### 1000000", True),
        ({"kind": "numeric"}, "3.14159", 3.14159265, True),
        ({"kind": "numeric"}, "3.1415", 3.14159265, False),
        ({"kind": "numeric", "tolerance": 0.0}, "3.1415926", 3.14159265, False),
        ({"kind": "numeric", "tolerance": 0.1}, "95", 100, True),
        ({"kind": "numeric"}, r"\boxed{3!}", 3, False),
        ({"kind": "numeric"}, "It is 3!", 3, True),
        ({"kind": "numeric"}, "no idea", 4, False),
        ({"kind": "numeric", "pattern": r"Answer: (\S+)"}, "Answer: 4, from 2 and 2", 4, True),
        ({"kind": "exact"}, "I think so.\nThe  Hague.", "the hague", True),
        ({"kind": "exact"}, r"so \boxed{(A)} and no other", "A", True),
        ({"kind": "exact"}, "The Hague", "Amsterdam", False),
        ({"kind": "exact"}, "", "", False),
        (
            {"kind": "regex", "pattern": r"[Aa]nswer is \(?([A-D])"},
            "The answer is A? No, the answer is (C).",
            "c",
            True,
        ),
        ({"kind": "regex", "pattern": r"[Aa]nswer is \(?([A-D])"}, "C", "C", False),
    ],
)
def test_what_counts_as_right(checker, text, reference, right):
    kind = checker.pop("kind")
    found = open_checker(kind, **checker)
    found.check_item({"answer": reference})
    assert found.is_correct(text, {"answer": reference}) is right


def test_a_function_of_the_users_checks_answers(tmp_path):
    (tmp_path / "rules.py").write_text(
        "def even(text, item):\n    return int(text) % 2 == 0 and item['ok']\n\nnumber = 3\n"
    )
    checker = open_checker(f"{tmp_path / 'rules.py'}:even")
    assert checker.is_correct("4", {"ok": True}) is True
    assert checker.is_correct("3", {"ok": True}) is False
    with pytest.raises(ItemError, match=r"rules.py:even raised ValueError: invalid literal"):
        checker.is_correct("four", {"ok": True})
    for name, problem in [("rules.py:odd", "has no function 'odd'"), ("rule.py:even", "there is no file")]:
        with pytest.raises(SlurmGPUError, match=problem):
            open_checker(f"{tmp_path / name}")
    with pytest.raises(SlurmGPUError, match=r"no_such_module: the import of .* raised ModuleNotFoundError"):
        open_checker("no_such_module:check")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x = 1\ndef check(text, item)\n", r"bad\.py, line 2: the import of .* raised SyntaxError: expected ':'"),
        ("x = 1\n\ny = x / 0\n", r"bad\.py, line 3: the import of .* raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_of_the_users_that_cannot_be_imported_is_named_with_the_line(tmp_path, source, problem):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(SlurmGPUError, match=problem):
        open_checker(f"{tmp_path / 'bad.py'}:check")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "numerical"}, "Did you mean 'numeric'"),
        ({"kind": "regex"}, "needs pattern"),
        ({"kind": "exact", "tolerance": 0.1}, "tolerance is set, and checker is 'exact'"),
        ({"kind": "regex", "pattern": "("}, "not a regular expression"),
        ({"kind": "numeric", "tolerance": -1}, "tolerance is -1"),
        ({"kind": "numeric", "tolerance": float("nan")}, "tolerance is nan"),
    ],
)
def test_a_checker_that_cannot_be_is_refused(settings, problem):
    with pytest.raises(SlurmGPUError, match=problem):
        open_checker(settings.pop("kind"), **settings)


@pytest.mark.parametrize("text", [" ", "\n", "1", "1,111", "# ", "\\frac{", "x ", "- ", "minus ", "1 million "])
def test_a_long_answer_without_an_end_is_read_all_the_same(text):
    """Some patterns take as long as the cube of the length, and this test would not end."""
    text = (text * 100_000)[:100_000]
    for answer in (f"it is 5{text}!", f"#### {text}!", f"\\boxed{{{text}!"):
        number_in(answer)
        reference_number(answer)
        Labels(["-1", "0"]).within(answer)


def test_a_pattern_that_takes_for_ever_is_the_items_error(monkeypatch):
    monkeypatch.setattr("slurmgpu.llm.answers.parsing.TIME_LIMIT_S", 0.05)
    for kind in ("numeric", "exact", "regex"):
        with pytest.raises(ItemError, match=r"pattern .* to search a text"):
            open_checker(kind, pattern="(?:a|aa)+$").is_correct("a" * 60 + "!", {"answer": 4})


@pytest.mark.parametrize(
    "reference",
    [
        r"3\sqrt{2}",
        r"#### 3\sqrt{2}",
        "x^2",
        "2x",
        "2x + 1",
        r"\frac{\pi}{4}",
        "(3, 4)",
        "[0, 1)",
        "3-5",
        "12:30",
        "10 000",
        "10!",
        r"5 \text{ or } 6",
        "1 and 2",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        "She has no more than two dogs",  # which may be a sentence on the way
    ],
)
def test_a_reference_that_is_not_one_number_is_its_items_error(reference):
    with pytest.raises(ItemError, match='is not one number; checker = "exact"'):
        open_checker("numeric").check_item({"answer": reference})


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ("60 km/h", 60),
        ("$18", 18),
        ("5 m^2", 5),
        (r"$-\frac{3}{4}$", -0.75),
        ("x = 5", 5),
        ("eight", 8),
        ("x^2 = 9 and x > 0\nx = 3", 3),
        ("#### 18\n(since 3^2 * 2 is 18)", 18),
        ("She sold 48/2 = 24, and 3 * 8 is as many: 24", 24),
        ("So 48/2 = <<48/2=24>>24 clips\n#### 72", 72),
    ],
)
def test_a_reference_may_have_units_and_words(reference, value):
    assert reference_number(reference).value == value


@pytest.mark.parametrize(
    ("kind", "data"), [("numeric", {"answer": "n/a"}), ("numeric", {}), ("exact", {"answer": None})]
)
def test_an_item_without_a_right_answer_is_at_fault_itself(kind, data):
    with pytest.raises(ItemError, match="field 'answer'"):
        open_checker(kind).check_item(data)


@given(st.text("ab\n "), st.sampled_from(["\n", "\n\n", "a"]))
def test_steps_make_their_text_again_and_none_of_them_is_blank(text, delimiter):
    steps = split_steps(text, delimiter)
    assert delimiter.join(steps) == text
    assert len(steps) == 1 or all(step.strip() for step in steps)


def grow(tree, start, *completions):
    for completion in completions:
        tree.add(start, completion, answer=completion[-1:], correct=completion.endswith("!"), cut=False)


def test_equal_beginnings_are_one_node_and_a_path_that_ends_there_is_another():
    tree = Tree("\n", 64)
    grow(tree, 0, "a\nb\nc!", "a\nb\nd", "a\nb", "a\nb\nc!")
    assert [(node.parent, node.depth, node.text, node.leaf) for node in tree.nodes[1:]] == [
        (0, 1, "a", False),
        (1, 2, "b", False),
        (2, 3, "c!", True),
        (2, 3, "d", True),
        (1, 2, "b", True),
    ]
    assert [tree.nodes[node].prefix for node in tree.open_nodes()] == ["a\n", "a\nb\n"]
    assert [path.nodes for path in tree.paths] == [(1, 2, 3), (1, 2, 4), (1, 5), (1, 2, 3)]


def test_a_value_is_the_mean_below_each_child_as_often_as_it_was_drawn():
    tree = Tree("\n", 64)
    grow(tree, 0, "a\nx!", "a\ny", "b\nz!")
    [a, b] = tree.open_nodes(1)
    grow(tree, b, "z", "z", "z")  # b was explored further, which makes it no more likely
    values = dict(enumerate(tree.values()))
    assert values[a] == (0.5, 2)
    assert values[b] == (0.25, 4)
    assert values[0] == ((0.5 * 2 + 0.25) / 3, 6)
    assert tree.whole_text(b, "z") == "b\nz"


def test_no_two_nodes_begin_alike_wherever_their_paths_were_sampled_from():
    tree = Tree("\n", 64)
    grow(tree, 0, "a\nX", "a\n\nb\nc")
    [a, longer] = tree.open_nodes(1)
    grow(tree, a, "\nb\nd!", "Y")
    assert [tree.nodes[node].prefix for node in tree.open_nodes()] == ["a\n", "a\n\n", "a\n\nb\n"]
    assert (tree.n_drawn(a), tree.n_drawn(longer), tree.n_drawn(0)) == (2, 2, 2)
    assert tree.values()[longer] == (0.5, 2)
    grow(tree, longer, "")
    assert tree.nodes[tree.paths[-1].nodes[-1]].text == "a\n\n"


def test_paths_with_other_reasoning_share_no_nodes_where_an_engine_tells_no_tokens():
    tree = Tree("\n", 64)
    for thought, text in (("x", "a\nb!"), ("y", "a\nb"), ("x", "a\nc")):
        tree.add(0, text, answer=None, correct=text.endswith("!"), cut=False, reasoning=thought)
    assert [path.nodes[0] for path in tree.paths] == [1, 3, 1]
    assert [tree.values()[node][0] for node in (1, 3)] == [0.5, 0.0]


def test_a_path_has_no_more_steps_than_it_may():
    tree = Tree("\n", 3)
    grow(tree, 0, "a\nb\nc\nd\ne!", "a\nb\nc!")
    assert [node.text for node in tree.nodes[1:]] == ["a", "b", "c\nd\ne!", "c!"]
    assert len(tree.open_nodes()) == 2
    assert [path.is_long for path in tree.paths] == [True, False]
