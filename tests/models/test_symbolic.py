"""Answers compared as mathematical expressions, by math-verify in a process that can be ended."""

import signal
import socket
import sys

import numpy as np
import pytest

from slurmgpu.errors import ItemError, SlurmGPUError
from slurmgpu.llm.interface.engine import Output
from slurmgpu.workload import Item
from slurmgpu.workloads.collect.workload import Collect
from slurmgpu.workloads.grading import sandbox, symbolic
from slurmgpu.workloads.grading.checkers import open_checker
from slurmgpu.workloads.grading.symbolic import Symbols
from tests.support.tiny_models import make_unloadable


@pytest.fixture(scope="module")
def checker():
    return open_checker("math")


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (r"so it is $\boxed{2\sqrt{2}}$.", r"\sqrt{8}", True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{x^2+2x+2}", "(x+1)^2", False),
        ("The answer is $x = 3$", "3", True),
        ("#### 0.5", r"$\frac12$", True),
        ("#### 42 apples", "They have 6 * 7.\n#### 42", True),
        ("Thus $2, 1$", r"\{1, 2\}", True),
        (r"\boxed{(1, 3)}", "(1, 2)", False),
        (r"\boxed{(-\infty, 3]}", r"x \le 3", True),
        (r"\boxed{x \le 3}", r"(-\infty, 3]", False),  # the right answer goes first: it is no interval in the library
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        (r"It costs \boxed{\$18.90}.", "18.90", True),
        (r"\boxed{32348}", r"\$32,348", True),
        (r"#### \$5", r"\$6", False),
        (r"#### \begin{pmatrix}1\\(2)\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
        ("The answer is **42**.", "42", True),
        ("**Answer:** **1/2.**", r"\frac{1}{2}", True),
        ("#### **10.**", "10", True),
        ("#### 70,000 dollars", "70000", True),
        (r"\boxed{24 big marbles}", "24 marbles", True),
        (r"\boxed{3 sqrt(2)}", "3", False),
        (r"\boxed{3 log x}", "3", False),
        (r"\boxed{3 million}", "3", False),
        (r"\boxed{10 percent}", "0.1", True),
        (r"\boxed{2 theta}", "2", False),
        (r"\boxed{3 and a half}", "3", False),
        (r"\boxed{30 miles per hour}", "30", True),
        ("The answer is −3", "-3", True),
        (r"$\boxed{x−2}$", "−2+x", True),
        ("I do not know", "1", False),
        ("it is 7", 7, True),
    ],
)
def test_answers_that_are_equal_as_expressions_are_right(checker, text, gold, right):
    checker.check_item({"answer": gold})
    assert checker.is_correct(text, {"answer": gold}) is right


def test_the_answer_is_what_is_marked_or_the_last_expression(checker):
    found = [checker.answer(text) for text in (r"a \boxed{x+1} b", "#### 3x\nmore", "with $x$ it is $x^2$.", "none")]
    assert found == ["x+1", "3x", "x^2", None]
    assert open_checker("math", pattern=r"=> (.*)").answer("=> y+1\n$x$") == "y+1"


def test_votes_count_equal_expressions_together(checker):
    alike = (
        [r"\frac{1}{2}", "0.5", "1/2", r"\frac{2}{4}"],
        ["x(x+1)", "x^2 + x", "y = x^2+x"],
        [r"2\sqrt{2}", r"\sqrt{8}"],
        [r"\$5", "5", "$5$"],
    )
    assert [len({checker.normal(answer) for answer in answers}) for answers in alike] == [1] * len(alike)
    assert len({checker.normal(answers[0]) for answers in alike}) == len(alike)
    assert checker.normal("") == ""


def test_an_item_whose_right_answer_is_no_expression_is_told(checker):
    with pytest.raises(ItemError, match="no right answer in field 'answer'"):
        checker.check_item({"question": "1"})
    with pytest.raises(ItemError, match="field 'answer' holds '', where math-verify finds no expression"):
        checker.check_item({"answer": ""})


def test_what_takes_for_ever_is_not_right_and_the_next_answer_is(caplog, monkeypatch):
    monkeypatch.setattr(symbolic, "CPU_S", 1)
    symbols = Symbols()
    assert symbols.are_equal(r"\boxed{2^{61} - 1}", r"\boxed{2305843009213693951}")
    first = symbols.start()
    with caplog.at_level("WARNING"):
        assert not symbols.are_equal(r"\boxed{(x+y+z+1)^{200}}", r"\boxed{(x+y+z+1)^{199} (x+y+z+2)}")
    assert "math-verify took too long for" in caplog.text
    assert first.poll() in (-signal.SIGXCPU, 128 + signal.SIGXCPU)  # bubblewrap says it as a shell does
    assert symbols.are_equal(r"\boxed{1/2}", r"\boxed{0.5}")
    assert symbols.start() is not first


def test_a_process_that_was_killed_is_started_again_and_signals_of_jobs_do_not_end_it():
    symbols = Symbols()
    first = symbols.start()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        first.send_signal(each)
    assert symbols.written("so $x$") == "x"
    assert symbols.start() is first
    first.kill()
    first.wait()
    assert symbols.written("so $x$") == "x"


def test_an_image_without_the_library_is_told_its_extra(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")  # no bubblewrap, in which the folder is not there
    with pytest.raises(SlurmGPUError, match=r"needs the package math-verify.*pip install 'slurmgpu\[math\]'"):
        open_checker("math").load()


def test_paths_are_checked_and_counted_by_their_expressions(tmp_path):
    texts = iter([r"so \boxed{2\sqrt{2}}", r"\boxed{\sqrt{8}}", r"\boxed{\sqrt{9}}"])

    class Engine:
        def generate(self, requests):
            for request in requests:
                yield Output(request.id, next(texts), tokens=np.arange(3))

    workload = Collect(
        model=str(make_unloadable(tmp_path)), prompt="{question}", paths=3, rollouts=0, checker="math", keep=[]
    )
    workload.engine = Engine()
    [row] = workload([Item(0, {"question": "?", "answer": r"2\cdot\sqrt{2}"}, 5)])
    assert row["rewards"] == [1.0, 1.0, 0.0]
    assert (row["vote"], row["vote_correct"]) == (r"2\sqrt{2}", True)


LOOK = r"""
import json, os, pathlib, socket, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    wanted, text = json.loads(line)
    try:
        if wanted == "written":
            found = pathlib.Path(text).read_text()
        else:
            with socket.create_connection(("127.0.0.1", int(text)), 1):
                found = True
    except OSError as error:
        found = type(error).__name__
    print(json.dumps({"answer": [found, os.environ.get("A_SECRET")]}), flush=True)
"""


def test_where_there_is_bubblewrap_expressions_are_evaluated_apart_and_elsewhere_as_before(tmp_path, monkeypatch):
    """With a process in the place of math-verify's, which says what it sees."""
    try:
        sandbox.check()
    except SlurmGPUError as error:
        pytest.skip(str(error))
    (tmp_path / "data").write_text("secret")
    monkeypatch.setenv("A_SECRET", "key")
    monkeypatch.setattr(Symbols, "_alone", [sys.executable, "-c", LOOK])
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        apart = Symbols()
        assert apart.written(str(tmp_path / "data")) == ["FileNotFoundError", None]
        assert apart._ask("has", port) == ["ConnectionRefusedError", None]
        monkeypatch.setenv("PATH", "/nowhere")
        alone = Symbols()
        assert alone.written(str(tmp_path / "data")) == ["secret", "key"]
        assert alone._ask("has", port) == [True, "key"]


def test_a_bubblewrap_that_fails_is_done_without(tmp_path, monkeypatch, caplog):
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level("INFO"):
        assert Symbols().written("so $x$") == "x"
    assert "its process ended with exit code 7" in caplog.text
